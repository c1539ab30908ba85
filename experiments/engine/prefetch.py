"""Batches that are made in threads of their own, ahead of their steps, so that a step does not wait for its data."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

# Steps that are made at a time, each in a thread: one where training has few cores, more where an accelerator trains.
AHEAD = max(1, min(8, (os.cpu_count() or 1) // 4))


class Prefetch(Generic[T]):
    """Calls a function of the step, for the next steps while this one is at work."""

    def __init__(self, make: Callable[[int], T], end: int, ahead: int = AHEAD) -> None:
        """Makes ready for steps below `end`, of which `ahead` are made before they are asked for."""
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
        """What the function gives for `step`; those of the steps after it are begun."""
        value = self._begun(step).result()
        del self._made[step]
        for later in range(step + 1, min(step + 1 + self._ahead, self._end)):
            self._begun(later)
        return value

    def _begun(self, step: int) -> concurrent.futures.Future[T]:
        if step not in self._made:
            self._made[step] = self._pool.submit(self._make, step)
        return self._made[step]
