"""The task of needle in a haystack: methods, model, loss and evaluations."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from elsaa_jax import ElsaaConfig
from elsaa_jax.checks import check_choice
from elsaa_jax.types import AttentionKind
from experiments.engine import models
from experiments.engine.config import PART_OF_RUN, Stage
from experiments.engine.memory import free_bytes
from experiments.engine.models import Decoder
from experiments.engine.stats import wilson_interval
from experiments.engine.transformer import ModelConfig
from experiments.niah.haystack import DEPTHS, VOCABULARY, make_examples

TOKENS_AT_A_TIME = 8192
DEPTH_BINS = 5
VALIDATION_EXAMPLES = 64
VALIDATION, EVALUATION = 1, 2  # streams of random examples
ROW_FIELDS = (
    *("attention", "seed", "train_length", "length", "depth", "distractors"),
    *("accuracy", "n", "low", "high", "seconds_per_example"),
)

Method = Literal[
    "exact",
    "elsaa",
    "sort_lsh",
    "race",
    "performer",
    "sort_lsh_race",
    "elsaa_rank",
    "elsaa_own_planes",
    "elsaa_no_dropout",
    "elsaa_mean",
]


@dataclasses.dataclass(frozen=True)
class NiahStage(Stage):
    """A stage of the length curriculum.

    Attributes:
      needles: Number of needles in each example.
      queries: Number of needles that the example asks for.
    """

    needles: int = 1
    queries: int = 1


def _ablation(**changes: Any) -> Callable[[ElsaaConfig], ElsaaConfig]:
    """Returns a function that replaces fields of a config; `part__field` names a field of one of its parts."""

    def change(config: ElsaaConfig) -> ElsaaConfig:
        for name, value in changes.items():
            part, _, field = name.rpartition("__")
            inner = {part: dataclasses.replace(getattr(config, part), **{field: value})} if part else {field: value}
            config = dataclasses.replace(config, **inner)
        return config

    return change


# The names that `--attention` accepts, each with the attention of the layer and its change of the config.
METHODS: dict[Method, tuple[AttentionKind, Callable[[ElsaaConfig], ElsaaConfig]]] = {
    "exact": ("exact", _ablation()),
    "elsaa": ("elsaa", _ablation()),
    "sort_lsh": ("sort_lsh", _ablation()),
    "race": ("race", _ablation()),
    "performer": ("performer", _ablation()),
    "sort_lsh_race": ("sort_lsh_race", _ablation()),
    "elsaa_rank": ("elsaa", _ablation(sparse__pairing="rank")),
    "elsaa_own_planes": ("elsaa", _ablation(share_planes=False)),
    "elsaa_no_dropout": ("elsaa", _ablation(fusion__branch_dropout_rate=0.0)),
    "elsaa_mean": ("elsaa", _ablation(fusion__mass_scale="mean")),
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Settings of the evaluation of a trained model.

    Attributes:
      lengths: Numbers of tokens per example.
      examples: Number of examples per length. None means 500 up to 4,096 tokens, 100 up to 65,536, and 20 beyond.
      needles: Number of needles in each example, of which one is asked for.
      distractors: Number of further needles, which are never asked for.
      depths: Depths of the needle that is asked for, from 0.05 to 0.95. Empty means a random depth for each example.
    """

    lengths: tuple[int, ...] = (512, 1024)
    examples: int | None = None
    needles: int = 1
    distractors: int = 0
    depths: tuple[float, ...] = ()

    def examples_of(self, length: int) -> int:
        """Returns the number of examples of a length."""
        if self.examples is not None:
            return self.examples
        return 500 if length <= 4096 else 100 if length <= 65536 else 20


@dataclasses.dataclass(frozen=True)
class Niah:
    """Needle in a haystack, following the engine's protocol `Task`.

    Attributes:
      method: Name of the attention and its variant, a key of METHODS.
      config: Configuration of the attention, before the method changes it.
      sizes: Sizes of the model.
      seed: Random seed of the evaluation examples.
      train_length: Longest length of training, in tokens.
      evaluation: Settings of the evaluation. They do not change what is trained.
    """

    method: Method
    config: ElsaaConfig
    sizes: ModelConfig
    seed: int
    train_length: int
    evaluation: Evaluation = dataclasses.field(default=Evaluation(), metadata={PART_OF_RUN: False})

    def __post_init__(self) -> None:
        check_choice("attention", self.method, tuple(METHODS))

    @property
    def model(self) -> Decoder:
        """The model with the attention of the method."""
        kind, change = METHODS[self.method]
        return Decoder(self.sizes, VOCABULARY, kind, change(self.config))

    def init(self, rng: jax.Array) -> dict[str, Any]:
        """Returns the variables before training."""
        return models.init(self.model, rng)

    def batch(self, stage: Stage, position: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draws tokens and answers for one step."""
        del position
        assert isinstance(stage, NiahStage)
        examples = make_examples(rng, stage.batch_size, stage.length, needles=stage.needles, queries=stage.queries)
        return {"tokens": examples.tokens, "answers": examples.answers}

    def loss(
        self, params: Any, fixed: dict[str, Any], batch: dict[str, jax.Array], rng: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the cross entropy at the keys that are asked for, and the accuracy."""
        answers = batch["answers"]
        variables = {"params": params, **fixed}
        logits = models.apply(self.model, variables, batch["tokens"], 2 * answers.shape[1], dropout_rng=rng)[:, 1::2]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, answers).mean()
        return loss, {"accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == answers)}

    def validate(self, variables: dict[str, Any]) -> dict[str, float]:
        """Returns the accuracy at the longest length of training, as the score."""
        asked = _ask(
            self.model,
            variables,
            np.random.default_rng([VALIDATION, self.seed]),
            self.train_length,
            VALIDATION_EXAMPLES,
        )
        return {"score": float(np.mean(asked.correct))}

    def evaluations(self) -> Sequence[dict[str, Any]]:
        """Returns one evaluation for each length and depth."""
        wanted = self.evaluation
        return [
            {
                "length": length,
                "depth": depth,
                "examples": wanted.examples_of(length),
                "needles": wanted.needles,
                "distractors": wanted.distractors,
            }
            for length in wanted.lengths
            for depth in (wanted.depths or (None,))
        ]

    def evaluate(self, variables: dict[str, Any], spec: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Returns the row of one length and depth; it has no accuracy if the memory is too small."""
        length, depth, distractors = spec["length"], spec["depth"], spec["distractors"]
        row = {
            "attention": self.method,
            "seed": self.seed,
            "train_length": self.train_length,
            "length": length,
            "depth": depth,
            "needles": spec["needles"],
            "distractors": distractors,
        }
        nothing = dict.fromkeys(("accuracy", "low", "high", "seconds_per_example")) | {"n": 0}
        needed, free = bytes_needed(self.model, length), free_bytes()
        if needed > free:
            reason = f"needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
            return [row | nothing | {"skipped": reason}]
        # The seed does not depend on the method: all methods answer the same examples.
        rng = np.random.default_rng(
            [EVALUATION, self.seed, length, distractors, 0 if depth is None else round(1000 * depth)]
        )
        asked = _ask(
            self.model, variables, rng, length, spec["examples"], needles=spec["needles"] + distractors, depth=depth
        )
        correct, n = int(asked.correct.sum()), len(asked.correct)
        low, high = wilson_interval(correct, n)
        row |= {"accuracy": correct / n, "n": n, "low": low, "high": high, "seconds_per_example": asked.seconds}
        if depth is None:
            row["by_depth"] = _by_depth(asked)
        return [row]


@dataclasses.dataclass(frozen=True)
class Asked:
    """Answers of a model.

    Attributes:
      correct: Whether each answer is right, (n,) bool.
      depths: Depth of the needle of each answer, (n,).
      seconds: Median seconds per example.
    """

    correct: np.ndarray
    depths: np.ndarray
    seconds: float


@functools.partial(jax.jit, static_argnums=0)
def last_logits(model: Decoder, variables: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Computes the logits at the last position, (B, N) -> (B, VOCABULARY)."""
    return models.apply(model, variables, tokens, 1)[:, 0]


def _batch_size(length: int) -> int:
    return max(1, TOKENS_AT_A_TIME // length)


@functools.cache
def _program(model: Decoder, length: int) -> jax.stages.Compiled:
    """Compiles `last_logits` for a batch of examples of one length."""
    shapes = jax.eval_shape(lambda: models.init(model, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((_batch_size(length), length), jnp.int32)
    return last_logits.lower(model, shapes, tokens).compile()


def _ask(
    model: Decoder,
    variables: dict[str, Any],
    rng: np.random.Generator,
    length: int,
    examples: int,
    *,
    needles: int = 1,
    depth: float | None = None,
) -> Asked:
    """Asks the model for one needle in each of at least `examples` examples."""
    size, program = _batch_size(length), _program(model, length)
    correct, depths, seconds = [], [], []
    for _ in range(math.ceil(examples / size)):
        batch = make_examples(rng, size, length, needles=needles, depth=depth)
        start = time.perf_counter()
        logits = np.asarray(program(variables, batch.tokens))
        seconds.append((time.perf_counter() - start) / size)
        correct.append(logits.argmax(-1) == batch.answers[:, 0])
        depths.append(batch.depths)
    return Asked(np.concatenate(correct), np.concatenate(depths), float(np.median(seconds)))


def _by_depth(asked: Asked) -> list[dict[str, Any]]:
    """Counts right answers in equal parts of the context; `depth` is the middle of a part."""
    edges = np.linspace(*DEPTHS, DEPTH_BINS + 1)
    part = np.clip(np.digitize(asked.depths, edges) - 1, 0, DEPTH_BINS - 1)
    return [
        {"depth": float((edges[i] + edges[i + 1]) / 2), "n": int(np.sum(part == i)), "correct": int(chosen.sum())}
        for i in range(DEPTH_BINS)
        for chosen in [asked.correct[part == i]]
    ]


def bytes_needed(model: Decoder, length: int) -> int:
    """Returns the memory that the compiled program of an evaluation needs at a length."""
    memory: Any = _program(model, length).memory_analysis()
    return memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
