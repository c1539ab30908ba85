"""Handling of SIGTERM and Ctrl-C: training ends its step and saves, an evaluation ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Stop(SystemExit):
    """An exit of the program with the exit code of a signal.

    Attributes:
      number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class StopSignals:
    """A context that handles SIGTERM and SIGINT. The second SIGINT kills the process at once.

    Attributes:
      received: Number of the first signal, None if there was none.
    """

    def __init__(self, act: Callable[[int], None] = lambda number: None) -> None:
        """Makes the context. `act` is called with the first signal, in the main thread, and may raise."""
        self.received: int | None = None
        self._act = act
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Other threads cannot handle signals.
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.received is None:
            self.received = number
            self._act(number)


def stop_at_once(number: int) -> None:
    """Raises `Stop`."""
    raise Stop(number)
