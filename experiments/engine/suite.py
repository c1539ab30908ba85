"""What the experiments of classifiers share: presets, the command line, and the report."""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from elsaa_jax import ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from elsaa_jax.layers.spec import ATTENTION_KINDS
from experiments.engine import cli, pictures
from experiments.engine.classification import Classification
from experiments.engine.classifier import ClassifierConfig, layer_means
from experiments.engine.config import RunConfig, Stage, TrainConfig
from experiments.engine.data.store import data_dir_of
from experiments.engine.metrics import read_metrics
from experiments.engine.parallel import is_main_process
from experiments.engine.progress import format_seconds
from experiments.engine.results import Rows
from experiments.engine.run import train_and_evaluate
from experiments.engine.stopwatch import TIME
from experiments.engine.table import format_table
from experiments.engine.workdir import METRICS, RESULTS, read_json, versions, write_json

COMPARED = ("elsaa", "race", "sort_lsh", "sort_lsh_race", "exact")  # in the paper's tables

# Settings of the paper that all its tasks share.
PAPER_DROPOUT = 0.1
PAPER_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Preset:
    """Everything about a task but its attention and its seed.

    Attributes:
      sizes: of the model.
      config: of the attention.
      data: the examples.
      batch_size: examples of a microbatch.
      accumulate: microbatches of a step.
      learning_rate: its peak.
      weight_decay: of AdamW.
      epochs: of training; None: `steps` says it.
      steps: of training; None: `epochs` says it.
      warmup: share of the steps.
      final_fraction: of the peak rate, at the end.
      decay: from the peak to the end.
      b2: of AdamW.
      label_smoothing: of the loss.
      checkpoint_every: steps between checkpoints.
    """

    sizes: ClassifierConfig
    config: ElsaaConfig
    data: Any
    batch_size: int
    learning_rate: float
    weight_decay: float
    accumulate: int = 1
    epochs: int | None = None
    steps: int | None = None
    warmup: float = 0.1
    final_fraction: float = 0.0
    decay: Literal["cosine", "linear"] = "linear"
    b2: float = 0.999
    label_smoothing: float = 0.0
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"Preset.epochs is {self.epochs} and steps is {self.steps}; give one of them")


def cpu_preset(**fields: Any) -> Preset:
    """A preset for a few hundred steps: cosine decay, and squares of gradients that are soon forgotten."""
    return Preset(decay="cosine", b2=0.98, **fields)


def paper_attention(
    *, bits: int, tables: int, ensembles: int, lsh_bits: int, block: int, min_length: int, gate: int, chunk: int = 256
) -> ElsaaConfig:
    """An attention with the settings of the appendix."""
    return ElsaaConfig(
        race=RaceConfig(num_tables=tables, num_bits=bits, num_ensembles=ensembles, chunk_size=chunk),
        sparse=SortLshConfig(num_bits=lsh_bits, block_size=block, min_length=min_length, num_neighbors=0),
        fusion=FusionConfig(gate_hidden=gate, eps=PAPER_EPS),
        share_planes=False,
    )


def make_parser(description: str) -> cli.Parser:
    """The command line of an experiment; it adds flags of its own."""
    parser = cli.Parser(description, ATTENTION_KINDS, default="elsaa")
    parser.add_argument("--preset", choices=("paper", "cpu"), help="default: cpu where there is no accelerator")
    parser.add_argument("--examples", type=cli.integer(1), help="of the test to evaluate; default: all")
    parser.set_defaults(accumulate=None)
    return parser


def run_config(task: str, name: str, preset: Preset, attention: str, arguments: argparse.Namespace) -> RunConfig:
    """The run of one attention.

    Args:
      task: its name in results.
      name: of the preset.
      preset: what it says.
      attention: one of the six.
      arguments: of the command line, which win over the preset.
    """
    data = dataclasses.replace(preset.data, data_dir=str(data_dir_of(arguments.data_dir)))
    # A batch of one's own is taken as a whole, unless its microbatches are given too.
    accumulate = arguments.accumulate or (1 if arguments.batch_size else preset.accumulate)
    batch_size = arguments.batch_size or preset.batch_size * accumulate
    steps = arguments.steps or preset.steps
    if steps is None:
        assert preset.epochs is not None
        steps = preset.epochs * math.ceil(data.count("train") / batch_size)
    classification = Classification(
        task,
        name,
        attention,
        preset.config,
        preset.sizes,
        data,
        arguments.seed,
        arguments.examples,
        preset.label_smoothing,
    )
    train = TrainConfig(
        stages=(Stage(steps, data.length, batch_size),),
        learning_rate=preset.learning_rate,
        warmup_steps=round(preset.warmup * steps),
        decay=preset.decay,
        final_fraction=preset.final_fraction,
        b2=preset.b2,
        weight_decay=preset.weight_decay,
        accumulate=accumulate,
        seed=arguments.seed,
        parallel=arguments.parallel,
        checkpoint_every=preset.checkpoint_every,
    )
    return RunConfig(classification, train)


def run(task: str, presets: Mapping[str, Preset], arguments: argparse.Namespace) -> Rows:
    """Trains and evaluates every attention that was asked for, and reports.

    Args:
      task: its name in results.
      presets: by name.
      arguments: of the command line.
    """
    chosen = arguments.preset or ("cpu" if jax.default_backend() == "cpu" else "paper")
    workdir = arguments.workdir or pathlib.Path("runs") / task
    configs = {name: run_config(task, chosen, presets[chosen], name, arguments) for name in arguments.attention}
    first = next(iter(configs.values()))
    examples = first.task.examples
    examples.read("train", np.arange(1))  # What is loaded here is not what a step waits for.
    if is_main_process():
        print(
            f"{task}: {', '.join(configs)}; preset {chosen}; seed {arguments.seed}; {examples.length:,} tokens, "
            f"{examples.count('train'):,} training and {examples.count('test'):,} test examples; "
            f"{first.train.total_steps:,} steps of {first.train.stages[0].batch_size}; all goes to {workdir}",
            flush=True,
        )
    for name, config in configs.items():
        directory = run_directory(workdir, name, arguments.seed)
        train_and_evaluate(config, directory, resume=arguments.resume, eval_only=arguments.eval_only)
        write_report(workdir)
    rows = [row for row in collect(workdir) if row["attention"] in configs and row["seed"] == arguments.seed]
    if is_main_process():
        print(format_rows(rows))
        print(f"\n{', '.join(map(str, write_report(workdir)))}")
    return rows


def run_directory(workdir: pathlib.Path, attention: str, seed: int) -> pathlib.Path:
    """Where a run lies in the work dir of its experiment."""
    return workdir / f"{attention}-{seed}"


def collect(workdir: pathlib.Path) -> Rows:
    """A row for each run of a work dir: of its largest evaluation, with its steps, their batches, and its seconds.

    `seconds` are of training and evaluation, `training_seconds` of training, and `waited` those of them in which a step
    waited for its data.
    """
    rows = []
    for directory in sorted(path.parent for path in workdir.glob(f"*/{RESULTS}")):
        stored, times = read_json(directory / RESULTS), read_json(directory / TIME)
        if not (times and stored and stored.get("rows") and "task" in stored["rows"][0]):
            continue  # no run of a classifier
        row = max(stored["rows"], key=lambda row: row["n_test"])
        (stage,) = stored["config"]["train"]["stages"]
        training, evaluation = times["seconds"], row.pop("evaluation_seconds")
        seconds = {"seconds": training + evaluation, "training_seconds": training, "waited": times["waited"]}
        rows.append(
            {
                **row,
                "steps": stage["steps"],
                "batch_size": stage["batch_size"],
                **{name: round(value, 1) for name, value in seconds.items()},
            }
        )
    order = {name: index for index, name in enumerate(ATTENTION_KINDS)}
    return sorted(rows, key=lambda row: (order[row["attention"]], row["seed"]))


def diagnostics(workdir: pathlib.Path) -> dict[str, dict[str, list[float]]]:
    """The means of m, lambda, gates and masses by layer in the last step of each run, by the name of its directory."""
    found = {}
    for path in sorted(workdir.glob(f"*/{METRICS}")):
        lines = read_metrics(path)
        if lines:
            found[path.parent.name] = layer_means(lines[-1])
    return {name: means for name, means in found.items() if means}


def write_report(workdir: pathlib.Path) -> list[pathlib.Path]:
    """Writes results.json and the pictures, of all that was ever run in the work dir; returns their paths."""
    written = [workdir / RESULTS]
    write_json(workdir / RESULTS, {"versions": versions(), "rows": collect(workdir)})
    curves: dict[str, dict[str, list[pictures.Point]]] = {}
    for path in sorted(workdir.glob(f"*/{METRICS}")):
        for record in read_metrics(path):
            for name, value in record.items():
                layer, _, kind = name.partition("/")
                if layer.startswith("layer_"):
                    label = f"{path.parent.name}, layer {layer.removeprefix('layer_')}"
                    curves.setdefault(kind, {}).setdefault(label, []).append((record["step"], value, value, value))
    path = workdir / "branches.png"
    parts = [pictures.Panel(kind, "step", "mean over the layer's outputs", found) for kind, found in curves.items()]
    if is_main_process() and parts and pictures.panels(path, parts, columns=3):
        written.append(path)
    return written


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """The table: a line for each run."""
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
