"""Reports of the classification experiments: rows, tables and pictures of all runs in a work directory."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from elsaa_jax.layers.spec import ATTENTION_KINDS
from elsaa_jax.types import AttentionKind
from experiments.engine import pictures
from experiments.engine.classification import ROW_FIELDS
from experiments.engine.classifier import layer_means
from experiments.engine.errors import EngineError
from experiments.engine.metrics import Record, check_metrics, read_metrics
from experiments.engine.parallel import is_main_process
from experiments.engine.progress import format_seconds
from experiments.engine.results import EVALUATE_AGAIN, Rows, check_fields, read_results
from experiments.engine.stopwatch import TIME, read_times
from experiments.engine.table import format_table
from experiments.engine.workdir import CONFIG, METRICS, RESULTS, damaged, stored_training, versions, write_checked


def run_directory(workdir: pathlib.Path, attention: AttentionKind, seed: int) -> pathlib.Path:
    """Returns the directory of a run inside the work directory of its experiment."""
    return workdir / f"{attention}-{seed}"


def collect(workdir: pathlib.Path) -> Rows:
    """Returns one row for each finished run of a work directory, by attention and seed.

    A row is that of the evaluation with the most examples, with `steps`, `batch_size` and three times: `seconds` of
    training and evaluation, `training_seconds`, and `waited`, the seconds of training in which a step waited for its
    data. Directories of other experiments are left out.
    """
    rows = []
    for directory in sorted(path.parent for path in workdir.glob(f"*/{RESULTS}")):
        row = _collect_run(directory)
        if row is not None:
            rows.append(row)
    order = {name: index for index, name in enumerate(ATTENTION_KINDS)}
    return sorted(rows, key=lambda row: (order[row["attention"]], row["seed"]))


def _collect_run(directory: pathlib.Path) -> dict[str, Any] | None:
    path = directory / RESULTS
    stored = read_results(path, EVALUATE_AGAIN) or {"rows": []}
    if not any("task" in row for row in stored["rows"]):
        return None  # a run of another experiment
    check_fields(path, stored["rows"], ROW_FIELDS, EVALUATE_AGAIN)
    times = read_times(directory / TIME)
    if times is None:
        raise EngineError(f"{directory / TIME} is missing; restore it, or move {directory} away")
    row = dict(max(stored["rows"], key=lambda row: row["n_test"]))
    if row["attention"] not in ATTENTION_KINDS:
        raise damaged(path, f"{row['attention']!r} is not an attention", EVALUATE_AGAIN)
    try:
        (stage,) = stored["config"]["train"]["stages"]
        budget = {"steps": stage["steps"], "batch_size": stage["batch_size"]}
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, "its config has no training stage", EVALUATE_AGAIN) from error
    seconds = {
        "seconds": times.seconds + row.pop("evaluation_seconds"),
        "training_seconds": times.seconds,
        "waited": times.waited,
    }
    return row | budget | {name: round(value, 1) for name, value in seconds.items()}


def run_metrics(workdir: pathlib.Path) -> dict[str, list[Record]]:
    """Returns the lines of metrics of each run in a work directory, by the name of the run's directory.

    Raises:
      EngineError: The metrics of a run are damaged, or incomplete though the run is finished.
    """
    directories = {path.parent for name in (CONFIG, METRICS) for path in workdir.glob(f"*/{name}")}
    return {directory.name: _metrics_of(directory) for directory in sorted(directories)}


def _metrics_of(directory: pathlib.Path) -> list[Record]:
    path, is_finished = directory / METRICS, (directory / RESULTS).exists()
    if not path.exists() and not is_finished:
        return []  # The run has just begun.
    records = read_metrics(path)
    train = stored_training(directory)
    if train is not None:
        last = records[-1]["step"] if records else 0
        check_metrics(path, train, train.total_steps if is_finished else last)
    return records


def diagnostics(workdir: pathlib.Path) -> dict[str, dict[str, list[float]]]:
    """Returns the means of multiplier, lambda, gates and masses per layer at the last step of each run.

    The keys are names of run directories; runs without such means are left out.
    """
    found = {name: layer_means(records[-1]) for name, records in run_metrics(workdir).items() if records}
    return {name: means for name, means in found.items() if means}


def write_report(workdir: pathlib.Path) -> list[pathlib.Path]:
    """Writes results.json and a picture for all runs in the work directory, and returns the paths of the files."""
    written = [workdir / RESULTS]
    write_checked(workdir / RESULTS, {"versions": versions(), "rows": collect(workdir)})
    curves: dict[str, dict[str, list[pictures.Point]]] = {}
    for run, records in run_metrics(workdir).items():
        for record in records:
            for name, value in record.items():
                layer, _, kind = name.partition("/")
                if layer.startswith("layer_"):
                    label = f"{run}, layer {layer.removeprefix('layer_')}"
                    curves.setdefault(kind, {}).setdefault(label, []).append((record["step"], value, value, value))
    path = workdir / "branches.png"
    parts = [pictures.Panel(kind, "step", "mean over the layer's outputs", found) for kind, found in curves.items()]
    if is_main_process() and parts and pictures.panels(path, parts, columns=3):
        written.append(path)
    return written


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table with one line per run."""
    header = ("task", "attention", "seed", "train", "test", "95 % interval", "n", "steps", "parameters", "time")
    lines = [
        [
            row["task"],
            row["attention"],
            row["seed"],
            f"{row['train_accuracy']:.4f}",
            f"{row['test_accuracy']:.4f}",
            f"{row['low']:.4f} to {row['high']:.4f}",
            row["n_test"],
            row["steps"],
            f"{row['parameters']:,}",
            format_seconds(row["seconds"]),
        ]
        for row in rows
    ]
    return format_table(header, lines)
