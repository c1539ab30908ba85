"""Progress of training: steps, loss, rates and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from experiments.engine.bar import Bar
from experiments.engine.config import Stage, TrainConfig
from experiments.engine.due import Due

BAR_SECONDS = 0.1  # seconds between two drawings of the bar
LINE_SECONDS = 5.0  # seconds between two lines if there is no terminal


class Progress:
    """The progress display of one run.

    The first step of a stage includes compilation, so it does not count for the rates.
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
        """Begins after `start` steps. Prints nothing if `enabled` is False."""
        self._config = config
        self._bar = Bar(config.total_steps, stream)
        self._enabled = enabled
        self._clock = clock
        self._tokens_left = sum(_tokens(config.stage_at(step)) for step in range(start, config.total_steps))
        self._stage: Stage | None = None
        self._seconds, self._steps = 0.0, 0  # of the current stage, without its first step
        self._last_time, self._last_shown = clock(), clock()

    def update(self, done: int, loss: Callable[[], float]) -> None:
        """Shows that `done` steps are done. `loss` returns the last loss, and is called only if it is shown."""
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
            self._bar.show(done, self._describe(done, stage, loss()))

    def restart_clock(self) -> None:
        """Excludes the time since the last step (a validation, a save) from the rates."""
        self._last_time = self._clock()

    def note(self, text: str) -> None:
        """Writes the text on a separate line."""
        if self._enabled:
            self._bar.note(text)

    def close(self) -> None:
        """Ends the line of the bar, which stays on the screen."""
        self._bar.close()

    def _is_due(self, done: int, now: float) -> bool:
        if self._bar.is_terminal:
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


def format_seconds(seconds: float) -> str:
    """Formats a duration for people: '45 s', '3 min 05 s', '2 h 10 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _tokens(stage: Stage) -> int:
    return stage.batch_size * stage.length
