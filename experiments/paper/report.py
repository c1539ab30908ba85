"""The report on the paper: its tables beside ours, the verdicts, and pictures."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.engine import pictures
from experiments.engine.errors import disk_errors
from experiments.engine.presets import COMPARED
from experiments.engine.progress import format_seconds
from experiments.engine.report import diagnostics
from experiments.engine.results import Rows
from experiments.engine.table import format_table
from experiments.engine.workdir import versions, write_json, write_text
from experiments.paper.claims import Summary, judge, needle_rows, summarize
from experiments.paper.published import NIAH, NIAH_LENGTHS, TABLES, Accuracies
from experiments.paper.tasks import TASKS

REPORT, ROWS = "paper.md", "paper.json"


def write_report(rows: Rows, niah: Rows, workdir: pathlib.Path, out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the tables, the rows and the pictures, and returns the paths of the files."""
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
    text = [HEAD, format_tables(rows, niah)]
    text += [f"![{path.stem}]({path.name})" for path in written if path.suffix == ".png"]
    write_text(out / REPORT, "\n\n".join(text) + "\n")
    write_json(out / ROWS, {"versions": versions(), "rows": rows, "niah": list(needle_rows(niah).values())})
    return written


def branch_means(rows: Rows, workdir: pathlib.Path) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Returns the multiplier and the gates of elsaa at the end of training, by task and layer, for the first seed."""
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for task in TASKS:
        seeds = [row["seed"] for row in rows if (row["task"], row["attention"]) == (task, "elsaa")]
        means = diagnostics(workdir / task).get(f"elsaa-{seeds[0]}", {}) if seeds else {}
        for name in ("multiplier", "gate_sparse", "gate_low_rank"):
            for layer, value in enumerate(means.get(name, [])):
                found.setdefault(f"{task}, layer {layer}", {})[name] = (value, value, value)
    return found


HEAD = """# The paper's tables beside ours

```bash
python -m experiments.paper --run
```

The paper's numbers come from its tables: one seed, on a GPU, at the lengths and epochs of its appendix. Our numbers
come from the preset named in each row, at its length and budget. All methods of a task have one budget, and all test
examples are evaluated after the last step. Compare the order of the methods, not the numbers: data sets, splits and
readouts are not always the paper's ([the differences](../paper.md)).

The 95 % intervals cover test examples, taken as independent, and seeds. The deviation between seeds, in units of
sqrt(p (1 - p)) for an accuracy p, is pooled over the methods and tasks that have several seeds, and is used for those
with one seed too. All methods answer the same examples, which makes the intervals of differences too wide. Pairs of
the same papers (retrieval) and windows of the same reviews (IMDB) are not independent, which makes them too narrow."""


def format_tables(rows: Rows, niah: Rows) -> str:
    """Returns all tables and the verdicts."""
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
    """Returns a note on the share of time spent waiting for data, and on the number of seeds."""
    share, task, name = max((row["waited"] / row["training_seconds"], row["task"], row["attention"]) for row in rows)
    several = any(summary.seeds > 1 for summary in summarize(rows).values())
    return (
        "Times include training and evaluation and are means over seeds. Steps waited for their data for at most "
        f"{100 * share:.1f} % of the training time ({task}, {name})."
    ) + ("" if several else " Nothing has several seeds yet: the intervals are over test examples alone.")


def _classification_table(rows: Rows, tasks: Mapping[str, Accuracies]) -> str:
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
    """Returns the mean over all tasks of a table, "-" if some are missing."""
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
