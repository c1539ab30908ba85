"""Makes batches in separate threads, ahead of their steps, so that a step does not wait for its data."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

# Number of batches made at a time, each in a thread. Training on a CPU leaves few cores for them.
AHEAD = max(1, min(8, (os.cpu_count() or 1) // 4))


class Prefetch(Generic[T]):
    """A cache that computes a function of the step for the next steps, while the current step runs."""

    def __init__(self, make: Callable[[int], T], end: int, ahead: int = AHEAD) -> None:
        """Prepares for steps below `end`; the values of `ahead` steps are computed before they are requested."""
        self._make, self._end, self._ahead = make, end, ahead
        self._pool = concurrent.futures.ThreadPoolExecutor(ahead, thread_name_prefix="prefetch")
        self._made: dict[int, concurrent.futures.Future[T]] = {}

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def get(self, step: int) -> T:
        """Returns the value of the function for `step`, and starts to compute those of the next steps."""
        value = self._begun(step).result()
        del self._made[step]
        for later in range(step + 1, min(step + 1 + self._ahead, self._end)):
            self._begun(later)
        return value

    def _begun(self, step: int) -> concurrent.futures.Future[T]:
        if step not in self._made:
            self._made[step] = self._pool.submit(self._make, step)
        return self._made[step]
