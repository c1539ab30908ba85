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
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.arxiv import VARIANTS, task_of
from experiments.claims import judge, needle_rows, summarize
from experiments.engine import cli, pictures, suite
from experiments.engine.errors import EngineError, disk_errors
from experiments.engine.progress import format_seconds
from experiments.engine.results import Rows
from experiments.engine.signals import StopSignals, stop_at_once
from experiments.engine.suite import COMPARED
from experiments.engine.table import format_table
from experiments.engine.workdir import RESULTS, read_json, versions, write_json, write_text
from experiments.published import NIAH, NIAH_LENGTHS, TABLES
from experiments.vision import PRESETS as VISION_PRESETS

# The command of each task.
TASKS: dict[str, list[str]] = {
    "fashion_mnist": ["experiments.vision", "--dataset", "fashion_mnist"],
    "imdb": ["experiments.imdb"],
    **{name: ["experiments.vision", "--dataset", name] for name in VISION_PRESETS if name != "fashion_mnist"},
    **{task_of(variant): ["experiments.arxiv", "--variant", variant] for variant in VARIANTS},
    "retrieval": ["experiments.retrieval"],
    "tiny_imagenet": ["experiments.tiny_imagenet"],
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
    if arguments.run:
        for number, job in enumerate(wanted, 1):
            print(f"run {number} of {len(wanted)}: {job.task}, {job.attention}, seed {job.seed}", flush=True)
            if not is_done(job, workdir, arguments.preset):
                _run(job, workdir, arguments)
    rows = [row for task in TASKS for row in suite.collect(workdir / task)]
    niah = (read_json(arguments.niah / RESULTS) or {"rows": []})["rows"]
    if not rows and not niah:
        raise EngineError(f"{workdir} has no results yet; give --run to train, or another --workdir")
    files = write_report(rows, niah, workdir, arguments.out)
    missing = [job for job in wanted if not is_done(job, workdir, arguments.preset)]
    print(format_tables(rows, niah))
    print(f"\n{len(wanted) - len(missing)} of {len(wanted)} runs are done\n{', '.join(map(str, files))}")
    return rows


def is_done(job: Job, workdir: pathlib.Path, preset: str) -> bool:
    """Whether a run has its results; those of another preset are left to the run, which says whose they are."""
    stored = read_json(suite.run_directory(workdir / job.task, job.attention, job.seed) / RESULTS)
    return bool(stored and stored["rows"]) and all(row["preset"] == preset for row in stored["rows"])


def command(job: Job, workdir: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    """The command line of a run."""
    flags = ["--attention", job.attention, "--seed", str(job.seed), "--workdir", str(workdir / job.task)]
    flags += ["--preset", arguments.preset]
    for name in ("steps", "batch_size", "data_dir"):
        if getattr(arguments, name) is not None:
            flags += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    module, *own = TASKS[job.task]
    return [sys.executable, "-m", module, *own, *flags]


def _run(job: Job, workdir: pathlib.Path, arguments: argparse.Namespace) -> None:
    """Runs one experiment; a signal ends it as well, once it has saved."""
    words = command(job, workdir, arguments)
    with StopSignals(stop_at_once):
        process = subprocess.Popen(words)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        raise EngineError(f"{' '.join(words[1:])} ended with code {code}; mend it and run the same command again")


def write_report(rows: Rows, niah: Rows, workdir: pathlib.Path, out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the tables, the rows and the pictures; returns their paths."""
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    written = [out / REPORT, out / ROWS]
    accuracy, branches = out / "paper_accuracy.png", out / "paper_branches.png"
    bars: dict[str, dict[str, tuple[float, float, float]]] = {}
    for (task, name), found in summarize(rows).items():
        bars.setdefault(task, {})[name] = (found.accuracy, *found.interval)
    sown = branch_means(workdir)
    for path, groups, label in (
        (accuracy, bars, "test accuracy"),
        (branches, sown, "mean over tokens, last step"),
    ):
        if groups and pictures.bars(path, groups, label):
            written.append(path)
        elif groups:
            print(pictures.NOT_DRAWN)
    text = [HEAD, format_tables(rows, niah)]
    text += [f"![{path.stem}]({path.name})" for path in written if path.suffix == ".png"]
    write_text(out / REPORT, "\n\n".join(text) + "\n")
    write_json(out / ROWS, {"versions": versions(), "rows": rows})
    return written


def branch_means(workdir: pathlib.Path) -> dict[str, dict[str, tuple[float, float, float]]]:
    """m and the gates of elsaa at the end of training, by task and layer."""
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for task in TASKS:
        runs = suite.diagnostics(workdir / task)
        means = next((found for name, found in runs.items() if name.startswith("elsaa-")), {})
        for name in ("multiplier", "gate_sparse", "gate_low_rank"):
            for layer, value in enumerate(means.get(name, [])):
                found.setdefault(f"{task}, {layer}", {})[name] = (value, value, value)
    return found


HEAD = """# The paper's tables beside ours

```bash
python -m experiments.paper --run
```

The paper's numbers are those of its tables: one seed, on a GPU, at the lengths and epochs of its appendix. Ours are
from the preset named in each row, at its length and budget: one budget for all methods of a task, the last step, a 95 %
interval. They stand side by side to compare the order of the methods, not the numbers. The classes of our ArXiv and
Food-101 sets are not the paper's: [the differences](../paper.md)."""


def format_tables(rows: Rows, niah: Rows) -> str:
    """All tables, and the verdicts."""
    parts = []
    for title, tasks in TABLES.items():
        parts.append(f"## {title}\n\n{_classification_table(rows, tasks)}")
    parts.insert(3, f"## Table 4: needle in a haystack\n\n{_niah_table(niah)}")
    verdicts = [[verdict.claim, verdict.verdict, verdict.evidence] for verdict in judge(rows, niah)]
    parts.append(f"## The paper's claims\n\n{format_table(('claim', 'here', 'evidence'), verdicts)}")
    return "\n\n".join(parts)


def _classification_table(rows: Rows, tasks: dict[str, Any]) -> str:
    header = (
        *("task", "attention", "paper: train", "test", "ours: train", "test", "95 % interval", "n", "seeds"),
        *("preset", "tokens", "steps", "time"),
    )
    lines = []
    for task, published in tasks.items():
        for name in COMPARED:
            paper = [f"{value:.2f}" for value in published[name]] if name in published else ["-", "-"]
            own = [row for row in rows if (row["task"], row["attention"]) == (task, name)]
            lines.append([task, name, *paper, *_own_cells(own)])
    return format_table(header, lines)


def _own_cells(rows: Rows) -> list[str]:
    if not rows:
        return ["-"] * 9
    (found,) = summarize(rows).values()
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
        f"{rows[0]['steps']:,}",
        format_seconds(sum(row["seconds"] for row in rows) / len(rows)),
    ]


def _niah_table(rows: Rows) -> str:
    lines = []
    found = {key: f"{100 * row['accuracy']:.1f} ({row['n']})" for key, row in needle_rows(rows).items()}
    for name, published in NIAH.items():
        lines.append([name, "paper", *("OOM" if value is None else f"{value:.1f}" for value in published)])
        lines.append([name, "ours (n)", *(found.get((name, length), "-") for length in NIAH_LENGTHS)])
    return format_table(("attention", "", *(f"{length:,}" for length in NIAH_LENGTHS)), lines)


if __name__ == "__main__":
    cli.main(lambda: run(make_parser().parse()))
