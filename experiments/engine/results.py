"""Results of evaluations: one file, whole after each of them, so that none is done twice."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.engine.config import RunConfig
from experiments.engine.errors import EngineError
from experiments.engine.workdir import RESULTS, read_json, versions, write_json

Rows = list[dict[str, Any]]


class Results:
    """The file of results of one run: `rows` of all evaluations, and which of them are done."""

    def __init__(self, config: RunConfig, workdir: pathlib.Path) -> None:
        """Reads what is done."""
        self._path = workdir / RESULTS
        self._head = {"config": config.to_json(), "versions": versions()}
        self._done: dict[str, Rows] = {}
        stored = read_json(self._path)
        if stored is None:
            return
        try:
            rows = iter(stored["rows"])
            for done in stored["done"]:
                self._done[_name(done["spec"])] = [next(rows) for _ in range(done["rows"])]
            self._head["versions"] = stored["versions"]
        except (KeyError, TypeError, RuntimeError, StopIteration) as error:
            raise EngineError(f"{self._path} is damaged; move it away to evaluate anew") from error

    def pending(self, specs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the evaluations that are not done."""
        return [spec for spec in specs if _name(spec) not in self._done]

    def add(self, spec: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
        """Writes the rows of one more evaluation."""
        self._done[_name(spec)] = _plain(list(rows))
        done = [{"spec": json.loads(name), "rows": len(rows)} for name, rows in self._done.items()]
        write_json(self._path, self._head | {"done": done, "rows": self.rows()})

    def rows(self, specs: Sequence[dict[str, Any]] | None = None) -> Rows:
        """The rows of these evaluations, in their order; None: of all that are done."""
        names = self._done if specs is None else map(_name, specs)
        return [row for name in names for row in self._done[name]]


def _name(spec: dict[str, Any]) -> str:
    return json.dumps(_plain(spec), sort_keys=True)


def _plain(value: Any) -> Any:
    """A value as it is read back from the file."""
    return json.loads(json.dumps(value, default=lambda scalar: scalar.item()))
