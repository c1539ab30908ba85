"""The work directory of a run: which run it belongs to, and files that are always complete."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.engine.config import RunConfig, Stage, TrainConfig, from_json
from experiments.engine.errors import EngineError, disk_errors
from experiments.engine.parallel import is_main_process

CONFIG, METRICS, RESULTS, CHECKPOINTS, LOCK = "config.json", "metrics.jsonl", "results.json", "checkpoints", ".lock"
CHECK = "check"  # the key of a checksum in files that are read back
ANOTHER = "restore it, or take another --workdir"


def versions() -> dict[str, str]:
    """Returns the versions of the packages that a result depends on."""
    names = {"jax": "jax", "flax": "flax", "project": "elsaa-jax"}
    found = {"python": platform.python_version()}
    for name, package in names.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # The project runs from a source tree.
            found[name] = "not installed"
    return found


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a value as JSON. The file is the old one or the new one at any moment. Only the main process writes."""
    write_text(path, json.dumps(value, indent=2, default=to_number) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text, in the same way as `write_json`."""
    if not is_main_process():
        return
    partial = path.with_name(f".{path.name}.partial")
    with disk_errors(path):
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def read_json(path: pathlib.Path, remedy: str = ANOTHER) -> Any:
    """Returns the content of a JSON file, None if there is no file; `remedy` ends the error of a damaged one."""
    with disk_errors(path):
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise damaged(path, "it is not JSON", remedy) from error


def write_checked(path: pathlib.Path, fields: dict[str, Any]) -> None:
    """Writes a JSON object with a checksum of its fields, for `read_checked`."""
    write_json(path, fields | {CHECK: _checksum(fields)})


def read_checked(path: pathlib.Path, remedy: str = ANOTHER) -> dict[str, Any] | None:
    """Returns the fields of a file of `write_checked`, None if there is no file.

    Files without a checksum, written by older versions, are read as they are.

    Args:
      path: Path of the file.
      remedy: End of the error message: the way out if the file is damaged.

    Raises:
      EngineError: The file is not a JSON object, or differs from what was written.
    """
    stored = read_json(path, remedy)
    if stored is None:
        return None
    if not isinstance(stored, dict):
        raise damaged(path, "it is not a JSON object", remedy)
    if stored.pop(CHECK, None) not in (None, _checksum(stored)):
        raise damaged(path, "its checksum is wrong", remedy)
    return stored


def damaged(path: pathlib.Path, reason: str, remedy: str) -> EngineError:
    """Returns the error for a file with unusable content."""
    return EngineError(f"{path} is damaged ({reason}); {remedy}")


def _checksum(fields: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(fields, sort_keys=True, default=to_number).encode()):08x}"


def to_number(scalar: Any) -> Any:
    """Converts a NumPy or JAX scalar for `json.dumps`."""
    return scalar.item()


def normal(config: RunConfig) -> Any:
    """Returns the config as it is read back from a file."""
    return json.loads(json.dumps(config.to_json()))


def stored_config(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Returns the content of config.json, None if the work directory is new; refuses other directories."""
    stored = read_json(workdir / CONFIG)
    if stored is None:
        for name in (CHECKPOINTS, METRICS, RESULTS):
            if (workdir / name).exists():
                raise EngineError(
                    f"{workdir} has {name} but no {CONFIG}, so it is not the work dir of a run; take another --workdir"
                )
        return None
    if not isinstance(stored, dict) or not isinstance(stored.get("config"), dict):
        raise EngineError(f"{workdir / CONFIG} is not that of a run; restore it, or take another --workdir")
    return stored


def stored_task(workdir: pathlib.Path, classes: Sequence[type]) -> Any:
    """Returns the task of the run in a work directory, built from these classes."""
    stored = stored_config(workdir)
    if stored is None:
        raise EngineError(f"{workdir} is not the work dir of a run; train first, or take another one")
    try:
        return from_json(stored["config"]["task"], classes)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{workdir / CONFIG} is that of another experiment or version; take another one") from error


def stored_training(directory: pathlib.Path) -> TrainConfig | None:
    """Returns the training settings of a run with stages of class `Stage`, None if there is no config.json."""
    stored = read_json(directory / CONFIG)
    if stored is None:
        return None
    try:
        return from_json(stored["config"]["train"], (TrainConfig, Stage))
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(directory / CONFIG, "its training settings cannot be read", ANOTHER) from error


def check_same(config: RunConfig, stored: dict[str, Any], workdir: pathlib.Path) -> None:
    """Raises EngineError if the work directory belongs to a run with another config."""
    difference = first_difference(stored["config"], normal(config))
    if difference is not None:
        name, old, new = difference
        raise EngineError(
            f"{workdir} belongs to a run with {name} = {old}, and here {name} = {new}; take another --workdir"
        )


def first_difference(old: Any, new: Any, name: str = "") -> tuple[str, str, str] | None:
    """Returns the name of the first field that differs, with both values; None if all are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(key for key in old if key not in new)]:
            inner = f"{name}.{key}" if name else key
            if key not in old or key not in new:
                return inner, _shown(old, key), _shown(new, key)
            difference = first_difference(old[key], new[key], inner)
            if difference is not None:
                return difference
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        differences = (
            first_difference(*pair, f"{name}[{index}]") for index, pair in enumerate(zip(old, new, strict=True))
        )
        return next((difference for difference in differences if difference is not None), None)
    return None if old == new else (name, json.dumps(old), json.dumps(new))


def _shown(fields: dict[str, Any], key: str) -> str:
    return json.dumps(fields[key]) if key in fields else "(absent)"


def claim(config: RunConfig, workdir: pathlib.Path) -> None:
    """Assigns a new work directory to this config, or checks that an old one belongs to it."""
    stored = stored_config(workdir)
    if stored is not None:
        check_same(config, stored, workdir)
    else:
        write_json(workdir / CONFIG, {"config": config.to_json(), "versions": versions()})


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Creates the directory, and keeps other runs out of it until the context ends."""
    with disk_errors(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / LOCK).open("a") if is_main_process() else None
    if lock is None:
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EngineError(
                f"another run is at work in {workdir}; wait for its end, or take another --workdir"
            ) from error
        except OSError:  # The file system has no locks, so nothing keeps other runs out.
            pass
        yield
