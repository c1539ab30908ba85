"""Trains a task in a work directory and evaluates it. An interrupted run continues where it stopped."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any, Literal

import jax

from experiments.engine.checkpoints import Checkpoints
from experiments.engine.config import RunConfig, Which
from experiments.engine.errors import EngineError
from experiments.engine.loop import train_loop
from experiments.engine.metrics import check_metrics
from experiments.engine.parallel import check_batch_size, is_main_process, local_variables, make_parallel, wait_for_all
from experiments.engine.progress import Progress
from experiments.engine.results import Results, Rows
from experiments.engine.signals import Stop, StopSignals, stop_at_once
from experiments.engine.task import Task, Variables
from experiments.engine.workdir import CHECKPOINTS, METRICS, check_same, claim, locked, stored_config, versions

Path = str | os.PathLike[str]


def train_and_evaluate(
    config: RunConfig, workdir: Path, *, resume: bool = False, eval_only: bool = False
) -> list[dict[str, Any]]:
    """Trains a task, then evaluates it. Steps and evaluations that the work directory already holds are not repeated.

    Args:
      config: Configuration of the run. The work directory of a run with another configuration is refused.
      workdir: Directory for config.json, metrics.jsonl, results.json and checkpoints.
      resume: Whether to fail if there is no checkpoint to continue from.
      eval_only: Whether to fail if training is not finished.

    Returns:
      The rows of all evaluations.

    Raises:
      EngineError: The run cannot start or continue. The text is one sentence.
      Stop: The run received SIGTERM or SIGINT, and has saved its state. It is a SystemExit.
    """
    workdir = pathlib.Path(workdir).absolute()
    if not eval_only:
        _check_devices(config)
    if resume or eval_only:
        _check_started(config, workdir, "--resume" if resume else "--eval-only")
    with _opened(config, workdir) as (checkpoints, progress):
        check_metrics(workdir / METRICS, config.train, checkpoints.last or 0)
        wait_for_all("metrics")  # All processes read the file before one of them changes it.
        if checkpoints.last != config.train.total_steps:
            if eval_only:
                raise EngineError(
                    f"the last checkpoint in {workdir} is that of step {checkpoints.last} of "
                    f"{config.train.total_steps}; train to the end without --eval-only first"
                )
            _train(config, workdir, checkpoints, progress)
        return _evaluate(config, workdir, checkpoints, progress)


def load_variables(task: Task, workdir: Path, which: Which = "last") -> Variables:
    """Returns the variables of the last or the best checkpoint of a run, whose model must be that of `task`."""
    workdir = pathlib.Path(workdir).absolute()
    if stored_config(workdir) is None or not (workdir / CHECKPOINTS).is_dir():
        raise EngineError(f"{workdir} has no checkpoint; train first, or take another --workdir")
    checkpoints = Checkpoints(workdir / CHECKPOINTS)
    try:
        return _load(task, checkpoints, which)
    finally:
        checkpoints.close()


def _check_devices(config: RunConfig) -> None:
    for stage in config.train.stages:
        check_batch_size(stage.batch_size, jax.device_count(), config.train.accumulate)


def _check_started(config: RunConfig, workdir: pathlib.Path, flag: Literal["--resume", "--eval-only"]) -> None:
    """Raises EngineError if there is no checkpoint to continue from. Creates no files."""
    stored = stored_config(workdir)
    if stored is not None:
        check_same(config, stored, workdir)
    if stored is None or not any(path.name.isdigit() for path in (workdir / CHECKPOINTS).glob("*")):
        raise EngineError(f"{workdir} has no checkpoint, which {flag} needs; leave it out to train from the start")


@contextlib.contextmanager
def _opened(config: RunConfig, workdir: pathlib.Path) -> Iterator[tuple[Checkpoints, Progress]]:
    """Opens the work directory for this run alone, and yields its checkpoints and a progress display."""
    stored = stored_config(workdir)
    if stored is not None:
        check_same(config, stored, workdir)
    with locked(workdir):
        claim(config, workdir)
        wait_for_all("claim")
        checkpoints = Checkpoints(workdir / CHECKPOINTS)
        progress = Progress(config.train, start=checkpoints.last or 0, enabled=is_main_process())
        if stored is not None and stored.get("versions") != versions():
            progress.note(f"{workdir} was begun with other versions: {stored.get('versions')}; these are {versions()}")
        try:
            yield checkpoints, progress
        except BaseException as error:
            progress.close()
            if isinstance(error, Stop):
                name = signal.Signals(error.number).name
                progress.note(f"stopped by {name}; all is saved in {workdir}: run the same command again to continue")
            with contextlib.suppress(EngineError):  # The error that is being raised says more.
                checkpoints.close()
            raise
        progress.close()
        checkpoints.close()


def _train(config: RunConfig, workdir: pathlib.Path, checkpoints: Checkpoints, progress: Progress) -> None:
    if checkpoints.last is not None:
        progress.note(f"continuing from step {checkpoints.last} in {workdir}")
    checkpoints.clean()
    train_loop(config, workdir, checkpoints, make_parallel(config.train.parallel), progress)


def _evaluate(config: RunConfig, workdir: pathlib.Path, checkpoints: Checkpoints, progress: Progress) -> Rows:
    specs = list(config.task.evaluations())
    results = Results(config, workdir)
    wait_for_all("results")  # All processes read the file before one of them changes it.
    pending = results.pending(specs)
    if not pending:
        return results.rows(specs)
    with StopSignals(stop_at_once):
        variables = _load(config.task, checkpoints, config.train.evaluate_on)
        for spec in pending:
            progress.note(f"evaluation {specs.index(spec) + 1}/{len(specs)}: {spec}")
            results.add(spec, config.task.evaluate(variables, spec))
    return results.rows(specs)


def _load(task: Task, checkpoints: Checkpoints, which: Which) -> Variables:
    step = checkpoints.last if which == "last" else checkpoints.best
    if step is None:
        raise EngineError(f"{checkpoints.directory} has no checkpoint; train first, or take another --workdir")
    shapes = jax.eval_shape(lambda: dict(task.init(jax.random.key(0))))
    return local_variables(checkpoints.restore_variables(step, shapes))
