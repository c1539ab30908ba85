"""Tables and pictures of `python -m experiments.rank`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from elsaa_jax import theory
from experiments.engine import pictures
from experiments.engine.results import Rows
from experiments.engine.table import format_table
from experiments.rank import spectra


def certificates(rows: Rows) -> str:
    """Formats the certificates: densities, thresholds, and the edges that they ask for."""
    header = (
        "n",
        "density",
        "Theta",
        "certified",
        "confidence",
        "edges/query",
        "n Theta",
        "log Delta",
        "p",
        "safety edges/query",
        "worst case L",
    )
    lines = [
        (
            f"{row['n']:,}",
            f"{row['density']:.4g}",
            f"{row['threshold']:.4g}",
            "yes" if row["certified"] else "no",
            f"{row['confidence']:.4f}",
            f"{row['edges_per_query']:,.0f}",
            f"{row['threshold'] * row['n']:,.0f}",
            "-" if row["log_delta"] is None else f"{row['log_delta']:,.0f}",
            f"{row['uniform_threshold']:.4g}",
            f"{row['safety_edges'] / row['n']:,.0f}",
            f"{row['tables_needed']:,.0f}" if row.get("tables_needed") else "-",
        )
        for row in rows
    ]
    return format_table(header, lines)


def proposition(rows: Rows) -> str:
    """Formats how many random supports satisfy the lemmas and the proposition."""
    return format_table(list(rows[0]), [list(row.values()) for row in rows])


def operators(rows: Rows) -> str:
    """Formats the largest differences between the library's and the theory's matrices."""
    names = list(rows[0]["differences"])
    lines = [
        [_form_of(row), f"{row['n']:,}", "yes" if row["same_support"] else "NO"]
        + [f"{row['differences'][name]:.1e}" for name in names]
        for row in rows
    ]
    return format_table(["form", "n", "same support", *names], lines)


def ranks(rows: Rows) -> str:
    """Formats the smallest and the largest rank over the seeds."""
    low_rank = theory.race_rank(spectra.RACE.num_tables, spectra.RACE.num_bits)
    names = ("matching", "exact", "low_rank", "sparse", "both")
    lines = []
    for (vocabulary, n, form), group in _grouped(rows, lambda row: (row["vocabulary"] or 0, row["n"], _form_of(row))):
        ranges = [_range([row[name] for row in group]) for name in names]
        predicted = _range([min(n, row["matching"] + low_rank) for row in group])
        lines.append([vocabulary or "all differ", n, form, *ranges, predicted])
    return format_table(["tokens", "n", "form", "nu", *names[1:], "min(n, nu + r)"], lines)


def success(rows: Rows) -> str:
    """Formats frequencies of success, their intervals and the bounds."""
    lines = []
    for row in rows:
        edges = f"p = {row['density']:.3f}" if "density" in row else f"{row['num_tables']} x {row['num_bits']} bits"
        interval = f"{row['low']:.4f} to {row['high']:.4f}"
        verdict = "VIOLATED" if row["violated"] else "holds"
        lines.append(
            [row["model"], row["n"], row["r"], edges, f"{row['success']:.4f}", interval, f"{row['bound']:.4f}", verdict]
        )
    return format_table(["edges", "n", "r", "probability", "success", "95 % interval", "bound", ""], lines)


def complexity(rows: Rows) -> str:
    """Formats interactions and their share of exact attention, which is causal for causal methods."""
    lines = []
    for row in rows:
        found = row["counted"] if row["traced"] is None else row["traced"]
        counts = [f"{row[name]:,.0f}" if row[name] else "-" for name in ("paper", "counted", "traced")]
        tiles = f"{row['in_tiles']:,}" if "in_tiles" in row else "-"
        lines.append([row["method"], *counts, tiles, f"{found / row['of']:.2%}"])
    header = ["method", "paper", "pairs attended", "multiply-adds / 2H", "scores in tiles", "share of exact"]
    return format_table(header, lines)


def costs(rows: Rows) -> str:
    """Formats each cost with its formula evaluated and its count from the library."""
    lines = []
    for row in rows:
        formula = "-" if row["formula"] is None else f"{row['formula']:,}"
        lines.append([row["cost"], formula, f"{row['counted']:,}", row["note"] or "-"])
    return format_table(["cost", "formula", "counted", "note"], lines)


def entropy(rows: Rows) -> str:
    """Formats two tables for each similarity: errors with half their intervals, and bias + variance."""
    parts = []
    for similarity, group in _grouped(rows, lambda row: row["similarity"]):
        by_method = _grouped(group, lambda row: row["method"])
        cells = by_method[0][1]
        header = ["temperature", *(row["temperature"] for row in cells)]
        lines = [[name, *(f"{row[name]:,.2f}" for row in cells)] for name in ("entropy", "coverage", "multiplier")]
        lines.append(["best_lambda", *(f"{row['best_lambda']:,.4g}" for row in cells)])
        for method, cells in by_method:
            lines.append([method, *(f"{row['error']:.2f} ± {row['high'] - row['error']:.2f}" for row in cells)])
        parts.append(f"similarity {similarity}: error\n\n{format_table(header, lines)}")
        lines = [[m, *(f"{row['bias']:.2f} + {row['variance']:.2f}" for row in cells)] for m, cells in by_method]
        parts.append(f"similarity {similarity}: bias + variance\n\n{format_table(header, lines)}")
    return "\n\n".join(parts)


def draw_ranks(path: pathlib.Path, rows: Rows) -> bool:
    """Draws rank over length for RACE alone, the sparse branch alone, and both."""
    parts = []
    for form in (spectra.Form("rank", 0, False), spectra.Form("bucket", 0, False), spectra.Form("bucket", 0, True)):
        chosen = [row for row in rows if row["vocabulary"] is None and _form_of(row) == str(form)]
        curves = {}
        for label, name in (("both", "both"), ("sparse alone", "sparse"), ("RACE alone", "low_rank")):
            groups = _grouped(chosen, lambda row: row["n"])
            curves[label] = [_point(n, [row[name] for row in group]) for n, group in groups]
        parts.append(pictures.Panel(str(form), "n", "numerical rank", curves, lengths=True))
    return pictures.panels(path, parts)


def draw_success(path: pathlib.Path, rows: Rows) -> bool:
    """Draws success over density and over the number of tables, with bounds as dashed lines."""
    parts = []
    for r_is_zero in (True, False):
        curves: dict[str, list[pictures.Point]] = {}
        for row in rows:
            if row["model"] == "density" and (row["r"] == 0) == r_is_zero:
                name = f"n = {row['n']}, r = {row['r']}"
                curves.setdefault(name, []).append((row["density"], row["success"], row["low"], row["high"]))
                curves.setdefault(f"bound, {name}", []).append((row["density"], *[row["bound"]] * 3))
        title = "low rank 0" if r_is_zero else "low rank r"
        bounds = [name for name in curves if name.startswith("bound")]
        parts.append(pictures.Panel(title, "probability of an edge", "P[deficiency <= r]", curves, bounds))
    curves = {}
    for row in rows:
        if row["model"] != "density" and row["n"] > theory.MAX_ENUMERATED:
            name = f"{row['model']}, r = {row['r']}"
            curves.setdefault(name, []).append((row["num_tables"], row["success"], row["low"], row["high"]))
            curves.setdefault(f"bound, {name}", []).append((row["num_tables"], *[row["bound"]] * 3))
    bounds = [name for name in curves if name.startswith("bound")]
    parts.append(
        pictures.Panel("n = 64, 2 bits, real angles", "tables", "P[deficiency <= r]", curves, bounds, lengths=True)
    )
    return pictures.panels(path, parts)


def draw_entropy(path: pathlib.Path, rows: Rows) -> bool:
    """Draws the relative error over the entropy of the attention."""
    parts = []
    for similarity, group in _grouped(rows, lambda row: row["similarity"]):
        curves: dict[str, list[pictures.Point]] = {}
        # Variants follow the method that they vary. With gates 1, convex and lse differ by eps alone.
        for row in sorted(group, key=lambda row: row["method"]):
            if row["method"] != "convex":
                point = (row["entropy"], row["error"], max(row["low"], 1e-3), row["high"])
                curves.setdefault(row["method"], []).append(point)
        title = f"similarity of query and key {similarity}"
        dashed = [name for name in curves if name.split(",")[0] in curves and "," in name]
        labels = "entropy of exact attention (nats)", "relative squared error"
        parts.append(pictures.Panel(title, *labels, curves, dashed, log_y=True))
    return pictures.panels(path, parts)


def _form_of(row: dict[str, Any]) -> str:
    return str(spectra.Form(row["pairing"], row["num_neighbors"], row["is_causal"]))


def _grouped(rows: Rows, key: Callable[[dict[str, Any]], Any]) -> list[tuple[Any, Rows]]:
    """Groups rows by a key, in the order of its first appearance."""
    groups: dict[Any, Rows] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def _point(x: float, values: Sequence[float]) -> pictures.Point:
    return x, float(np.mean(values)), min(values), max(values)
