"""The error that a user can correct: one sentence with the path or field, what is wrong, and the way out."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator


class EngineError(Exception):
    """An error with a cause outside the code, such as a missing file or a full disk. Its text is one sentence."""


def one_line(error: BaseException) -> str:
    """Returns the text of an error on one line, or the name of its class if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def disk_errors(path: pathlib.Path) -> Iterator[None]:
    """Converts an OSError of writing or reading `path` to an EngineError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise EngineError(
            f"{path} cannot be used ({reason}); make room or give access and run the same command again, or take "
            "another --workdir"
        ) from error
