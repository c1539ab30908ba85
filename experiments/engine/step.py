"""One training step, as a pure function of the state and the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.engine.config import RunConfig
from experiments.engine.optimizer import learning_rate, make_optimizer
from experiments.engine.task import Variables

TRAINING_STREAM = 0  # The first number of the seeds of training data; evaluations start theirs with another.

Batch = dict[str, Any]
Metrics = dict[str, Any]
Step = Callable[["TrainState", Batch, str | None], tuple["TrainState", Metrics]]


class TrainState(NamedTuple):
    """State that a run carries from step to step.

    Attributes:
      params: Trained variables.
      fixed: Other collections of variables.
      optimizer: State of the optimiser.
      rng: Key data from which each step derives its own random key.
      step: Number of steps done.
    """

    params: Any
    fixed: Variables
    optimizer: Any
    rng: jax.Array
    step: jax.Array

    @property
    def variables(self) -> Variables:
        """All collections of the model."""
        return {"params": self.params, **self.fixed}


def init_state(config: RunConfig) -> TrainState:
    """Returns the state before training. May be traced, to learn its shapes."""
    rng = jax.random.key(config.train.seed)
    variables = dict(config.task.init(rng))
    params = variables.pop("params")
    optimizer = make_optimizer(config.train).init(params)
    return TrainState(params, variables, optimizer, jax.random.key_data(rng), jnp.zeros((), jnp.int32))


def make_batch(config: RunConfig, step: int) -> dict[str, np.ndarray]:
    """Returns the batch of the step that follows `step` steps. It depends only on the seed and on `step`."""
    stage = config.train.stage_at(step)
    rng = np.random.default_rng([TRAINING_STREAM, config.train.seed, step])
    batch = config.task.batch(stage, config.train.examples_before(step), rng)
    for name, array in batch.items():
        if np.ndim(array) == 0 or len(array) != stage.batch_size:
            raise ValueError(
                f"batch[{name!r}] of the task has shape {np.shape(array)}; its first axis must have "
                f"{stage.batch_size} examples"
            )
    return batch


def make_step(config: RunConfig) -> Step:
    """Returns the function (state, batch, axis) -> (state, metrics of the step).

    `axis` is the name of the device axis if each device runs the step on its part of the batch, and None if one program
    sees the whole batch.
    """
    optimizer = make_optimizer(config.train)
    rate = learning_rate(config.train)

    def step(state: TrainState, batch: Batch, axis: str | None) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        if axis is not None:
            rng = jax.random.fold_in(rng, jax.lax.axis_index(axis))
        gradient, metrics = _mean_gradient(config, state, batch, rng)
        if axis is not None:
            gradient, metrics = jax.lax.pmean((gradient, metrics), axis)
        with jax.numpy_dtype_promotion("standard"):  # Optax multiplies floats by integers.
            updates, moments = optimizer.update(gradient, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
            metrics |= {"gradient_norm": optax.tree.norm(gradient), "learning_rate": rate(state.step)}
        return state._replace(params=params, optimizer=moments, step=state.step + 1), metrics

    return step


def _mean_gradient(config: RunConfig, state: TrainState, batch: Batch, rng: jax.Array) -> tuple[Any, Metrics]:
    """Returns the gradient and the metrics, averaged over the microbatches."""
    count = config.train.accumulate

    def of_microbatch(index: jax.Array, microbatch: Batch) -> tuple[Any, Metrics]:
        loss = jax.value_and_grad(config.task.loss, has_aux=True)
        (value, others), gradient = loss(state.params, state.fixed, microbatch, jax.random.fold_in(rng, index))
        metrics = {"loss": value, **others}
        return gradient, {name: jnp.asarray(metric, jnp.float32) for name, metric in metrics.items()}

    def split(array: jax.Array) -> jax.Array:
        # Every microbatch takes examples from every device; the examples of one device are adjacent in the batch.
        return jnp.swapaxes(array.reshape(-1, count, *array.shape[1:]), 0, 1)

    if count == 1:
        return of_microbatch(jnp.int32(0), batch)
    microbatches = (jnp.arange(count), jax.tree.map(split, batch))
    shapes = jax.eval_shape(of_microbatch, *jax.tree.map(lambda array: array[0], microbatches))
    zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    total, _ = jax.lax.scan(
        lambda total, inputs: (jax.tree.map(jnp.add, total, of_microbatch(*inputs)), None), zeros, microbatches
    )
    return jax.tree.map(lambda array: array / count, total)
