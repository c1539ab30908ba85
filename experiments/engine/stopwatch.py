"""Measures the time of training over all parts of an interrupted run. It is stored apart from the metrics."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from experiments.engine.workdir import damaged, read_checked, write_checked

TIME = "time.json"
MEASURE_AGAIN = "restore it, or move it away to measure the time from here on"


class Times(NamedTuple):
    """Times of a training run.

    Attributes:
      seconds: Seconds of training.
      waited: Seconds in which a step waited for its data; part of `seconds`.
    """

    seconds: float
    waited: float


def read_times(path: pathlib.Path) -> Times | None:
    """Returns the stored times, None if there is no file. Raises EngineError if the file is damaged."""
    stored = read_checked(path, MEASURE_AGAIN)
    if stored is None:
        return None
    for name in Times._fields:
        if isinstance(stored.get(name), bool) or not isinstance(stored.get(name), int | float):
            raise damaged(path, f"its {name!r} is not a number", MEASURE_AGAIN)
    return Times(stored["seconds"], stored["waited"])


class Stopwatch:
    """A clock that counts the seconds of training, and how many of them a step waited for its data."""

    def __init__(self, path: pathlib.Path, step: int) -> None:
        """Starts the clock, from the stored times if training continues after step 0."""
        stored = (read_times(path) if step else None) or Times(0.0, 0.0)
        self._path = path
        self._waited = stored.waited
        self._start = time.monotonic() - stored.seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside this context as waiting for data."""
        start = time.monotonic()
        yield
        self._waited += time.monotonic() - start

    def save(self) -> None:
        """Writes the times to the file."""
        write_checked(self._path, Times(time.monotonic() - self._start, self._waited)._asdict())
