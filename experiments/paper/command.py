"""The paper's tables beside ours, with a verdict on each of its claims.

Claim: every row of the paper is one command here, under one budget for all methods.

Command: python -m experiments.paper --run

`--run` trains what is missing, one seed of every method on every task and three of elsaa and exact on the short ones,
each in a process of its own, and goes on where it stopped; without it, what is there is collected. The tables of needle
in a haystack come from its own experiment. Writes docs/results/paper.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments import arxiv, imdb, retrieval, tiny_imagenet, vision
from experiments.engine import cli, pictures, suite
from experiments.engine.errors import EngineError, disk_errors
from experiments.engine.memory import with_malloc
from experiments.engine.progress import format_seconds
from experiments.engine.results import Rows
from experiments.engine.signals import StopSignals, stop_at_once
from experiments.engine.suite import COMPARED, Preset
from experiments.engine.table import format_table
from experiments.engine.workdir import RESULTS, first_difference, normal, read_json, versions, write_json, write_text
from experiments.paper.claims import Summary, judge, needle_rows, summarize
from experiments.paper.published import NIAH, NIAH_LENGTHS, TABLES


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The command of a task, and its presets by name."""

    command: tuple[str, ...]
    presets: Mapping[str, Preset]


TASKS: dict[str, Experiment] = {
    "fashion_mnist": Experiment(("experiments.vision", "--dataset", "fashion_mnist"), vision.PRESETS["fashion_mnist"]),
    "imdb": Experiment(("experiments.imdb",), imdb.PRESETS),
    **{
        name: Experiment(("experiments.vision", "--dataset", name), presets)
        for name, presets in vision.PRESETS.items()
        if name != "fashion_mnist"
    },
    **{
        arxiv.task_of(variant): Experiment(("experiments.arxiv", "--variant", variant), presets)
        for variant, presets in arxiv.VARIANTS.items()
    },
    "retrieval": Experiment(("experiments.retrieval",), retrieval.PRESETS),
    "tiny_imagenet": Experiment(("experiments.tiny_imagenet",), tiny_imagenet.PRESETS),
}
SEVERAL_SEEDS = ("fashion_mnist", "imdb")
NUM_SEEDS = 3
REPORT, ROWS = "paper.md", "paper.json"


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of an experiment."""

    task: str
    attention: str
    seed: int


def jobs(tasks: Sequence[str], attentions: Sequence[str], first: int = 0) -> Iterator[Job]:
    """All runs: the first seed of everything, then more seeds of elsaa and exact on the short tasks."""
    for task in tasks:
        for attention in attentions:
            yield Job(task, attention, first)
    for seed in range(first + 1, first + NUM_SEEDS):
        for task in tasks:
            for attention in attentions:
                if task in SEVERAL_SEEDS and attention in ("elsaa", "exact"):
                    yield Job(task, attention, seed)


def make_parser() -> cli.PlainParser:
    """The command line."""
    parser = cli.PlainParser("The paper's tables beside ours.")
    parser.set_defaults(workdir=pathlib.Path("runs/paper"))
    add = parser.add_argument
    add("--run", action="store_true", help="train what is missing")
    add("--attention", type=cli.names(COMPARED), default="all", help=f"all, or some of {','.join(COMPARED)}")
    add("--tasks", type=cli.names(tuple(TASKS)), default="all", help=f"all, or some of {','.join(TASKS)}")
    add("--preset", choices=("paper", "cpu"), default="cpu", help="of all experiments")
    add("--steps", type=cli.integer(1), help="of each run; default: the preset's")
    add("--batch-size", type=cli.integer(1), help="of each run; default: the preset's")
    add("--data-dir", type=pathlib.Path, help="of data sets")
    add("--niah", type=pathlib.Path, default=pathlib.Path("runs/niah"), help="work dir of needle in a haystack")
    add("--out", type=pathlib.Path, default=pathlib.Path("docs/results"), help=f"for {REPORT}, {ROWS} and pictures")
    return parser


def run(arguments: argparse.Namespace) -> Rows:
    """Runs what is missing, where asked to, and writes the report."""
    workdir = arguments.workdir
    wanted = list(jobs(arguments.tasks, arguments.attention, arguments.seed))
    failed = []
    for number, job in enumerate(wanted if arguments.run else (), 1):
        print(f"run {number} of {len(wanted)}: {job.task}, {job.attention}, seed {job.seed}", flush=True)
        if not is_done(job, workdir, arguments) and not _run(job, workdir, arguments):
            failed.append(job)
    rows = [row for task in TASKS for row in suite.collect(workdir / task) if row["preset"] == arguments.preset]
    niah = _read_niah(arguments.niah)
    if failed and not rows:
        raise _failure(failed)
    if not rows and not niah:
        raise EngineError(f"{workdir} has no results yet; give --run to train, or another --workdir")
    check_budgets(rows, workdir)
    files = write_report(rows, niah, workdir, arguments.out)
    print(format_tables(rows, niah))
    done = {(row["task"], row["attention"], row["seed"]) for row in rows} & set(map(dataclasses.astuple, wanted))
    print(f"\n{len(done)} of {len(wanted)} runs are done\n{', '.join(map(str, files))}")
    if failed:
        raise _failure(failed)
    return rows


def is_done(job: Job, workdir: pathlib.Path, arguments: argparse.Namespace) -> bool:
    """Whether a run has its results; where they are those of another config, the run itself refuses."""
    stored = read_json(suite.run_directory(workdir / job.task, job.attention, job.seed) / RESULTS)
    if not stored or not stored["rows"]:
        return False
    own = suite.make_parser("").parse(_flags(job, workdir, arguments))
    preset = TASKS[job.task].presets[arguments.preset]
    config = suite.run_config(job.task, arguments.preset, preset, job.attention, own)
    return first_difference(stored["config"], normal(config)) is None


def check_budgets(rows: Rows, workdir: pathlib.Path) -> None:
    """Raises EngineError where the runs of a task differ in anything but their attention and seed."""
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
    """What a run has in common with the others of its task."""
    directory = suite.run_directory(workdir / row["task"], row["attention"], row["seed"])
    config = read_json(directory / RESULTS)["config"]
    task = {name: value for name, value in config["task"].items() if name not in ("attention", "seed")}
    train = {name: value for name, value in config["train"].items() if name != "seed"}
    return {"n_test": row["n_test"], "task": task, "train": train}


def _failure(failed: Sequence[Job]) -> EngineError:
    names = ", ".join(f"{job.task} {job.attention} {job.seed}" for job in failed)
    return EngineError(f"{len(failed)} runs failed ({names}); mend what they say and run the same command again")


def _read_niah(workdir: pathlib.Path) -> Rows:
    rows = (read_json(workdir / RESULTS) or {"rows": []})["rows"]
    if any("train_length" not in row for row in rows):
        raise EngineError(f"{workdir} is not of needle in a haystack; give its work dir as --niah")
    return rows


def command(job: Job, workdir: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    """The command line of a run."""
    return [sys.executable, "-m", *TASKS[job.task].command, *_flags(job, workdir, arguments)]


def _flags(job: Job, workdir: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    """Those that all experiments have."""
    flags = ["--attention", job.attention, "--seed", str(job.seed), "--workdir", str(workdir / job.task)]
    flags += ["--preset", arguments.preset]
    for name in ("steps", "batch_size", "data_dir"):
        if getattr(arguments, name) is not None:
            flags += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return flags


def _run(job: Job, workdir: pathlib.Path, arguments: argparse.Namespace) -> bool:
    """Runs one experiment, and returns whether it was one; a signal ends it as well, once it has saved."""
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


def write_report(rows: Rows, niah: Rows, workdir: pathlib.Path, out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the tables, the rows and the pictures; returns their paths."""
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    written = [out / REPORT, out / ROWS]
    accuracy, branches = out / "paper_accuracy.png", out / "paper_branches.png"
    bars: dict[str, dict[str, tuple[float, float, float]]] = {}
    for (task, name), found in summarize(rows).items():
        bars.setdefault(task, {})[name] = (found.accuracy, *found.interval)
    sown = branch_means(rows, workdir)
    for path, groups, label in (
        (accuracy, bars, "test accuracy"),
        (branches, sown, "mean over the layer's outputs, last step"),
    ):
        if groups and pictures.bars(path, groups, label):
            written.append(path)
        elif groups:
            print(pictures.NOT_DRAWN)
    text = [HEAD, format_tables(rows, niah)]
    text += [f"![{path.stem}]({path.name})" for path in written if path.suffix == ".png"]
    write_text(out / REPORT, "\n\n".join(text) + "\n")
    write_json(out / ROWS, {"versions": versions(), "rows": rows, "niah": list(needle_rows(niah).values())})
    return written


def branch_means(rows: Rows, workdir: pathlib.Path) -> dict[str, dict[str, tuple[float, float, float]]]:
    """m and the gates of elsaa at the end of training, by task and layer, of the first seed."""
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for task in TASKS:
        seeds = [row["seed"] for row in rows if (row["task"], row["attention"]) == (task, "elsaa")]
        means = suite.diagnostics(workdir / task).get(f"elsaa-{seeds[0]}", {}) if seeds else {}
        for name in ("multiplier", "gate_sparse", "gate_low_rank"):
            for layer, value in enumerate(means.get(name, [])):
                found.setdefault(f"{task}, layer {layer}", {})[name] = (value, value, value)
    return found


HEAD = """# The paper's tables beside ours

```bash
python -m experiments.paper --run
```

The paper's numbers are those of its tables: one seed, on a GPU, at the lengths and epochs of its appendix. Ours are
from the preset named in each row, at its length and budget: one budget for all methods of a task, the last step, all
test examples. They stand side by side to compare the order of the methods, not the numbers. Sets, splits and readouts
are not always the paper's: [the differences](../paper.md).

The 95 % intervals are over test examples, taken as independent, and over seeds: the deviation between seeds, in units
of sqrt(p (1 - p)) for an accuracy p, is pooled over what has several of them, and stands for what has one as well. All
methods answer the same examples, which makes the intervals of differences too wide; pairs of the same papers
(retrieval) and windows of the same reviews (IMDB) are not independent, which makes them too narrow."""


def format_tables(rows: Rows, niah: Rows) -> str:
    """All tables, and the verdicts."""
    parts = []
    for title, tasks in TABLES.items():
        parts.append(f"## {title}\n\n{_classification_table(rows, tasks)}")
    more = "More methods, seeds and lengths: [niah.md](niah.md)."
    parts.insert(3, f"## Table 4: needle in a haystack\n\n{more}\n\n{_niah_table(niah)}")
    verdicts = [[verdict.claim, verdict.verdict, verdict.evidence] for verdict in judge(rows, niah)]
    if rows:
        parts.append(_waiting(rows))
    parts.append(f"## The paper's claims\n\n{format_table(('claim', 'at our lengths', 'evidence'), verdicts)}")
    return "\n\n".join(parts)


def _waiting(rows: Rows) -> str:
    """How much of the time was that of the input pipeline; and whether intervals know of seeds."""
    share, task, name = max((row["waited"] / row["training_seconds"], row["task"], row["attention"]) for row in rows)
    several = any(summary.seeds > 1 for summary in summarize(rows).values())
    return (
        "Time is that of training and evaluation, the mean over seeds. Steps waited for their data for at most "
        f"{100 * share:.1f} % of the time of training ({task}, {name})."
    ) + ("" if several else " Nothing has several seeds yet: the intervals are over test examples alone.")


def _classification_table(rows: Rows, tasks: dict[str, Any]) -> str:
    header = (
        *("task", "attention", "paper: train", "test", "ours: train", "test", "95 % interval", "n", "seeds"),
        *("preset", "tokens", "steps x batch", "time"),
    )
    lines, summaries = [], summarize(rows)
    for task, published in tasks.items():
        for name in COMPARED:
            paper = [_published(value) for value in published[name]] if name in published else ["-", "-"]
            own = [row for row in rows if (row["task"], row["attention"]) == (task, name)]
            lines.append([task, name, *paper, *(_own_cells(own, summaries[task, name]) if own else ["-"] * 9)])
    for name in COMPARED if len(tasks) > 1 else ():
        theirs = [published[name][1] for published in tasks.values() if name in published]
        ours = [summaries[task, name].accuracy for task in tasks if (task, name) in summaries]
        both = _average(theirs, len(tasks)), "-", _average([100 * value for value in ours], len(tasks))
        lines.append(["average", name, "-", *both, *["-"] * 7])
    return format_table(header, lines)


def _average(values: Sequence[Any], count: int) -> str:
    """Of all tasks of a table."""
    return f"{sum(values) / count:.2f}" if len(values) == count else "-"


def _published(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}"


def _own_cells(rows: Rows, found: Summary) -> list[str]:
    low, high = found.interval
    train = sum(row["train_accuracy"] for row in rows) / len(rows)
    return [
        f"{100 * train:.2f}",
        f"{100 * found.accuracy:.2f}",
        f"{100 * low:.1f} to {100 * high:.1f}",
        f"{found.n:,}",
        str(found.seeds),
        rows[0]["preset"],
        f"{rows[0]['length']:,}",
        f"{rows[0]['steps']:,} x {rows[0]['batch_size']}",
        format_seconds(sum(row["seconds"] for row in rows) / len(rows)),
    ]


def _niah_table(rows: Rows) -> str:
    lines = []
    found = needle_rows(rows)
    shown = {
        key: (
            f"{100 * row['accuracy']:.1f}",
            f"{100 * row['low']:.1f} to {100 * row['high']:.1f}",
            f"{row['n']:,}, {row['seed']}",
            f"{row['seconds_per_example']:.2g}",
        )
        for key, row in found.items()
    }
    for name, published in NIAH.items():
        lines.append([name, "paper", *("OOM" if value is None else f"{value:.1f}" for value in published)])
        for place, label in enumerate(("ours", "95 % interval, over examples", "n, seed", "seconds each")):
            cells = [shown[name, length][place] if (name, length) in shown else "-" for length in NIAH_LENGTHS]
            lines.append([name if place == 0 else "", label, *cells])
    return format_table(("attention", "", *(f"{length:,}" for length in NIAH_LENGTHS)), lines)
