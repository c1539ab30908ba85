"""Check sums of raw files: published, listed by the user, or recorded when a file was first downloaded."""

from __future__ import annotations

import hashlib
import pathlib
import sys

from experiments.engine.data.catalog import DataSet, Form, RawFile
from experiments.engine.errors import EngineError

SUMS = "SHA256SUMS"  # at the top of a data directory, in the format of `sha256sum`
RECORD = ".sha256"  # suffix of the file that holds the sum of a first download, in the same format


def sha256_of(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def readable_sum(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file, or raises an EngineError if the file cannot be read."""
    try:
        return sha256_of(path)
    except OSError as error:
        raise EngineError(f"{path} cannot be read ({error.strerror}); give access to it") from error


def record_of(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of the file that holds the recorded sum of a raw file."""
    return path.with_name(path.name + RECORD)


def record(file: RawFile, folder: pathlib.Path) -> None:
    """Records the sum of a file that was just downloaded, if no sum of it is known."""
    path = folder / file.name
    if published_sum(file, folder) is None and not record_of(path).exists():
        record_of(path).write_text(f"{sha256_of(path)}  {file.name}\n", encoding="utf-8")
        print(
            f"no SHA-256 of {file.name} is published; that of this download is recorded in {record_of(path)}, and "
            "another file is refused from now on",
            file=sys.stderr,
        )


def published_sum(file: RawFile, folder: pathlib.Path) -> str | None:
    """Returns the sum that the catalog has of a file, or the one in SHA256SUMS, or None."""
    if file.sha256 is not None:
        return file.sha256
    return _listed_sum(folder.parent / SUMS, f"{folder.name}/{file.name}")


def check(data_set: DataSet, form: Form, folder: pathlib.Path) -> dict[str, str]:
    """Returns the sums of the raw files of a form by name; refuses a file with another sum than is known of it."""
    found = {}
    for file in form.files:
        path = folder / file.name
        digest = found[file.name] = readable_sum(path)
        published = published_sum(file, folder)
        recorded = _listed_sum(record_of(path), file.name) if published is None else None
        if published not in (None, digest):
            raise EngineError(
                f"{path} is damaged (its SHA-256 is {digest[:16]}..., it must be {published[:16]}...); "
                f"remove it, and get it again from {data_set.home}"
            )
        if recorded not in (None, digest):
            raise EngineError(
                f"{path} is not the file that was first downloaded (its SHA-256 is {digest[:16]}..., "
                f"{record_of(path)} has {recorded[:16]}...); put the first one back, or remove {record_of(path)} to "
                "accept the new one"
            )
    return found


def _listed_sum(sums: pathlib.Path, wanted: str) -> str | None:
    """Returns the sum of a file in a list of `sha256sum`, or None if the list or the file in it is missing."""
    if not sums.is_file():
        return None
    try:
        lines = sums.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(
            f"{sums} cannot be read ({getattr(error, 'strerror', None) or 'it is not UTF-8 text'}); write it by "
            "sha256sum, or remove it"
        ) from error
    for line in lines:
        digest, _, name = line.partition(" ")
        if name.lstrip(" *").removeprefix("./") == wanted:
            return digest.lower()
    return None
