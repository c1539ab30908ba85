"""Batches that are made in a thread of their own, one step ahead, so that a step does not wait for its data."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls a function of the step, for the next step while this one is at work."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._next: tuple[int, concurrent.futures.Future[T]] | None = None

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def get(self, step: int, *, ahead: bool) -> T:
        """What the function gives for `step`; with `ahead`, that of the step after it is begun."""
        if self._next is None or self._next[0] != step:
            self._next = (step, self._pool.submit(self._make, step))
        value = self._next[1].result()
        self._next = (step + 1, self._pool.submit(self._make, step + 1)) if ahead else None
        return value
