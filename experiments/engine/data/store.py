"""Where a data set is found: prepared, as raw files, or at its public home; and its splits, read by index.

A set is prepared by a builder of tensorflow-datasets, which needs no TensorFlow, into a directory of its own that gets
its name when all of it is there. Beside the records lies a list of their check sums, by which a damaged set is known.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.client
import json
import os
import pathlib
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.engine.data import raw
from experiments.engine.data.catalog import DataSet, Form, find
from experiments.engine.errors import EngineError, one_line

DATA_DIR, PREPARED_DIR = "ELSAA_DATA_DIR", "ELSAA_PREPARED_DIR"
PREPARED, MANIFEST = "prepared", "elsaa_checksums.json"
PARTIAL = ".partial"
DOWNLOAD_SECONDS = 30
CHUNK = 1 << 20


def data_dir_of(given: str | os.PathLike[str] | None) -> pathlib.Path:
    """The data dir that --data-dir or ELSAA_DATA_DIR names, `data` where none does."""
    return pathlib.Path(given or os.environ.get(DATA_DIR) or "data").absolute()


def prepared_dir_of(data_dir: pathlib.Path) -> pathlib.Path:
    """Where sets are prepared: what ELSAA_PREPARED_DIR names, or `prepared` in the data dir."""
    return pathlib.Path(os.environ.get(PREPARED_DIR) or data_dir / PREPARED).absolute()


def open_split(name: str, split: str, data_dir: str | os.PathLike[str] | None = None) -> Sequence[dict[str, Any]]:
    """A split of a data set, read by index; prepares the set where it is not.

    Args:
      name: of the data set.
      split: of it.
      data_dir: of raw and prepared sets; None: ELSAA_DATA_DIR.

    Returns:
      A sequence of examples: image (height, width, channels) uint8 and label, or text, label and id.
    """
    data_set = find(name)
    if split not in data_set.splits:
        raise EngineError(f"{name} has no split {split!r}; use one of {', '.join(data_set.splits)}")
    directory = data_dir_of(data_dir)
    return _open(data_set, directory, prepared_dir_of(directory))[split]


@functools.cache
def _open(data_set: DataSet, data_dir: pathlib.Path, prepared_dir: pathlib.Path) -> dict[str, Any]:
    """All splits of a set, whose files are checked once."""
    from experiments.engine.data.builder import read_split

    directory = prepare(data_set, data_dir, prepared_dir)
    return {split: read_split(directory, split) for split in data_set.splits}


def prepare(data_set: DataSet, data_dir: pathlib.Path, prepared_dir: pathlib.Path) -> pathlib.Path:
    """The directory of a prepared set, in the data dir or in `prepared_dir`; makes it in the latter where it is not.

    Two processes make it once.
    """
    folder = data_dir / data_set.name
    place = pathlib.Path(data_set.name) / data_set.version
    for target in (data_dir / PREPARED / place, prepared_dir / place):
        if target.is_dir():
            _verify(target, data_set, folder)
            return target
    older = _older(data_set, data_dir / PREPARED, prepared_dir)
    form = _raw_form(data_set, folder, older)
    _check_writable(prepared_dir, data_set)
    if older:
        print(f"{data_set.name} was prepared by version {older}, and {data_set.version} is needed", file=sys.stderr)
    with _writing(prepared_dir), _locked(prepared_dir / f".{data_set.name}.lock") as alone:
        if alone:
            for stale in prepared_dir.glob(f".{data_set.name}.*{PARTIAL}"):  # of a preparation that was killed
                shutil.rmtree(stale)
        if not target.is_dir():
            _build(data_set, form, folder, prepared_dir, target)
    _verify(target, data_set, folder)
    return target


def _build(
    data_set: DataSet, form: Form, folder: pathlib.Path, prepared_dir: pathlib.Path, target: pathlib.Path
) -> None:
    from experiments.engine.data.builder import build

    sums = raw.check(data_set, form, folder)
    partial = pathlib.Path(tempfile.mkdtemp(PARTIAL, f".{data_set.name}.", prepared_dir))
    print(f"preparing {data_set.name} from {folder}", file=sys.stderr, flush=True)
    try:
        built = build(data_set, form, folder, partial)
        files = {path.name: raw.sha256_of(path) for path in sorted(built.iterdir()) if path.is_file()}
        manifest = {"name": data_set.name, "version": data_set.version, "raw": sums, "files": files}
        # By every process that prepares, not by the main one alone: others may have disks of their own.
        (built / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            built.rename(target)
        except OSError:
            if not target.is_dir():  # Where there are no locks, another process may have been faster.
                raise
    except (EngineError, OSError):
        raise
    except Exception as error:  # of the libraries, which have many: a disk that is full, a key that is there twice
        raise EngineError(
            f"{data_set.name} cannot be prepared from {folder} ({one_line(error)}); if the raw files are damaged, get "
            f"them again from {data_set.home}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _verify(target: pathlib.Path, data_set: DataSet, folder: pathlib.Path) -> None:
    """Refuses a prepared set that is not what was prepared, or from other raw files than are there."""
    remedy = "remove the directory, and it is prepared anew"
    try:
        manifest = json.loads((target / MANIFEST).read_text())
        files, sources = dict(manifest["files"]), dict(manifest["raw"])
        if not files or (manifest["name"], manifest["version"]) != (data_set.name, data_set.version):
            raise ValueError("it is not of this set")
    except FileNotFoundError:
        raise EngineError(f"{target} is not complete (it has no {MANIFEST}); {remedy}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{target / MANIFEST} is damaged ({one_line(error)}); {remedy}") from error
    present = _present_form(data_set, folder)
    if present is not None:
        names = [file.name for file in present.files]
        if set(names) != set(sources):
            raise EngineError(
                f"{target} was prepared from {', '.join(sorted(sources))}, and {folder} has {', '.join(names)}; "
                f"{remedy}"
            )
        for name in names:
            if raw.readable_sum(folder / name) != sources[name]:
                raise EngineError(f"{target} was prepared from another {name} than is in {folder}; {remedy}")
    for name, wanted in files.items():
        path = target / name
        if not path.is_file() or raw.sha256_of(path) != wanted:
            raise EngineError(f"{path} is {'damaged' if path.exists() else 'missing'}; {remedy}")


def _raw_form(data_set: DataSet, folder: pathlib.Path, older: str | None) -> Form:
    """The form whose raw files are in the folder; where there is none, that of the public home, loaded from there."""
    form = _present_form(data_set, folder)
    if form is not None:
        return form
    # Of the form that is begun; where none is, of that of the home.
    begun = [absent for form in data_set.forms if 0 < len(absent := _absent(form, folder)) < len(form.files)]
    home = data_set.forms[-1]
    reason = f"{folder / (begun[0] if begun else _absent(home, folder))[0]} is not there"
    if older:
        reason = f"it was prepared by version {older} and {data_set.version} is needed, for which {reason}"
    reason = _load(home, folder, reason)
    if not reason:
        return home
    raise EngineError(
        f"the data set {data_set.name} cannot be found: {reason}; get it from {data_set.home}, or give another "
        f"--data-dir (or {DATA_DIR})"
    )


def _present_form(data_set: DataSet, folder: pathlib.Path) -> Form | None:
    """The form of which all raw files are there; that of the home, where there are several: it is the whole set."""
    return next((form for form in reversed(data_set.forms) if not _absent(form, folder)), None)


def _absent(form: Form, folder: pathlib.Path) -> list[str]:
    return [file.name for file in form.files if not (folder / file.name).is_file()]


def _older(data_set: DataSet, *directories: pathlib.Path) -> str | None:
    """Another version of the set that was prepared."""
    found = [path for directory in directories for path in (directory / data_set.name).glob("*")]
    versions = [path.name for path in found if path.is_dir()]
    return max(versions, default=None, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])


def _load(form: Form, folder: pathlib.Path, reason: str) -> str:
    """Loads the files of a form; returns `reason` and why it cannot, or "" where it could."""
    if (closed := _read_only(folder)) is not None:
        return f"{reason}, and {closed} cannot be written to, so it is not loaded from its home"
    with _writing(folder), _locked(folder / ".lock"):
        for file in form.files:
            assert file.url is not None  # The last form of every set is that of its home.
            if (folder / file.name).is_file():
                continue
            try:
                _download(file.url, folder / file.name)
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                cause = error.reason if isinstance(error, urllib.error.URLError) else error
                return f"{reason}, and {file.url} cannot be reached ({' '.join(str(cause).split())})"
    return ""


def _download(url: str, path: pathlib.Path) -> None:
    """Loads a file, which has its name when it is whole."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    print(f"loading {url}", file=sys.stderr, flush=True)
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_SECONDS) as response, partial.open("wb") as file:
            expected, done = int(response.headers.get("Content-Length", 0)), 0
            while chunk := _receive(response):
                file.write(chunk)
                done += len(chunk)
                if sys.stderr.isatty():
                    print(f"\r{done / 1e6:,.0f} of {expected / 1e6:,.0f} MB", end="", file=sys.stderr, flush=True)
        if expected and done != expected:
            raise ConnectionError(f"it ended after {done} of {expected} bytes")
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _receive(response: Any) -> bytes:
    """The next part of a download; an error here is one of the connection, not of the disk."""
    try:
        return response.read(CHUNK)
    except OSError as error:
        raise ConnectionError(one_line(error)) from error


def _read_only(directory: pathlib.Path) -> pathlib.Path | None:
    """What exists of a directory, where it is marked as read-only, for root as well, who could write there."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return None if existing.stat().st_mode & 0o222 and os.access(existing, os.W_OK) else existing


def _check_writable(directory: pathlib.Path, data_set: DataSet) -> None:
    if (closed := _read_only(directory)) is not None:
        raise EngineError(
            f"{closed} cannot be written to, and {data_set.name} has to be prepared; give a --data-dir that can, or "
            f"set {PREPARED_DIR} to a directory for prepared sets"
        )


@contextlib.contextmanager
def _writing(directory: pathlib.Path) -> Iterator[None]:
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
def _locked(path: pathlib.Path) -> Iterator[bool]:
    """Waits for another process that loads or prepares the same set; False where the file system has no locks."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            alone = False
        else:
            alone = True
        yield alone
