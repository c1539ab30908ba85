"""A progress bar on a terminal, and progress lines elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

BAR_WIDTH = 24


class Bar:
    """A progress bar with a text."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self.is_terminal = self._stream.isatty()
        self._width = 0  # width of the bar on the screen

    def show(self, done: int, text: str) -> None:
        """Draws the bar with `done` of `total`; prints the text on a line if there is no terminal."""
        if self.is_terminal:
            filled = BAR_WIDTH * done // self._total
            line = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {text}"
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Writes the text on a separate line."""
        self.close()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Ends the line of the bar, which stays on the screen."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0
