"""Speed and memory over length, against what a user would pick instead, in one run.

Command: python -m experiments.benchmark

Every contender has a process of its own, and they take turns, so that all see the same noise of the machine; a time is
the median of its runs, with the quartiles. The peak of the machine is one large product of matrices, which takes turns
like the others. Lengths that would take too much time or memory, by the growth so far, are not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.resources
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from elsaa_jax.dispatch import IMPLEMENTATIONS
from elsaa_jax.sparse.crossover import TABLE
from elsaa_jax.types import Implementation
from experiments.benchmark.contenders import MATMUL, Case, contenders, of_implementation
from experiments.benchmark.turns import Limits, measure
from experiments.engine import cli, pictures
from experiments.engine.bar import Bar
from experiments.engine.errors import EngineError
from experiments.engine.progress import format_seconds
from experiments.engine.results import Rows
from experiments.engine.table import format_table
from experiments.engine.workdir import RESULTS, read_json, versions, write_json

SHORTEST, LONGEST, QUICK_LONGEST = 512, 262_144, 4096
TURNS = 5
MODES = {  # name: (causal, backward)
    "forward": (False, False),
    "backward": (False, True),
    "causal_forward": (True, False),
    "causal_backward": (True, True),
}
BASELINES = ("exact", "jax_sdpa", "torch_sdpa")


def crossover(rows: Sequence[dict[str, Any]], name: str, other: str) -> int | None:
    """The length from which on `name` is faster than `other`, of the rows of one mode; None where it never is."""
    seconds = {(row["attention"], row["length"]): row["seconds"] for row in rows if "seconds" in row}
    shared = sorted(length for found, length in seconds if found == name and (other, length) in seconds)
    first = None
    for length in reversed(shared):
        if seconds[name, length] >= seconds[other, length]:
            break
        first = length
    return first


def measured_crossover(rows: Rows) -> dict[str, int]:
    """Up to which length `exact` is faster than `elsaa`, with its backward and without, of the modes that have both."""
    table = {}
    for name, causal in (("full", False), ("causal", True)):
        seconds: dict[int, dict[tuple[str, bool], float]] = {}
        for row in rows:
            if row["causal"] == causal and "seconds" in row and row["attention"] in ("elsaa", "exact"):
                seconds.setdefault(row["length"], {})[row["attention"], row["backward"]] = row["seconds"]
        complete = {n: times for n, times in sorted(seconds.items()) if len(times) == 4}
        faster = [n for n, t in complete.items() if all(t["exact", back] < t["elsaa", back] for back in (False, True))]
        if complete:
            table[name] = max(faster, default=0)
    return table


def make_parser() -> cli.Parser:
    """The command line."""
    plain = [name for name, contender in contenders().items() if contender.implementation == "xla"]
    parser = cli.Parser("Speed and memory over length.", plain)
    add = parser.add_argument
    add(
        "--implementation",
        type=cli.names(IMPLEMENTATIONS),
        help=f"of ours, some of {','.join(IMPLEMENTATIONS)}; by default xla, and pallas where there is a GPU",
    )
    add("--length", type=cli.integer(SHORTEST), default=LONGEST, help="longest; from 512 on each is twice the last")
    modes = tuple(MODES)
    add(
        "--modes", type=cli.names(modes), default=modes, help=f"some of {','.join(modes)}; backward has the forward too"
    )
    add("--seconds", type=cli.integer(1), default=60, help="of one run; what would take longer is not run")
    add("--write-crossover", action="store_true", help="into the library, for min_length='auto' on this platform")
    add(
        "--quick",
        action="store_true",
        help=f"forward passes of elsaa and exact attention up to {QUICK_LONGEST:,} tokens, one turn, in a minute",
    )
    return parser


def run(arguments: argparse.Namespace) -> Rows:
    """Measures all modes and lengths, and reports; what the work dir has is not measured again."""
    workdir = arguments.workdir or pathlib.Path("runs/benchmark")
    known, wanted = contenders(), _wanted(arguments)
    missing = {name: reason for name in wanted if (reason := known[name].missing)}
    names = [name for name in known if name in wanted and name not in missing]
    longest, modes = arguments.length, arguments.modes
    if arguments.quick:
        longest, modes = min(longest, QUICK_LONGEST), [name for name in modes if not MODES[name][1]]
    lengths = [SHORTEST << i for i in range((longest // SHORTEST).bit_length())]
    if arguments.write_crossover:
        _check_crossover(names, modes)
    limits = Limits(arguments.seconds, arguments.steps or (1 if arguments.quick else TURNS))
    print(
        f"benchmark of {', '.join(names)}; {', '.join(modes)}; {lengths[0]:,} to {lengths[-1]:,} tokens; all goes to "
        f"{workdir}"
    )
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}")
    settings = {
        "batch": arguments.batch_size or 1,
        "seed": arguments.seed,
        "names": names,
        **dataclasses.asdict(limits),
    }
    rows = _stored(workdir, settings, arguments.resume)
    bar, start, finished = Bar(len(modes) * len(lengths)), time.monotonic(), 0

    def tell(mode: str, text: str) -> None:
        if bar.is_terminal:
            bar.show(finished, f"{format_seconds(time.monotonic() - start)}, {mode}, {text}")

    for mode in modes:
        causal, backward = MODES[mode]
        done = [row for row in rows if _is_of(row, mode)]
        left = [length for length in lengths if length not in {row["length"] for row in done}]
        finished += len(lengths) - len(left)
        cases = [Case(length, causal, backward, settings["batch"], arguments.seed) for length in left]
        those = [name for name in names if known[name].has_backward or not backward]
        for measured in measure(those, cases, limits, done, functools.partial(tell, mode)):
            rows += measured
            finished += 1
            write_json(workdir / RESULTS, {"config": settings, "versions": versions(), "rows": rows})
            bar.note(f"{mode}, {_progress(measured)}")
    rows = [row for row in rows if row["length"] in lengths and any(_is_of(row, mode) for mode in modes)]
    print(format_report(rows, modes))
    found = measured_crossover(rows)
    for name, length in found.items():
        print(f"\n{name}: exact is faster than elsaa, with its backward and without, up to {length:,} tokens")
    if arguments.write_crossover:
        write_crossover(found)
    files = [workdir / RESULTS, *write_pictures(workdir, rows, modes)]
    print(f"\n{', '.join(map(str, files))}")
    if len(files) == 1:
        print(pictures.NOT_DRAWN)
    return rows


def _wanted(arguments: argparse.Namespace) -> set[str]:
    """Names of contenders: each of ours in each implementation that it has, and the peak."""
    usual: tuple[Implementation, ...] = ("xla", "pallas") if jax.default_backend() == "gpu" else ("xla",)
    implementations: tuple[Implementation, ...] = arguments.implementation or usual
    attentions = [name for name in arguments.attention if not arguments.quick or name in ("elsaa", *BASELINES)]
    named = {of_implementation(name, i) for name in attentions for i in implementations}
    others = {name for name in attentions if of_implementation(name, "pallas") not in contenders()}
    return named & contenders().keys() | others | {MATMUL}


def _check_crossover(names: Sequence[str], modes: Sequence[str]) -> None:
    """Before anything is measured: whether a crossover could be known after it."""
    pairs = {"forward", "backward"}, {"causal_forward", "causal_backward"}
    if not ({"exact", "elsaa"} <= set(names) and any(pair <= set(modes) for pair in pairs)):
        raise EngineError(
            f"--write-crossover needs exact and elsaa, forward and backward, not {', '.join(names)} in "
            f"{', '.join(modes)}; see --attention and --modes"
        )


def write_crossover(found: dict[str, int]) -> None:
    """Into the table of the library, for this platform."""
    path, platform = pathlib.Path(str(importlib.resources.files("elsaa_jax.sparse"))) / TABLE, jax.default_backend()
    stored = read_json(path) or {}
    write_json(path, stored | {platform: stored.get(platform, {}) | found})


def _stored(workdir: pathlib.Path, settings: dict[str, Any], resume: bool) -> Rows:
    """The rows of an interrupted run with the same settings."""
    stored = read_json(workdir / RESULTS)
    if stored is None:
        if resume:
            raise EngineError(f"--resume was given, but {workdir} has no {RESULTS}; leave it out to start")
        workdir.mkdir(parents=True, exist_ok=True)
        return []
    if stored.get("config") != settings:
        raise EngineError(
            f"{workdir / RESULTS} has other settings, {stored.get('config')}, than these, {settings}; take another "
            "--workdir"
        )
    return stored["rows"]


def _is_of(row: dict[str, Any], mode: str) -> bool:
    return (row["causal"], row["backward"]) == MODES[mode]


def _progress(rows: Rows) -> str:
    """One line on a case."""
    timed = [row for row in rows if "seconds" in row and row["attention"] != MATMUL]
    times = [f"{row['attention']} {row['seconds']:.3g} s" for row in timed]
    return f"{rows[0]['length']:,} tokens: {', '.join(times)}"


def format_report(rows: Rows, modes: Sequence[str]) -> str:
    """Tables of each mode, and the crossovers with exact attention."""
    parts = []
    for mode in modes:
        of_mode = [row for row in rows if _is_of(row, mode)]
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
        parts += [f"{name}: not run beyond, {reason}" for name, reason in skipped.items()]
        for other in BASELINES:
            length = crossover(of_mode, "elsaa", other)
            if other in names and "elsaa" in names:
                since = "at no length that was run" if length is None else f"from {length:,} tokens on"
                parts.append(f"elsaa is faster than {other} {since}")
    return "\n\n".join(parts)


def _time_cell(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.3g} ({row['low']:.3g} to {row['high']:.3g})" if "seconds" in row else NOTHING


def _cell(field: str, form: Callable[[float], str]) -> Callable[[dict[str, Any]], str]:
    return lambda row: NOTHING if row.get(field) is None else form(row[field])


NOTHING = "-"
CELLS = {
    "seconds, median (quartiles)": _time_cell,
    "peak memory, MiB": _cell("peak_bytes", lambda x: f"{x / 2**20:,.0f}"),
    "temporary memory, MiB": _cell("temp_bytes", lambda x: f"{x / 2**20:,.0f}"),
    "compilation, seconds": _cell("compile_seconds", lambda x: f"{x:.1f}"),
    "share of the matmul peak": _cell("share_of_peak", lambda x: f"{x:.2f}"),
}


def write_pictures(workdir: pathlib.Path, rows: Rows, modes: Sequence[str]) -> list[pathlib.Path]:
    """Time, memory and the share of the peak over length, a panel for each mode; returns what was drawn."""
    drawn = []
    for name, field, label in (
        ("time.png", "seconds", "seconds"),
        ("memory.png", "peak_bytes", "bytes at the peak"),
        ("peak.png", "share_of_peak", "share of the matmul peak"),
    ):
        parts = [_panel(mode, [row for row in rows if _is_of(row, mode)], field, label) for mode in modes]
        parts = [part for part in parts if part.curves]
        if parts and pictures.panels(workdir / name, parts, columns=2):
            drawn.append(workdir / name)
    return drawn


def _panel(mode: str, rows: Rows, field: str, label: str) -> pictures.Panel:
    curves: dict[str, list[pictures.Point]] = {}
    for row in rows:
        if row.get(field) and row["attention"] != MATMUL:
            ends = (row["low"], row["high"]) if field == "seconds" else (row[field], row[field])
            curves.setdefault(row["attention"], []).append((row["length"], row[field], *ends))
    crossed = [length for other in BASELINES if (length := crossover(rows, "elsaa", other))]
    mark = max(crossed) if crossed and field == "seconds" else None
    return pictures.Panel(mode, "tokens", label, curves, lengths=True, log_y=True, mark=mark)
