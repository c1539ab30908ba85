"""The task of a classifier, as the engine has it: one for all experiments of the paper but needle in a haystack."""

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
from experiments.engine import classifier
from experiments.engine.classifier import Classifier, ClassifierConfig
from experiments.engine.config import PART_OF_RUN, Stage
from experiments.engine.data.examples import Examples, Split
from experiments.engine.stats import wilson_interval
from experiments.engine.transformer import count_parameters

TOKENS_AT_A_TIME = 32_768
MOST_OF_TRAINING = 2000  # examples that are evaluated
VALIDATION_EXAMPLES = 64
ROW_FIELDS = (
    *("task", "attention", "seed", "preset", "length", "parameters", "train_accuracy", "test_accuracy"),
    *("n_test", "low", "high", "evaluation_seconds"),
)


@dataclasses.dataclass(frozen=True)
class Classification:
    """Trains a classifier on examples, and counts right answers on training and on test examples.

    Attributes:
      task: its name in results.
      preset: of the sizes, by name.
      attention: one of the six.
      config: of the attention.
      sizes: of the model.
      data: the examples.
      seed: of the order of the examples.
      evaluated: test examples that are evaluated, at random places, and as many of training, up to 2,000; None: all.
      label_smoothing: of the loss.
    """

    task: str
    preset: str
    attention: str
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
        """The data, by its Protocol."""
        return self.data

    @property
    def model(self) -> Classifier:
        """The model."""
        kind: Any = self.attention
        return Classifier(self.sizes, self.examples.num_classes, self.examples.vocabulary, kind, self.config)

    def init(self, rng: jax.Array) -> dict[str, Any]:
        """The variables before training."""
        return classifier.init(self.model, rng, self.examples.example)

    def batch(self, stage: Stage, position: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Inputs and labels."""
        inputs, labels = self.examples.training(position, stage.batch_size, self.seed, rng)
        return {"inputs": inputs, "labels": labels}

    def loss(
        self, params: Any, fixed: dict[str, Any], batch: dict[str, jax.Array], rng: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross entropy; and the accuracy, and the means of m, lambda, gates and masses of each layer."""
        logits, means = classifier.apply_training(self.model, {"params": params, **fixed}, batch["inputs"], rng)
        labels = jax.nn.one_hot(batch["labels"], logits.shape[-1])
        smoothed = optax.smooth_labels(labels, self.label_smoothing) if self.label_smoothing else labels
        loss = optax.softmax_cross_entropy(logits, smoothed).mean()
        return loss, {"accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == batch["labels"]), **means}

    def validate(self, variables: dict[str, Any]) -> dict[str, float]:
        """Accuracy on training examples: most sets have no third split, and no checkpoint is chosen by it."""
        correct = self._correct(variables, "train", min(VALIDATION_EXAMPLES, self.evaluated or VALIDATION_EXAMPLES))
        return {"score": float(np.mean(correct))}

    def evaluations(self) -> Sequence[dict[str, Any]]:
        """One, of both splits."""
        return [{"length": self.examples.length, "examples": self.evaluated}]

    def evaluate(self, variables: dict[str, Any], spec: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """One row: accuracies, the 95 % interval of that on the test examples, and the seconds it took."""
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
        """Which answers are right (n,): to the same examples for every method and seed."""
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
    """(B, ...) -> (B,), the likeliest classes."""
    logits: Any = model.apply(variables, inputs)
    return jnp.argmax(logits, axis=-1)
