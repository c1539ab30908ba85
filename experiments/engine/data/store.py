"""Data sets on disk: they are found prepared, or as raw files, or downloaded; then their splits are read by index.

A set is prepared by a builder of tensorflow-datasets, which needs no TensorFlow, into a directory of its own that gets
its name when all of it is there. A manifest beside the records has their check sums, so a damaged set is refused.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.engine.data import disk, raw, sums
from experiments.engine.data.catalog import DataSet, Form, find
from experiments.engine.data.disk import DATA_DIR, PARTIAL, PREPARED, PREPARED_DIR, data_dir_of, prepared_dir_of
from experiments.engine.data.download import download_form
from experiments.engine.data.manifest import verify, write_manifest
from experiments.engine.errors import EngineError, one_line

__all__ = ["DATA_DIR", "PREPARED_DIR", "check_labels", "data_dir_of", "open_split", "prepare", "prepared_dir_of"]


def open_split(name: str, split: str, data_dir: str | os.PathLike[str] | None = None) -> Sequence[dict[str, Any]]:
    """Opens a split of a data set, and prepares the set if that has not been done.

    Args:
      name: Name of the data set.
      split: Name of the split.
      data_dir: Directory of raw and prepared sets. The default is the one that ELSAA_DATA_DIR names.

    Returns:
      A sequence of examples: image (height, width, channels) uint8 and label, or text, label and id.
    """
    data_set = find(name)
    if split not in data_set.splits:
        raise EngineError(f"{name} has no split {split!r}; use one of {', '.join(data_set.splits)}")
    directory = data_dir_of(data_dir)
    return _open(data_set, directory, prepared_dir_of(directory))[split]


def check_labels(name: str, labels: np.ndarray) -> None:
    """Refuses labels of a prepared set that are not those of its classes.

    Preparation checks labels as well, but a prepared set may come from elsewhere.
    """
    num_classes = find(name).num_classes
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if outside.size:
        raise EngineError(
            f"the prepared set {name} has the label {outside[0]}, and must have labels from 0 to {num_classes - 1}; "
            "remove its directory, and it is prepared anew"
        )


@functools.cache
def _open(data_set: DataSet, data_dir: pathlib.Path, prepared_dir: pathlib.Path) -> dict[str, Any]:
    """Returns all splits of a set by name. Its files are checked once per process."""
    from experiments.engine.data.builder import read_splits

    return read_splits(data_set, prepare(data_set, data_dir, prepared_dir))


def prepare(data_set: DataSet, data_dir: pathlib.Path, prepared_dir: pathlib.Path) -> pathlib.Path:
    """Returns the directory of a prepared set, and prepares it in `prepared_dir` if that has not been done.

    If two processes need the set at the same time, one of them prepares it and the other one waits.
    """
    folder = data_dir / data_set.name
    place = pathlib.Path(data_set.name) / data_set.version
    for target in (data_dir / PREPARED / place, prepared_dir / place):
        if target.is_dir():
            verify(target, data_set, folder)
            return target
    older = _older_version(data_set, data_dir / PREPARED, prepared_dir)
    form = _raw_form(data_set, folder, older)
    disk.check_writable(prepared_dir, data_set.name)
    if older:
        print(f"{data_set.name} was prepared by version {older}, and {data_set.version} is needed", file=sys.stderr)
    with disk.writing(prepared_dir), disk.locked(prepared_dir / f".{data_set.name}.lock") as alone:
        if alone:
            # A preparation that was killed leaves its directory behind.
            for stale in prepared_dir.glob(f".{data_set.name}.*{PARTIAL}"):
                shutil.rmtree(stale)
        if not target.is_dir():
            _build(data_set, form, folder, prepared_dir, target)
    verify(target, data_set, folder)
    return target


def _build(
    data_set: DataSet, form: Form, folder: pathlib.Path, prepared_dir: pathlib.Path, target: pathlib.Path
) -> None:
    """Prepares a set in a directory beside its target, and renames the directory when all of it is there.

    Every process that prepares writes, not the main one alone: the others may have disks of their own.
    """
    from experiments.engine.data.builder import build

    raw_sums = sums.check(data_set, form, folder)
    partial = pathlib.Path(tempfile.mkdtemp(PARTIAL, f".{data_set.name}.", prepared_dir))
    print(f"preparing {data_set.name} from {folder}", file=sys.stderr, flush=True)
    try:
        built = build(data_set, form, folder, partial)
        write_manifest(built, data_set, raw_sums)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            built.rename(target)
        except OSError:
            if not target.is_dir():  # Where there are no locks, another process may have been faster.
                raise
    except (EngineError, OSError):
        raise
    except Exception as error:  # The libraries raise many kinds, for a full disk as well as for data they cannot store.
        raise EngineError(
            f"{data_set.name} cannot be prepared from {folder} ({one_line(error)}); if the raw files are damaged, get "
            f"them again from {data_set.home}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _raw_form(data_set: DataSet, folder: pathlib.Path, older: str | None) -> Form:
    """Returns the form whose raw files are in the folder; if there is none, downloads the published one."""
    form = raw.present_form(data_set, folder)
    if form is not None:
        return form
    published = data_set.forms[-1]
    # The message names a missing file of the form of which some files are there, or else of the published form.
    absent = [raw.absent_files(form, folder) for form in data_set.forms]
    begun = [names for form, names in zip(data_set.forms, absent, strict=True) if len(names) < len(form.files)]
    reason = f"{folder / (begun[0] if begun else absent[-1])[0]} is not there"
    if older:
        reason = f"it was prepared by version {older} and {data_set.version} is needed, for which {reason}"
    failure = download_form(published, folder)
    if not failure:
        return published
    raise EngineError(
        f"the data set {data_set.name} cannot be found: {reason}, and {failure}; get it from {data_set.home}, or give "
        f"another --data-dir (or {DATA_DIR})"
    )


def _older_version(data_set: DataSet, *directories: pathlib.Path) -> str | None:
    """Returns the newest other version of the set that was prepared, or None."""
    found = [path for directory in directories for path in (directory / data_set.name).glob("*")]
    versions = [path.name for path in found if path.is_dir()]
    return max(versions, default=None, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])
