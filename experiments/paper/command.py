"""The command line of the paper's tables: runs what is missing and writes the report."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, get_args

from experiments.engine import cli, report, suite
from experiments.engine.errors import EngineError
from experiments.engine.memory import with_malloc
from experiments.engine.presets import COMPARED, PresetName
from experiments.engine.results import EVALUATE_AGAIN, Rows, check_fields, read_results
from experiments.engine.signals import StopSignals, stop_at_once
from experiments.engine.workdir import RESULTS, damaged, first_difference, normal, read_checked
from experiments.niah.task import ROW_FIELDS as NIAH_FIELDS
from experiments.paper.report import REPORT, ROWS, format_tables, write_report
from experiments.paper.tasks import TASKS, Job, jobs


def make_parser() -> cli.PlainParser:
    """Returns the parser of the command line."""
    parser = cli.PlainParser("The paper's tables beside ours, with a verdict on each of its claims.")
    parser.set_defaults(workdir=pathlib.Path("runs/paper"))
    add = parser.add_argument
    add("--run", action="store_true", help="Train the missing runs. Without it, only the report is written.")
    attentions, tasks = cli.one_or_more(COMPARED), cli.one_or_more(tuple(TASKS))
    add("--attention", type=cli.names(COMPARED), default="all", help=f"Attentions to run: {attentions}.")
    add("--tasks", type=cli.names(tuple(TASKS)), default="all", help=f"Tasks to run: {tasks}.")
    add(
        "--preset",
        choices=get_args(PresetName),
        default="cpu",
        help="Preset of all runs: model, data and training budget.",
    )
    add("--steps", type=cli.integer(1), help="Number of training steps of each run. Default: as in the preset.")
    add("--batch-size", type=cli.integer(1), help="Number of examples per step. Default: as in the preset.")
    add(
        "--data-dir",
        type=pathlib.Path,
        help="Directory that holds the data sets. Default: the environment variable ELSAA_DATA_DIR, or data.",
    )
    add(
        "--niah",
        type=pathlib.Path,
        default=pathlib.Path("runs/niah"),
        help="Work directory of experiments.niah, whose results fill table 4.",
    )
    add(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("docs/results"),
        help=f"Directory for {REPORT}, {ROWS} and pictures.",
    )
    return parser


def run(arguments: argparse.Namespace) -> Rows:
    """Trains the missing runs if --run is given, writes the report and returns the rows of all runs."""
    workdir = arguments.workdir
    wanted = list(jobs(arguments.tasks, arguments.attention, arguments.seed))
    failed = []
    for number, job in enumerate(wanted if arguments.run else (), 1):
        print(f"Run {number} of {len(wanted)}: {job.task}, {job.attention}, seed {job.seed}", flush=True)
        if not is_done(job, workdir, arguments) and not _run(job, workdir, arguments):
            failed.append(job)
    rows = [row for task in TASKS for row in report.collect(workdir / task) if row["preset"] == arguments.preset]
    niah = _read_niah(arguments.niah)
    if failed and not rows:
        raise _failure(failed)
    if not rows and not niah:
        raise EngineError(f"{workdir} has no results yet; give --run to train, or another --workdir")
    check_budgets(rows, workdir)
    files = write_report(rows, niah, workdir, arguments.out)
    print(format_tables(rows, niah))
    done = {(row["task"], row["attention"], row["seed"]) for row in rows} & set(map(dataclasses.astuple, wanted))
    print(f"\n{len(done)} of {len(wanted)} runs are done")
    cli.print_files(files)
    if failed:
        raise _failure(failed)
    return rows


def is_done(job: Job, workdir: pathlib.Path, arguments: argparse.Namespace) -> bool:
    """Returns whether a run has results of the wanted config. If they are of another config, the run itself refuses."""
    directory = report.run_directory(workdir / job.task, job.attention, job.seed)
    stored = read_results(directory / RESULTS, EVALUATE_AGAIN)
    if not stored or not stored["rows"]:
        return False
    own = suite.make_parser("").parse(_flags(job, workdir, arguments))
    preset = TASKS[job.task].presets[arguments.preset]
    config = suite.run_config(job.task, arguments.preset, preset, job.attention, own)
    return first_difference(stored.get("config"), normal(config)) is None


def check_budgets(rows: Rows, workdir: pathlib.Path) -> None:
    """Raises EngineError if the runs of a task differ in anything but their attention and seed."""
    for task in TASKS:
        budgets = [_budget(row, workdir) for row in rows if row["task"] == task]
        for budget in budgets[1:]:
            if difference := first_difference(budgets[0], budget):
                name, one, other = difference
                raise EngineError(
                    f"the runs of {task} in {workdir} have {name} = {one} and {other}, and only those of one budget "
                    "can be compared; move the others away, or give another --workdir"
                )


def _budget(row: dict[str, Any], workdir: pathlib.Path) -> dict[str, Any]:
    """Returns the settings that a run must share with the other runs of its task."""
    path = report.run_directory(workdir / row["task"], row["attention"], row["seed"]) / RESULTS
    stored = read_checked(path, EVALUATE_AGAIN) or {}
    try:
        config = stored["config"]
        task = {name: value for name, value in config["task"].items() if name not in ("attention", "seed")}
        train = {name: value for name, value in config["train"].items() if name != "seed"}
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(path, "it has no config of a run", EVALUATE_AGAIN) from error
    return {"n_test": row["n_test"], "task": task, "train": train}


def _failure(failed: Sequence[Job]) -> EngineError:
    names = ", ".join(f"{job.task} {job.attention} {job.seed}" for job in failed)
    return EngineError(f"{len(failed)} runs failed ({names}); correct what they report and run the same command again")


def _read_niah(workdir: pathlib.Path) -> Rows:
    """Returns the rows of needle in a haystack, none if it was not run."""
    path, remedy = workdir / RESULTS, "run python -m experiments.niah again to write it"
    rows: Rows = (read_results(path, remedy) or {"rows": []})["rows"]
    if any("train_length" not in row for row in rows):
        raise EngineError(f"{workdir} is not of needle in a haystack; give its work dir as --niah")
    check_fields(path, rows, NIAH_FIELDS, remedy)
    return rows


def command(job: Job, workdir: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    """Returns the command line of a run."""
    return [sys.executable, "-m", *TASKS[job.task].command, *_flags(job, workdir, arguments)]


def _flags(job: Job, workdir: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    """Returns the flags of a run that all experiments have."""
    flags = ["--attention", job.attention, "--seed", str(job.seed), "--workdir", str(workdir / job.task)]
    flags += ["--preset", arguments.preset]
    for name in ("steps", "batch_size", "data_dir"):
        if getattr(arguments, name) is not None:
            flags += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return flags


def _run(job: Job, workdir: pathlib.Path, arguments: argparse.Namespace) -> bool:
    """Runs one experiment in a process of its own, and returns whether it succeeded.

    A signal to this process also ends the other one, after it has saved.
    """
    words = command(job, workdir, arguments)
    with StopSignals(stop_at_once):
        process = subprocess.Popen(words, env=with_malloc())
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        print(f"{' '.join(words[1:])} ended with code {code}", flush=True)
    return not code
