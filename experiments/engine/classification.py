"""The classification task, which all experiments of the paper share except needle in a haystack."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from elsaa_jax import ElsaaConfig
from elsaa_jax.checks import check_choice
from elsaa_jax.layers.spec import ATTENTION_KINDS
from elsaa_jax.types import AttentionKind
from experiments.engine import classifier
from experiments.engine.classifier import Classifier, ClassifierConfig
from experiments.engine.config import PART_OF_RUN, Stage
from experiments.engine.data.examples import Examples, Split
from experiments.engine.presets import PresetName
from experiments.engine.stats import wilson_interval
from experiments.engine.transformer import count_parameters

TOKENS_AT_A_TIME = 32_768
MOST_OF_TRAINING = 2000  # largest number of training examples that are evaluated
VALIDATION_EXAMPLES = 64
ROW_FIELDS = (
    *("task", "attention", "seed", "preset", "length", "parameters", "train_accuracy", "test_accuracy"),
    *("n_test", "low", "high", "evaluation_seconds"),
)


@dataclasses.dataclass(frozen=True)
class Classification:
    """A task that trains a classifier and counts its right answers on training and on test examples.

    Attributes:
      task: Name of the task in results.
      preset: Name of the preset in results.
      attention: Kind of the attention.
      config: Configuration of the attention.
      sizes: Sizes of the model.
      data: Examples of the task.
      seed: Random seed of the order of the examples.
      evaluated: Number of test examples that are evaluated, drawn at random. None evaluates all. As many training
        examples are evaluated, up to 2,000.
      label_smoothing: Label smoothing of the loss.
    """

    task: str
    preset: PresetName
    attention: AttentionKind
    config: ElsaaConfig
    sizes: ClassifierConfig
    data: Any
    seed: int
    evaluated: int | None = dataclasses.field(default=None, metadata={PART_OF_RUN: False})
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, ATTENTION_KINDS)

    @property
    def examples(self) -> Examples:
        """Examples of the task, typed by their protocol."""
        return self.data

    @property
    def model(self) -> Classifier:
        """The classifier with this attention."""
        examples = self.examples
        return Classifier(self.sizes, examples.num_classes, examples.vocabulary, self.attention, self.config)

    def init(self, rng: jax.Array) -> dict[str, Any]:
        """Returns the variables before training."""
        return classifier.init(self.model, rng, self.examples.example)

    def batch(self, stage: Stage, position: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns the inputs and labels of one step."""
        inputs, labels = self.examples.training(position, stage.batch_size, self.seed, rng)
        return {"inputs": inputs, "labels": labels}

    def loss(
        self, params: Any, fixed: dict[str, Any], batch: dict[str, jax.Array], rng: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the cross entropy, the accuracy, and each layer's means of multiplier, lambda, gates and masses."""
        logits, means = classifier.apply_training(self.model, {"params": params, **fixed}, batch["inputs"], rng)
        labels = jax.nn.one_hot(batch["labels"], logits.shape[-1])
        smoothed = optax.smooth_labels(labels, self.label_smoothing) if self.label_smoothing else labels
        loss = optax.softmax_cross_entropy(logits, smoothed).mean()
        return loss, {"accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == batch["labels"]), **means}

    def validate(self, variables: dict[str, Any]) -> dict[str, float]:
        """Returns the accuracy on training examples, because most data sets have no validation split."""
        correct = self._correct(variables, "train", min(VALIDATION_EXAMPLES, self.evaluated or VALIDATION_EXAMPLES))
        return {"score": float(np.mean(correct))}

    def evaluations(self) -> Sequence[dict[str, Any]]:
        """Returns one evaluation, of training and test examples."""
        return [{"length": self.examples.length, "examples": self.evaluated}]

    def evaluate(self, variables: dict[str, Any], spec: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Returns one row: accuracies, the 95 % interval of the test accuracy, and the seconds of the evaluation."""
        start = time.monotonic()
        test = self._correct(variables, "test", spec["examples"])
        train = self._correct(variables, "train", min(len(test), MOST_OF_TRAINING))
        low, high = wilson_interval(int(test.sum()), len(test))
        return [
            {
                "task": self.task,
                "attention": self.attention,
                "seed": self.seed,
                "preset": self.preset,
                "length": self.examples.length,
                "parameters": count_parameters(variables),
                "train_accuracy": float(train.mean()),
                "test_accuracy": float(test.mean()),
                "n_test": len(test),
                "low": low,
                "high": high,
                "evaluation_seconds": time.monotonic() - start,
            }
        ]

    def _correct(self, variables: dict[str, Any], split: Split, limit: int | None) -> np.ndarray:
        """Returns which answers are right, (n,) bool. The examples are the same for every method and seed."""
        indices = np.random.default_rng(0).permutation(self.examples.count(split))[:limit]
        size = max(1, min(len(indices), TOKENS_AT_A_TIME // self.examples.length))
        correct = []
        for part in range(math.ceil(len(indices) / size)):
            chosen = indices[part * size : (part + 1) * size]
            inputs, labels = self.examples.read(split, np.resize(chosen, size))
            answers = np.asarray(_answers(self.model, variables, inputs))
            correct.append((answers == labels)[: len(chosen)])
        return np.concatenate(correct)


@functools.partial(jax.jit, static_argnums=0)
def _answers(model: Classifier, variables: dict[str, Any], inputs: jax.Array) -> jax.Array:
    """Returns the likeliest class of each input, (B, ...) -> (B,)."""
    logits: Any = model.apply(variables, inputs)
    return jnp.argmax(logits, axis=-1)
