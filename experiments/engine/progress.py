"""How far training is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from experiments.engine.config import Stage, TrainConfig
from experiments.engine.due import Due

BAR_WIDTH = 24
BAR_SECONDS = 0.1  # between two drawings of the bar
LINE_SECONDS = 5.0  # between two lines where there is no terminal


class Progress:
    """Tells of the steps of one run.

    The first step of a stage is compiled: it counts for the steps, and not for the rates.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        start: int = 0,
        stream: TextIO | None = None,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins after `start` steps; says nothing where not `enabled`."""
        self._config = config
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._enabled = enabled
        self._clock = clock
        self._tokens_left = sum(_tokens(config.stage_at(step)) for step in range(start, config.total_steps))
        self._stage: Stage | None = None
        self._seconds, self._steps = 0.0, 0  # of the stage, without its first step
        self._last_time, self._last_shown = clock(), clock()
        self._width = 0  # of the bar on the screen

    def update(self, done: int, loss: Callable[[], float]) -> None:
        """Tells that `done` steps are done. `loss` gives the loss of the last one, and is called where it is shown."""
        now = self._clock()
        stage = self._config.stage_at(done - 1)
        self._tokens_left -= _tokens(stage)
        if stage is self._stage:
            self._seconds += now - self._last_time
            self._steps += 1
        else:
            self._stage, self._seconds, self._steps = stage, 0.0, 0
        self._last_time = now
        if self._enabled and self._is_due(done, now):
            self._last_shown = now
            self._show(done, self._describe(done, stage, loss()))

    def restart_clock(self) -> None:
        """Leaves the time since the last step (a validation, a save) out of the rates."""
        self._last_time = self._clock()

    def note(self, text: str) -> None:
        """Writes a line of its own."""
        if self._enabled:
            self.close()
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leaves the bar as it is, and goes to the next line."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0

    def _is_due(self, done: int, now: float) -> bool:
        if self._is_terminal:
            return done == self._config.total_steps or now - self._last_shown >= BAR_SECONDS
        return Due.after(done, self._config).log or now - self._last_shown >= LINE_SECONDS

    def _describe(self, done: int, stage: Stage, loss: float) -> str:
        parts = [f"step {done}/{self._config.total_steps}", f"length {stage.length}", f"loss {loss:.4f}"]
        if self._steps and self._seconds > 0:
            steps = self._steps / self._seconds
            tokens = steps * _tokens(stage)
            left = format_seconds(self._tokens_left / tokens)
            parts += [f"{steps:.3g} steps/s", f"{tokens:,.0f} tokens/s", f"{left} left"]
        return ", ".join(parts)

    def _show(self, done: int, text: str) -> None:
        if self._is_terminal:
            filled = BAR_WIDTH * done // self._config.total_steps
            line = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {text}"
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def format_seconds(seconds: float) -> str:
    """Such as 45 s, 3 min 05 s or 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _tokens(stage: Stage) -> int:
    return stage.batch_size * stage.length
