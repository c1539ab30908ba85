"""What an experiment hands to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from experiments.engine.config import Stage

Variables = dict[str, Any]


class Task(Protocol):
    """A model, its data, and its evaluations: a frozen dataclass, whose fields are part of the run's config.

    `init` and `loss` are traced by JAX. The others run on the host, on every process, and must depend on their
    arguments and the fields alone, so that a run that was interrupted ends as one that was not.
    """

    def init(self, rng: jax.Array) -> Variables:
        """The variables before training, by collection: "params" is trained, the rest is fixed but saved."""

    def batch(self, stage: Stage, position: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """The batch of one step over all devices: arrays with `stage.batch_size` examples on their first axis.

        It follows `position` examples, by which an order of examples is kept over steps. Called in a thread of its own,
        while the step before it is at work.
        """

    def loss(
        self, params: Any, fixed: Variables, batch: dict[str, jax.Array], rng: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The mean loss of the examples of a batch, and other means of theirs: scalars."""

    def validate(self, variables: Variables) -> dict[str, float]:
        """Scores of the model; the largest "score" marks the best checkpoint."""

    def evaluations(self) -> Sequence[dict[str, Any]]:
        """What is to be evaluated after training, one JSON object each."""

    def evaluate(self, variables: Variables, spec: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Rows of results of one of `evaluations`, JSON objects."""
