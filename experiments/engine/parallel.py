"""Data parallelism over all devices of all processes, with `jit` over a mesh or with `pmap`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.engine.config import ParallelKind
from experiments.engine.errors import EngineError, one_line
from experiments.engine.step import Batch, Metrics, Step, TrainState

AXIS = "data"


class Parallel(Protocol):
    """A kind of data parallelism: every device holds the whole state and a part of the batch."""

    num_devices: int

    def compile(self, step: Step) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """Compiles the step for all devices. The compiled step reuses the memory of the state it is given."""

    def put_state(self, state: TrainState) -> TrainState:
        """Copies a state of NumPy arrays, equal in all processes, to every device."""

    def put_batch(self, batch: dict[str, np.ndarray]) -> Batch:
        """Splits a batch, equal in all processes, over the devices along its first axis."""

    def fetch(self, tree: Any) -> Any:
        """Copies arrays that are equal on every device to NumPy arrays."""


class JitParallel:
    """Data parallelism with one program over a one-dimensional mesh. The compiler inserts the sum of the gradients."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        mesh = Mesh(np.array(devices), (AXIS,))
        self.num_devices = len(devices)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._spread = NamedSharding(mesh, PartitionSpec(AXIS))

    def compile(self, step: Step) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """See `Parallel`."""
        return jax.jit(functools.partial(step, axis=None), donate_argnums=0, out_shardings=self._everywhere)

    def put_state(self, state: TrainState) -> TrainState:
        """See `Parallel`."""
        return jax.tree.map(functools.partial(_put, sharding=self._everywhere), state)

    def put_batch(self, batch: dict[str, np.ndarray]) -> Batch:
        """See `Parallel`."""
        return jax.tree.map(functools.partial(_put, sharding=self._spread), batch)

    def fetch(self, tree: Any) -> Any:
        """See `Parallel`."""
        return jax.tree.map(lambda array: np.array(array.addressable_data(0)), tree)


class PmapParallel:
    """Data parallelism with one program per device, on a leading device axis. The step averages the gradients."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.num_devices = len(devices)
        self._devices = devices
        self._local = [index for index, device in enumerate(devices) if device.process_index == jax.process_index()]

    def compile(self, step: Step) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """See `Parallel`."""
        return jax.pmap(functools.partial(step, axis=AXIS), axis_name=AXIS, donate_argnums=0, devices=self._devices)

    def put_state(self, state: TrainState) -> TrainState:
        """See `Parallel`."""
        return jax.tree.map(lambda array: np.stack([array] * len(self._local)), state)

    def put_batch(self, batch: dict[str, np.ndarray]) -> Batch:
        """See `Parallel`."""
        return jax.tree.map(lambda array: array.reshape(self.num_devices, -1, *array.shape[1:])[self._local], batch)

    def fetch(self, tree: Any) -> Any:
        """See `Parallel`."""
        return jax.tree.map(lambda array: np.array(array.addressable_data(0))[0], tree)


def make_parallel(kind: ParallelKind, devices: Sequence[jax.Device] | None = None) -> Parallel:
    """Returns the parallelism of a kind, over all devices unless some are given."""
    kinds: dict[ParallelKind, Callable[[Sequence[jax.Device]], Parallel]] = {"jit": JitParallel, "pmap": PmapParallel}
    return kinds[kind](jax.devices() if devices is None else devices)


def check_batch_size(batch_size: int, num_devices: int, accumulate: int) -> None:
    """Raises EngineError if a batch cannot be split evenly."""
    if batch_size % (num_devices * accumulate):
        raise EngineError(
            f"batch_size is {batch_size}; it must be a multiple of {num_devices * accumulate}: {num_devices} devices "
            f"x {accumulate} microbatches"
        )


def initialize_distributed(coordinator: str, num_processes: int, process_id: int) -> None:
    """Joins this process to the others. Must come before any other use of JAX.

    Args:
      coordinator: HOST:PORT of process 0.
      num_processes: Number of processes.
      process_id: Index of this process, from 0.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except RuntimeError as error:
        raise EngineError(
            f"process {process_id} of {num_processes} cannot join {coordinator!r} ({one_line(error)}); check "
            "--coordinator, --num-processes and --process-id"
        ) from error


def is_main_process() -> bool:
    """Returns whether this process writes files and prints."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Returns whether the flag is set in any process. Every process must call this function."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def wait_for_all(name: str) -> None:
    """Waits until every process has called this function with the same name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def local_variables(tree: Any) -> Any:
    """Copies arrays to the first device of this process."""
    return jax.device_put(tree, jax.local_devices()[0])


def _put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    array = np.asarray(array)
    array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
