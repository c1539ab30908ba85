"""The training loop: from the last checkpoint, or from the start, to the last step or to a signal."""

from __future__ import annotations

import functools
import math
import pathlib
import signal
from typing import Any

import jax
import numpy as np

from experiments.engine.checkpoints import Checkpoints
from experiments.engine.config import RunConfig
from experiments.engine.due import Due
from experiments.engine.errors import EngineError
from experiments.engine.metrics import MetricsWriter
from experiments.engine.parallel import Parallel, any_process, local_variables
from experiments.engine.prefetch import Prefetch
from experiments.engine.progress import Progress
from experiments.engine.signals import Stop, StopSignals
from experiments.engine.step import TrainState, init_state, make_batch, make_step
from experiments.engine.stopwatch import TIME, Stopwatch
from experiments.engine.workdir import METRICS, normal


def start_state(config: RunConfig, checkpoints: Checkpoints) -> TrainState:
    """Returns the state of the last checkpoint, or the state before training, in NumPy arrays."""

    def initialize() -> TrainState:
        return init_state(config)

    if checkpoints.last is None:
        return jax.tree.map(np.array, jax.jit(initialize)())
    return checkpoints.restore_state(checkpoints.last, jax.eval_shape(initialize), normal(config))


def train_loop(
    config: RunConfig, workdir: pathlib.Path, checkpoints: Checkpoints, parallel: Parallel, progress: Progress
) -> TrainState:
    """Trains to the end, and returns the last state in NumPy arrays.

    The metrics of a step are on the disk before its checkpoint is, so that no line is ever missing. After SIGTERM or
    SIGINT, the loop ends the current step, saves it and raises `Stop`.
    """
    host = start_state(config, checkpoints)
    start = int(host.step)
    state = parallel.put_state(host)
    run_step = parallel.compile(make_step(config))
    writer = MetricsWriter(workdir / METRICS, start)
    clock = Stopwatch(workdir / TIME, start)
    running: Any = None
    try:
        make = functools.partial(make_batch, config)
        with StopSignals() as signals, Prefetch(make, config.train.total_steps) as batches:
            for step in range(start, config.train.total_steps):
                with clock.waiting():
                    made = batches.get(step)
                state, values = run_step(state, parallel.put_batch(made))
                jax.block_until_ready(running)  # At most one step is queued, so a signal takes effect soon.
                running = values
                progress.update(step + 1, functools.partial(_loss, parallel, values))
                due = Due.after(step + 1, config.train)
                stopping = _is_stopping(signals, due)
                if not (due.log or due.save or stopping):
                    continue
                record = _record(config, step, parallel.fetch(values))
                if due.save or stopping:
                    host = parallel.fetch(state)
                score = None
                if due.validate:
                    scores = _validate(config, host)
                    record |= {f"validation/{name}": value for name, value in scores.items()}
                    score = scores["score"]
                if due.log:
                    writer.write(step + 1, record)
                if due.save or stopping:
                    writer.sync()
                    clock.save()
                    checkpoints.save(host, normal(config), score)
                if stopping:
                    checkpoints.wait()
                    raise _stop(signals)
                progress.restart_clock()
            checkpoints.wait()
            if any_process(signals.received is not None):  # The signal came while the last step was validated or saved.
                raise _stop(signals)
    finally:
        writer.close()
    return host


def _loss(parallel: Parallel, values: dict[str, Any]) -> float:
    return float(parallel.fetch(values["loss"]))


def _is_stopping(signals: StopSignals, due: Due) -> bool:
    """Returns whether a signal was received. Several processes agree on it in the steps that they log."""
    if jax.process_count() == 1 or due.log:
        return any_process(signals.received is not None)
    return False


def _stop(signals: StopSignals) -> Stop:
    return Stop(signals.received or signal.SIGTERM)  # The number of a signal to another process is not known.


def _record(config: RunConfig, step: int, values: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the metrics of the step that follows `step` steps. Raises EngineError if the loss is not finite."""
    record = {name: float(value) for name, value in values.items()}
    if not math.isfinite(record["loss"]):
        raise EngineError(
            f"the loss of step {step + 1} is {record['loss']}; lower learning_rate or clip_norm in another --workdir"
        )
    return {"length": config.train.stage_at(step).length, **record}


def _validate(config: RunConfig, state: TrainState) -> dict[str, float]:
    scores = {name: float(value) for name, value in config.task.validate(local_variables(state.variables)).items()}
    if "score" not in scores:
        raise ValueError(f"validate of {type(config.task).__name__} gives {sorted(scores)}; it must give a 'score'")
    return scores
