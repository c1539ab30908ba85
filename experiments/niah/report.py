"""Report of needle in a haystack: results.json, a table, and pictures of accuracy over length and depth."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.engine import pictures
from experiments.engine.results import EVALUATE_AGAIN, Rows, check_fields, read_results
from experiments.engine.table import format_table
from experiments.engine.workdir import RESULTS, damaged, versions, write_checked
from experiments.niah.haystack import NUM_VALUES
from experiments.niah.task import METHODS, ROW_FIELDS


def write_report(workdir: pathlib.Path) -> list[pathlib.Path]:
    """Writes results.json and pictures for all methods evaluated in the work directory; returns the files' paths."""
    stored = {method: _read(workdir / method / RESULTS) for method in METHODS}
    found = {method: results for method, results in stored.items() if results is not None}
    rows = [row for results in found.values() for row in results["rows"]]
    configs = {method: results["config"] for method, results in found.items()}
    write_checked(workdir / RESULTS, {"config": configs, "versions": versions(), "rows": rows})
    written = [workdir / RESULTS]
    curves: dict[str, list[pictures.Point]] = {}
    trained = 0
    for row in rows:
        if row["n"] and row["depth"] is None and not row["distractors"]:
            point = (row["length"], row["accuracy"], row["low"], row["high"])
            curves.setdefault(row["attention"], []).append(point)
            trained = trained or row["train_length"]
    path = workdir / "accuracy.png"
    if curves and pictures.accuracy_over_length(path, curves, trained=trained, chance=1 / NUM_VALUES):
        written.append(path)
    for method in dict.fromkeys(row["attention"] for row in rows):
        cells = depth_cells([row for row in rows if row["attention"] == method and not row["distractors"]])
        path = workdir / f"depths_{method}.png"
        if cells and pictures.heat_map(path, cells, title=f"{method}: accuracy"):
            written.append(path)
    return written


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the results of one method, None if it was not evaluated. Raises EngineError if they are damaged."""
    stored = read_results(path, EVALUATE_AGAIN)
    if stored is not None:
        check_fields(path, stored["rows"], ROW_FIELDS, EVALUATE_AGAIN)
        if "config" not in stored:
            raise damaged(path, "it has no 'config'", EVALUATE_AGAIN)
    return stored


def depth_cells(rows: Rows) -> dict[tuple[int, float], float]:
    """Returns accuracy by length and depth: at fixed depths if there are any, else in parts of the context."""
    fixed = {(row["length"], row["depth"]): row["accuracy"] for row in rows if row["n"] and row["depth"] is not None}
    return fixed or {
        (row["length"], part["depth"]): part["correct"] / part["n"]
        for row in rows
        for part in row.get("by_depth", [])
        if part["n"]
    }


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table with one line for each method, length, depth and number of distractors."""
    header = ("attention", "tokens", "depth", "distractors", "accuracy", "95 % interval", "n", "s/example")
    lines = []
    for row in rows:
        place = "any" if row["depth"] is None else f"{row['depth']:.2f}"
        line = [row["attention"], f"{row['length']:,}", place, row["distractors"]]
        if not row["n"]:
            lines.append([*line, "-", row["skipped"], 0, "-"])
            continue
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append([*line, f"{row['accuracy']:.3f}", interval, row["n"], f"{row['seconds_per_example']:.3f}"])
    return format_table(header, lines)
