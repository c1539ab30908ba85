"""The manifest of a prepared set: the check sums of its files and of the raw files that it was prepared from."""

from __future__ import annotations

import json
import pathlib

from experiments.engine.data import raw, sums
from experiments.engine.data.catalog import DataSet
from experiments.engine.errors import EngineError, one_line

MANIFEST = "elsaa_checksums.json"
REMEDY = "remove the directory, and it is prepared anew"


def write_manifest(directory: pathlib.Path, data_set: DataSet, raw_sums: dict[str, str]) -> None:
    """Writes the manifest of a set that was just prepared in a directory."""
    files = {path.name: sums.sha256_of(path) for path in sorted(directory.iterdir()) if path.is_file()}
    manifest = {"name": data_set.name, "version": data_set.version, "raw": raw_sums, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def verify(directory: pathlib.Path, data_set: DataSet, folder: pathlib.Path) -> None:
    """Refuses a prepared set that has changed since, or that was prepared from other raw files than are in the folder.

    Args:
      directory: Directory of the prepared set.
      data_set: The data set.
      folder: Folder of its raw files, which may be missing.
    """
    files, sources = _read_manifest(directory, data_set)
    form = raw.present_form(data_set, folder)
    if form is not None:
        names = [file.name for file in form.files]
        if set(names) != set(sources):
            raise EngineError(
                f"{directory} was prepared from {', '.join(sorted(sources))}, and {folder} has {', '.join(names)}; "
                f"{REMEDY}"
            )
        for name in names:
            if sums.readable_sum(folder / name) != sources[name]:
                raise EngineError(f"{directory} was prepared from another {name} than is in {folder}; {REMEDY}")
    for name, wanted in files.items():
        path = directory / name
        if not path.is_file() or sums.readable_sum(path) != wanted:
            raise EngineError(f"{path} is {'damaged' if path.exists() else 'missing'}; {REMEDY}")
    for path in sorted(directory.iterdir()):
        # The names of files that tensorflow-datasets reads.
        if path.name not in files and path.name != MANIFEST and (path.suffix == ".json" or "array_record" in path.name):
            raise EngineError(f"{path} was not there when the set was prepared; {REMEDY}")


def _read_manifest(directory: pathlib.Path, data_set: DataSet) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the sums of the prepared files and those of the raw files."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files, sources = dict(manifest["files"]), dict(manifest["raw"])
        if not files or (manifest["name"], manifest["version"]) != (data_set.name, data_set.version):
            raise ValueError(f"it is not the manifest of {data_set.name} {data_set.version}")
    except FileNotFoundError:
        raise EngineError(f"{directory} is not complete (it has no {MANIFEST}); {REMEDY}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise EngineError(f"{path} is damaged ({one_line(error)}); {REMEDY}") from error
    return files, sources
