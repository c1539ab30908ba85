"""Metrics of training: JSON lines, and TensorBoard where it is installed.

The lines hold what the run is, and no times: a run that was interrupted leaves the same file as one that was not.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
from typing import Any

from experiments.engine.errors import disk_errors
from experiments.engine.parallel import is_main_process
from experiments.engine.workdir import write_text


class MetricsWriter:
    """Appends one line a step; on the main process alone."""

    def __init__(self, path: pathlib.Path, step: int) -> None:
        """Goes on after `step` steps: later lines, and one that was cut short, are dropped."""
        self._path = path
        self._board: Any = None
        self._file: Any = None
        if not is_main_process():
            return
        write_text(path, "".join(f"{line}\n" for line in _lines(path) if _step_of(line) <= step))
        with disk_errors(path):
            self._file = path.open("a")
        self._board = _tensorboard(path.parent / "tensorboard", step)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Writes the values of a step. They outlast the death of the process; after `sync`, that of the machine."""
        if self._file is None:
            return
        with disk_errors(self._path):
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, step)

    def sync(self) -> None:
        """Makes sure that all lines are on the disk."""
        if self._file is not None:
            with disk_errors(self._path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            with disk_errors(self._path):
                self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a file of metrics."""
    with disk_errors(path):
        return [json.loads(line) for line in path.read_text().splitlines()]


def _lines(path: pathlib.Path) -> list[str]:
    with disk_errors(path):
        try:
            return path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []


def _step_of(line: str) -> float:
    """The step of a line; later than all where it was cut short."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return float("inf")


def _tensorboard(path: pathlib.Path, step: int) -> Any:
    """A writer of events, None where there is no tensorboardX."""
    try:
        module = importlib.import_module("tensorboardX")
    except ImportError:
        return None
    with disk_errors(path):
        return module.SummaryWriter(str(path), purge_step=step + 1)
