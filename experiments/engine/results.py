"""Results of evaluations. The file is rewritten whole after each evaluation, so that none is done twice."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

from experiments.engine.config import RunConfig
from experiments.engine.errors import EngineError, one_line
from experiments.engine.workdir import (
    ANOTHER,
    RESULTS,
    damaged,
    first_difference,
    normal,
    read_checked,
    to_number,
    versions,
    write_checked,
)

Rows = list[dict[str, Any]]

EVALUATE_AGAIN = "move it away to evaluate again"


class Results:
    """The results file of one run: the rows of all evaluations, and which evaluations are done."""

    def __init__(self, config: RunConfig, workdir: pathlib.Path) -> None:
        """Reads the evaluations that are done. Raises EngineError if the file is damaged."""
        self._path = workdir / RESULTS
        self._head = {"config": config.to_json(), "versions": versions()}
        self._done: dict[str, Rows] = {}
        stored = read_checked(self._path, EVALUATE_AGAIN)
        if stored is None:
            return
        if not isinstance(stored.get("config"), dict):
            raise damaged(self._path, "it has no 'config'", EVALUATE_AGAIN)
        difference = first_difference(stored["config"], normal(config))
        if difference is not None:
            name, old, new = difference
            raise EngineError(
                f"{self._path} belongs to a run with {name} = {old}, and here {name} = {new}; {EVALUATE_AGAIN}"
            )
        try:
            self._done = _rows_by_evaluation(stored["rows"], stored["done"])
            self._head["versions"] = stored["versions"]
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else one_line(error)
            raise damaged(self._path, reason, EVALUATE_AGAIN) from error

    def pending(self, specs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the evaluations that are not done yet."""
        return [spec for spec in specs if _name(spec) not in self._done]

    def add(self, spec: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
        """Writes the rows of one more evaluation."""
        self._done[_name(spec)] = _plain(list(rows))
        done = [{"spec": json.loads(name), "rows": len(rows)} for name, rows in self._done.items()]
        write_checked(self._path, self._head | {"done": done, "rows": self.rows()})

    def rows(self, specs: Sequence[dict[str, Any]] | None = None) -> Rows:
        """Returns the rows of these evaluations in their order, or of all that are done if `specs` is None."""
        names = self._done if specs is None else map(_name, specs)
        return [row for name in names for row in self._done[name]]


def read_results(path: pathlib.Path, remedy: str = ANOTHER) -> dict[str, Any] | None:
    """Returns the content of a results file, with a list of objects as its "rows"; None if there is no file.

    Args:
      path: Path of the file.
      remedy: End of the error message: the way out if the file is damaged.
    """
    stored = read_checked(path, remedy)
    if stored is None:
        return None
    rows = stored.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise damaged(path, "its 'rows' are missing or not a list of objects", remedy)
    return stored


def check_fields(path: pathlib.Path, rows: Rows, fields: Collection[str], remedy: str = ANOTHER) -> None:
    """Raises EngineError if a row of a results file lacks one of the fields."""
    for number, row in enumerate(rows, 1):
        for name in fields:
            if name not in row:
                raise damaged(path, f"row {number} has no {name!r}", remedy)


def _rows_by_evaluation(rows: Rows, done: Sequence[dict[str, Any]]) -> dict[str, Rows]:
    """Returns the rows of each evaluation, which follow each other in the file."""
    found, start = {}, 0
    for evaluation in done:
        end = start + evaluation["rows"]
        found[_name(evaluation["spec"])] = rows[start:end]
        start = end
    if start != len(rows):
        raise ValueError(f"it has {len(rows)} rows, and its evaluations have {start}")
    return found


def _name(spec: dict[str, Any]) -> str:
    return json.dumps(_plain(spec), sort_keys=True)


def _plain(value: Any) -> Any:
    """Returns a value as it is read back from a file."""
    return json.loads(json.dumps(value, default=to_number))
