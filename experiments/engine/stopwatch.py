"""The time of training, over all parts of a run that was interrupted; beside the metrics, which hold no times."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Iterator

from experiments.engine.workdir import read_json, write_json

TIME = "time.json"


class Stopwatch:
    """Counts the seconds of training, and those of them in which a step waited for its data."""

    def __init__(self, path: pathlib.Path, step: int) -> None:
        """Goes on from what was saved, where training does not begin at step 0."""
        stored = (read_json(path) if step else None) or {"seconds": 0.0, "waited": 0.0}
        self._path = path
        self._waited: float = stored["waited"]
        self._start = time.monotonic() - stored["seconds"]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A time in which a step waits for its data."""
        start = time.monotonic()
        yield
        self._waited += time.monotonic() - start

    def save(self) -> None:
        """Writes the file."""
        write_json(self._path, {"seconds": time.monotonic() - self._start, "waited": self._waited})
