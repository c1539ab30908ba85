"""The command line of the benchmark: measures all modes and lengths, and writes the report."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.resources
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax

from elsaa_jax.dispatch import IMPLEMENTATIONS
from elsaa_jax.sparse.crossover import TABLE
from elsaa_jax.types import Implementation
from experiments.benchmark.contenders import MATMUL, Case, contenders, of_implementation
from experiments.benchmark.report import BASELINES, MODES, ROW_FIELDS, Mode, format_report, is_of, write_pictures
from experiments.benchmark.turns import Limits, measure
from experiments.engine import cli
from experiments.engine.bar import Bar
from experiments.engine.errors import EngineError, disk_errors
from experiments.engine.progress import format_seconds
from experiments.engine.results import Rows, check_fields, read_results
from experiments.engine.workdir import RESULTS, read_json, versions, write_checked, write_json

SHORTEST, LONGEST, QUICK_LONGEST = 512, 262_144, 4096
TURNS = 5
MEASURE_AGAIN = "move it away to measure again"
# Flags of training, which every experiment accepts.
UNUSED = ("eval_only", "data_dir", "parallel", "accumulate", "coordinator", "num_processes", "process_id")


def measured_crossover(rows: Rows) -> dict[str, int]:
    """Returns the longest length at which exact is faster than elsaa, both with and without the backward pass.

    The keys are "full" and "causal"; attentions that were not measured in all four cases are left out.
    """
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
    """Returns the parser of the command line."""
    plain = [name for name, contender in contenders().items() if contender.implementation == "xla"]
    parser = cli.Parser("Speed and memory over length.", plain)
    parser.set_defaults(workdir=pathlib.Path("runs/benchmark"))
    parser.set_help(
        attention=f"Contenders to measure: {cli.one_or_more(plain)}.",
        seed="Random seed of the inputs.",
        steps=f"Number of turns of each contender. Default: {TURNS}, or 1 with --quick.",
        batch_size="Number of sequences per input. Default: 1.",
        resume="Continue an interrupted benchmark; fail if there is none.",
        **dict.fromkeys(UNUSED, "Not used by the benchmark."),
    )
    add = parser.add_argument
    add(
        "--implementation",
        type=cli.names(IMPLEMENTATIONS),
        help=f"Implementations of our attentions: {cli.one_or_more(IMPLEMENTATIONS)}. "
        "Default: xla, and pallas if there is a GPU.",
    )
    add(
        "--length",
        type=cli.integer(SHORTEST),
        default=LONGEST,
        help=f"Longest input in tokens. Each length is twice the one before it, from {SHORTEST} on.",
    )
    modes = tuple(MODES)
    add(
        "--modes",
        type=cli.names(modes),
        default="all",
        help=f"Modes to measure: {cli.one_or_more(modes)}. A backward mode includes the forward pass.",
    )
    add("--seconds", type=cli.integer(1), default=60, help="Time limit of one run. Longer inputs are skipped.")
    add(
        "--write-crossover",
        action="store_true",
        help='Save the measured crossover length, which min_length="auto" then uses on this platform.',
    )
    add(
        "--quick",
        action="store_true",
        help=f"Measure only forward passes of elsaa and exact attention, up to {QUICK_LONGEST:,} tokens and with one "
        "turn, in about a minute.",
    )
    return parser


def run(arguments: argparse.Namespace) -> Rows:
    """Measures all modes and lengths, writes the report and returns the rows. Stored rows are not measured again."""
    workdir = arguments.workdir
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
        f"Benchmark of {', '.join(names)}; modes {', '.join(modes)}; {lengths[0]:,} to {lengths[-1]:,} tokens. Results "
        f"go to {workdir}."
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

    def tell(mode: Mode, text: str) -> None:
        if bar.is_terminal:
            bar.show(finished, f"{format_seconds(time.monotonic() - start)}, {mode}, {text}")

    for mode in modes:
        causal, backward = MODES[mode]
        done = [row for row in rows if is_of(row, mode)]
        left = [length for length in lengths if length not in {row["length"] for row in done}]
        finished += len(lengths) - len(left)
        cases = [Case(length, causal, backward, settings["batch"], arguments.seed) for length in left]
        those = [name for name in names if known[name].has_backward or not backward]
        for measured in measure(those, cases, limits, done, functools.partial(tell, mode)):
            rows += measured
            finished += 1
            write_checked(workdir / RESULTS, {"config": settings, "versions": versions(), "rows": rows})
            bar.note(f"{mode}, {_progress(measured)}")
    rows = [row for row in rows if row["length"] in lengths and any(is_of(row, mode) for mode in modes)]
    print(format_report(rows, modes))
    found = measured_crossover(rows)
    for name, length in found.items():
        print(f"\n{name}: exact is faster than elsaa up to {length:,} tokens, with and without the backward pass")
    if arguments.write_crossover:
        write_crossover(found)
    cli.print_files([workdir / RESULTS, *write_pictures(workdir, rows, modes)])
    return rows


def _wanted(arguments: argparse.Namespace) -> set[str]:
    """Returns the names of the wanted contenders: ours in each implementation they have, others, and the peak."""
    usual: tuple[Implementation, ...] = ("xla", "pallas") if jax.default_backend() == "gpu" else ("xla",)
    implementations: tuple[Implementation, ...] = arguments.implementation or usual
    attentions = [name for name in arguments.attention if not arguments.quick or name in ("elsaa", *BASELINES)]
    named = {of_implementation(name, i) for name in attentions for i in implementations}
    others = {name for name in attentions if of_implementation(name, "pallas") not in contenders()}
    return named & contenders().keys() | others | {MATMUL}


def _check_crossover(names: Sequence[str], modes: Sequence[Mode]) -> None:
    """Raises EngineError if these measurements cannot give a crossover length."""
    pairs = {"forward", "backward"}, {"causal_forward", "causal_backward"}
    if not ({"exact", "elsaa"} <= set(names) and any(pair <= set(modes) for pair in pairs)):
        raise EngineError(
            f"--write-crossover needs exact and elsaa, forward and backward, not {', '.join(names)} in "
            f"{', '.join(modes)}; see --attention and --modes"
        )


def write_crossover(found: dict[str, int]) -> None:
    """Writes crossover lengths into the table of the library, for this platform."""
    path, platform = pathlib.Path(str(importlib.resources.files("elsaa_jax.sparse"))) / TABLE, jax.default_backend()
    stored = read_json(path) or {}
    write_json(path, stored | {platform: stored.get(platform, {}) | found})


def _stored(workdir: pathlib.Path, settings: dict[str, Any], resume: bool) -> Rows:
    """Returns the rows of an interrupted run with the same settings."""
    stored = read_results(workdir / RESULTS, MEASURE_AGAIN)
    if stored is None:
        if resume:
            raise EngineError(f"--resume was given, but {workdir} has no {RESULTS}; leave it out to start")
        with disk_errors(workdir):
            workdir.mkdir(parents=True, exist_ok=True)
        return []
    if stored.get("config") != settings:
        raise EngineError(
            f"{workdir / RESULTS} has other settings, {stored.get('config')}, than these, {settings}; take another "
            "--workdir"
        )
    check_fields(workdir / RESULTS, stored["rows"], ROW_FIELDS, MEASURE_AGAIN)
    return stored["rows"]


def _progress(rows: Rows) -> str:
    """Returns one line with the times of a case."""
    timed = [row for row in rows if "seconds" in row and row["attention"] != MATMUL]
    times = [f"{row['attention']} {row['seconds']:.3g} s" for row in timed]
    return f"{rows[0]['length']:,} tokens: {', '.join(times)}"
