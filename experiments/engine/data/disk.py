"""Directories for data: which one is used, whether it can be written to, and locks between processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from experiments.engine.errors import EngineError, one_line

DATA_DIR, PREPARED_DIR = "ELSAA_DATA_DIR", "ELSAA_PREPARED_DIR"
PREPARED = "prepared"
PARTIAL = ".partial"  # suffix of files and directories that are not complete yet


def data_dir_of(given: str | os.PathLike[str] | None) -> pathlib.Path:
    """Returns the data directory: the given one, or the one that ELSAA_DATA_DIR names, or `data`."""
    return pathlib.Path(given or os.environ.get(DATA_DIR) or "data").absolute()


def prepared_dir_of(data_dir: pathlib.Path) -> pathlib.Path:
    """Returns the directory for prepared sets: the one that ELSAA_PREPARED_DIR names, or `prepared` in the data dir."""
    return pathlib.Path(os.environ.get(PREPARED_DIR) or data_dir / PREPARED).absolute()


def read_only(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the part of a path that exists if it is read-only, and None if it can be written to.

    The permission bits are checked as well, because root can write to directories that are marked as read-only.
    """
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return None if existing.stat().st_mode & 0o222 and os.access(existing, os.W_OK) else existing


def check_writable(directory: pathlib.Path, name: str) -> None:
    """Refuses a directory that cannot be written to, and in which the data set `name` has to be prepared."""
    if (closed := read_only(directory)) is not None:
        raise EngineError(
            f"{closed} cannot be written to, and {name} has to be prepared; give a --data-dir that can, or "
            f"set {PREPARED_DIR} to a directory for prepared sets"
        )


@contextlib.contextmanager
def writing(directory: pathlib.Path) -> Iterator[None]:
    """Makes a directory, and turns an OSError of the block into an EngineError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise EngineError(
            f"{directory} cannot be used for data ({error.strerror}); give a --data-dir that can be written to, or set "
            f"{PREPARED_DIR} to a directory for prepared sets"
        ) from error
    except OSError as error:
        raise EngineError(
            f"data cannot be written to {directory} ({error.strerror or one_line(error)}); make room and run the same "
            "command again"
        ) from error


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[bool]:
    """Waits for another process that downloads or prepares the same set.

    Yields True if this process holds the lock, and False if the file system has no locks.
    """
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            alone = False
        else:
            alone = True
        yield alone
