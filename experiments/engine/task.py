"""The protocol of a task: the interface between an experiment and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from experiments.engine.config import Stage

Variables = dict[str, Any]


class Task(Protocol):
    """A model, its data and its evaluations: a frozen dataclass whose fields are part of the config of a run.

    JAX traces `init` and `loss`. The other methods run on the host, in every process. They must depend only on their
    arguments and the fields, so that an interrupted run ends with the same numbers as an uninterrupted one.
    """

    def init(self, rng: jax.Array) -> Variables:
        """Returns the variables before training, by collection. "params" is trained; the others are constant."""

    def batch(self, stage: Stage, position: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns the batch of one step over all devices: arrays with `stage.batch_size` examples on the first axis.

        `position` is the number of examples in the steps before, from which a task can derive the order of its
        examples. The engine calls this method in another thread, while earlier steps run.
        """

    def loss(
        self, params: Any, fixed: Variables, batch: dict[str, jax.Array], rng: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the mean loss of a batch, and other means over its examples by name. All are scalars."""

    def validate(self, variables: Variables) -> dict[str, float]:
        """Returns scores of the model. The largest "score" marks the best checkpoint."""

    def evaluations(self) -> Sequence[dict[str, Any]]:
        """Returns the evaluations that follow training, one JSON object each."""

    def evaluate(self, variables: Variables, spec: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Returns the rows of results of one of `evaluations`, as JSON objects."""
