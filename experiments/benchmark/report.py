"""Report of the benchmark: tables, crossover lengths and pictures."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from experiments.benchmark.contenders import MATMUL
from experiments.engine import pictures
from experiments.engine.results import Rows
from experiments.engine.table import format_table

Field = Literal["seconds", "peak_bytes", "temp_bytes", "compile_seconds", "share_of_peak"]
Mode = Literal["forward", "backward", "causal_forward", "causal_backward"]

MODES: dict[Mode, tuple[bool, bool]] = {  # (causal, backward)
    "forward": (False, False),
    "backward": (False, True),
    "causal_forward": (True, False),
    "causal_backward": (True, True),
}
BASELINES = ("exact", "jax_sdpa", "torch_sdpa")
ROW_FIELDS = ("attention", "length", "causal", "backward")


def is_of(row: dict[str, Any], mode: Mode) -> bool:
    """Returns whether a row was measured in a mode."""
    return (row["causal"], row["backward"]) == MODES[mode]


def crossover(rows: Sequence[dict[str, Any]], name: str, other: str) -> int | None:
    """Returns the length from which on `name` is faster than `other` in the rows of one mode, None if it never is."""
    seconds = {(row["attention"], row["length"]): row["seconds"] for row in rows if "seconds" in row}
    shared = sorted(length for found, length in seconds if found == name and (other, length) in seconds)
    first = None
    for length in reversed(shared):
        if seconds[name, length] >= seconds[other, length]:
            break
        first = length
    return first


def format_report(rows: Rows, modes: Sequence[Mode]) -> str:
    """Returns the tables of each mode, and the lengths from which on elsaa is faster than exact attention."""
    parts = []
    for mode in modes:
        of_mode = [row for row in rows if is_of(row, mode)]
        names = [name for name in dict.fromkeys(row["attention"] for row in of_mode) if name != MATMUL]
        cells = {(row["attention"], row["length"]): row for row in of_mode}
        lengths = sorted({row["length"] for row in of_mode})
        for title, cell in CELLS.items():
            table = {name: [cell(cells.get((name, n), {})) for n in lengths] for name in names}
            table = {name: column for name, column in table.items() if set(column) != {NOTHING}}
            if table:
                columns = [f"{n:,}" for n in lengths], *table.values()
                parts.append(f"{mode}, {title}\n\n{format_table(['tokens', *table], list(zip(*columns, strict=True)))}")
        skipped = {row["attention"]: row["skipped"] for row in reversed(of_mode) if "skipped" in row}
        parts += [f"{name}: longer inputs were skipped ({reason})" for name, reason in skipped.items()]
        for other in BASELINES:
            length = crossover(of_mode, "elsaa", other)
            if other in names and "elsaa" in names:
                since = "at no length that was run" if length is None else f"from {length:,} tokens on"
                parts.append(f"elsaa is faster than {other} {since}")
    return "\n\n".join(parts)


def _time_cell(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.3g} ({row['low']:.3g} to {row['high']:.3g})" if "seconds" in row else NOTHING


def _cell(field: Field, form: Callable[[float], str]) -> Callable[[dict[str, Any]], str]:
    return lambda row: NOTHING if row.get(field) is None else form(row[field])


NOTHING = "-"  # a cell without a value
CELLS = {
    "seconds, median (quartiles)": _time_cell,
    "peak memory, MiB": _cell("peak_bytes", lambda x: f"{x / 2**20:,.0f}"),
    "temporary memory, MiB": _cell("temp_bytes", lambda x: f"{x / 2**20:,.0f}"),
    "compilation, seconds": _cell("compile_seconds", lambda x: f"{x:.1f}"),
    "share of the matmul peak": _cell("share_of_peak", lambda x: f"{x:.2f}"),
}


def write_pictures(workdir: pathlib.Path, rows: Rows, modes: Sequence[Mode]) -> list[pathlib.Path]:
    """Draws time, memory and share of the peak over length, a panel for each mode; returns the pictures' paths."""
    drawn = []
    fields: dict[Field, tuple[str, str]] = {  # file name, and label of the axis
        "seconds": ("time.png", "seconds"),
        "peak_bytes": ("memory.png", "bytes at the peak"),
        "share_of_peak": ("peak.png", "share of the matmul peak"),
    }
    for field, (name, label) in fields.items():
        parts = [_panel(mode, [row for row in rows if is_of(row, mode)], field, label) for mode in modes]
        parts = [part for part in parts if part.curves]
        if parts and pictures.panels(workdir / name, parts, columns=2):
            drawn.append(workdir / name)
    return drawn


def _panel(mode: Mode, rows: Rows, field: Field, label: str) -> pictures.Panel:
    curves: dict[str, list[pictures.Point]] = {}
    for row in rows:
        if row.get(field) and row["attention"] != MATMUL:
            ends = (row["low"], row["high"]) if field == "seconds" else (row[field], row[field])
            curves.setdefault(row["attention"], []).append((row["length"], row[field], *ends))
    crossed = [length for other in BASELINES if (length := crossover(rows, "elsaa", other))]
    mark = max(crossed) if crossed and field == "seconds" else None
    return pictures.Panel(mode, "tokens", label, curves, lengths=True, log_y=True, mark=mark)
