"""The error that a user can mend: one sentence with the path or field, what is wrong, and the way out."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator


class EngineError(Exception):
    """A run cannot start or go on for a reason that lies outside the code; its text is one sentence."""


def one_line(error: BaseException) -> str:
    """The text of an error on one line, its kind where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def disk_errors(path: pathlib.Path) -> Iterator[None]:
    """Turns an OSError of writing or reading `path` into an EngineError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise EngineError(
            f"{path} cannot be used ({reason}); make room or give access and run the same command again, or take "
            "another --workdir"
        ) from error
