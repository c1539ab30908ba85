"""The command line that the classification experiments share: flags, runs of all attentions, and the report."""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import get_args

import jax
import numpy as np

from elsaa_jax.layers.spec import ATTENTION_KINDS
from elsaa_jax.types import AttentionKind
from experiments.engine import cli
from experiments.engine.classification import Classification
from experiments.engine.config import RunConfig, Stage, TrainConfig
from experiments.engine.data.store import data_dir_of
from experiments.engine.parallel import is_main_process
from experiments.engine.presets import Preset, PresetName
from experiments.engine.report import collect, format_rows, run_directory, write_report
from experiments.engine.results import Rows
from experiments.engine.run import train_and_evaluate

Presets = Mapping[PresetName, Preset]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A command that trains and evaluates attentions on one task.

    Attributes:
      task: Name of the task in results, and of its directory below runs/.
      description: First line of --help.
      presets: Presets by name.
    """

    task: str
    description: str
    presets: Presets

    def make_parser(self) -> cli.Parser:
        """Returns the parser of the command line."""
        return make_parser(self.description)

    def run(self, arguments: argparse.Namespace) -> Rows:
        """Trains and evaluates every chosen attention, prints a table and returns its rows."""
        return run(self.task, self.presets, arguments)

    def main(self) -> None:
        """Runs the command with the flags of the command line."""
        self.run(self.make_parser().parse())


def make_parser(description: str) -> cli.Parser:
    """Returns a parser with the flags of all classification experiments; an experiment may add its own."""
    parser = cli.Parser(description, ATTENTION_KINDS, default="elsaa")
    add = parser.add_argument
    add(
        "--preset",
        choices=get_args(PresetName),
        help="Model, data and training budget. Default: cpu if there is no accelerator, else paper.",
    )
    add("--examples", type=cli.integer(1), help="Number of test examples to evaluate. Default: all.")
    parser.set_defaults(accumulate=None)
    parser.set_help(
        workdir="Directory for results and checkpoints. Default: runs/TASK.",
        accumulate="Number of microbatches per step. Default: that of the preset, or 1 with --batch-size.",
    )
    return parser


def run_config(
    task: str, name: PresetName, preset: Preset, attention: AttentionKind, arguments: argparse.Namespace
) -> RunConfig:
    """Returns the configuration of the run of one attention.

    Args:
      task: Name of the task in results.
      name: Name of the preset.
      preset: Settings of the preset.
      attention: Attention of the model.
      arguments: Flags of the command line, which override the preset.
    """
    data = dataclasses.replace(preset.data, data_dir=str(data_dir_of(arguments.data_dir)))
    # --batch-size alone means one microbatch; the preset's number of microbatches belongs to the preset's batch.
    accumulate = arguments.accumulate or (1 if arguments.batch_size else preset.accumulate)
    batch_size = arguments.batch_size or preset.batch_size * accumulate
    steps = arguments.steps or preset.steps
    if steps is None:
        assert preset.epochs is not None
        steps = preset.epochs * math.ceil(data.count("train") / batch_size)
    classification = Classification(
        task=task,
        preset=name,
        attention=attention,
        config=preset.config,
        sizes=preset.sizes,
        data=data,
        seed=arguments.seed,
        evaluated=arguments.examples,
        label_smoothing=preset.label_smoothing,
    )
    train = TrainConfig(
        stages=(Stage(steps, data.length, batch_size),),
        warmup_steps=round(preset.warmup * steps),
        accumulate=accumulate,
        seed=arguments.seed,
        parallel=arguments.parallel,
        checkpoint_every=preset.checkpoint_every,
        **dataclasses.asdict(preset.optimizer),
    )
    return RunConfig(classification, train)


def run(task: str, presets: Presets, arguments: argparse.Namespace) -> Rows:
    """Trains and evaluates every chosen attention, prints a table, writes the report and returns the rows.

    Args:
      task: Name of the task in results.
      presets: Presets by name.
      arguments: Flags of the command line.
    """
    chosen: PresetName = arguments.preset or ("cpu" if jax.default_backend() == "cpu" else "paper")
    workdir = arguments.workdir or pathlib.Path("runs") / task
    configs = {name: run_config(task, chosen, presets[chosen], name, arguments) for name in arguments.attention}
    first = next(iter(configs.values()))
    examples = first.task.examples
    examples.read("train", np.arange(1))  # Loads the data set now, so that no training step waits for it.
    if is_main_process():
        print(
            f"Task {task}: attention {', '.join(configs)}; preset {chosen}; seed {arguments.seed}; {examples.length:,} "
            f"tokens; {examples.count('train'):,} training and {examples.count('test'):,} test examples; "
            f"{first.train.total_steps:,} steps with batch size {first.train.stages[0].batch_size}. Results go to "
            f"{workdir}.",
            flush=True,
        )
    files: list[pathlib.Path] = []
    for name, config in configs.items():
        directory = run_directory(workdir, name, arguments.seed)
        train_and_evaluate(config, directory, resume=arguments.resume, eval_only=arguments.eval_only)
        files = write_report(workdir)
    rows = [row for row in collect(workdir) if row["attention"] in configs and row["seed"] == arguments.seed]
    if is_main_process():
        print(format_rows(rows))
        cli.print_files(files)
    return rows
