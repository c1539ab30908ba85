"""The command line of needle in a haystack, and `load`, which returns a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp

from elsaa_jax import ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from experiments.engine import cli
from experiments.engine.config import RunConfig
from experiments.engine.parallel import is_main_process
from experiments.engine.results import Rows
from experiments.engine.run import load_variables, train_and_evaluate
from experiments.engine.transformer import ModelConfig, Positions
from experiments.engine.workdir import stored_task
from experiments.niah.haystack import DEPTHS
from experiments.niah.presets import PRESETS, PresetName
from experiments.niah.report import format_rows, write_report
from experiments.niah.task import METHODS, Evaluation, Method, Niah, last_logits

SHORTEST = 512
# Classes of the stored config of a run.
CLASSES = (Niah, ElsaaConfig, RaceConfig, SortLshConfig, FusionConfig, ModelConfig, Evaluation)


def load(workdir: str | pathlib.Path, attention: Method = "elsaa") -> Callable[[Any], jax.Array]:
    """Returns a trained model as a function from tokens (B, N) to logits (B, 179) at the last position.

    Args:
      workdir: Work directory of `python -m experiments.niah`.
      attention: Name of the method whose model is loaded.
    """
    task, variables = load_task(workdir, attention)
    return lambda tokens: last_logits(task.model, variables, jnp.asarray(tokens, jnp.int32))


def load_task(workdir: str | pathlib.Path, attention: Method) -> tuple[Niah, dict[str, Any]]:
    """Returns the task of one method in a work directory, and the variables of its trained model."""
    directory = pathlib.Path(workdir) / attention
    task = stored_task(directory, CLASSES)
    return task, load_variables(task, directory)


def make_parser() -> cli.Parser:
    """Returns the parser of the command line."""
    parser = cli.Parser("Needle in a haystack: how far does retrieval reach?", tuple(METHODS), default="elsaa")
    parser.set_defaults(workdir=pathlib.Path("runs/niah"))
    add = parser.add_argument
    add("--length", type=cli.integer(SHORTEST), default=65536, help="Longest context of the evaluation, in tokens.")
    add(
        "--lengths",
        type=_lengths,
        help="Context lengths to evaluate, e.g. 1024,65536. Overrides --length. Default: 512, 1024, ... to --length.",
    )
    add(
        "--examples",
        type=cli.integer(1),
        help="Number of examples per length. Default: 500 up to 4,096 tokens, 100 up to 65,536, and 20 beyond.",
    )
    add(
        "--needles",
        type=cli.integer(1),
        default=1,
        help="Number of needles in each example of the evaluation. The model is asked for one of them.",
    )
    add(
        "--distractors",
        type=cli.integer(0),
        default=0,
        help="Number of further needles in each example, which are never asked for.",
    )
    add(
        "--depths",
        type=_depths,
        default=(),
        help="Depths of the needle, each from 0.05 to 0.95, e.g. 0.1,0.5. Default: a random depth for each example.",
    )
    add(
        "--positions",
        choices=get_args(Positions),
        help="Position encoding of the model. Default: that of the preset, which is none, or learned for paper.",
    )
    add(
        "--preset",
        choices=get_args(PresetName),
        default="default",
        help="Model and training: default runs on a CPU, paper has the paper's sizes and needs a GPU.",
    )
    return parser


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(cli.integer(SHORTEST)(part) for part in text.split(","))


def _depths(text: str) -> tuple[float, ...]:
    try:
        depths = tuple(float(part) for part in text.split(","))
    except ValueError:
        depths = ()
    if not depths or not all(DEPTHS[0] <= depth <= DEPTHS[1] for depth in depths):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from {DEPTHS[0]} to {DEPTHS[1]}")
    return depths


def lengths_up_to(length: int) -> tuple[int, ...]:
    """Returns 512, 1,024, ... up to `length`, and `length` itself."""
    doubled = [SHORTEST << i for i in range((length // SHORTEST).bit_length())]
    return tuple(sorted({*doubled, length}))


def run_config(arguments: argparse.Namespace, method: Method) -> RunConfig:
    """Returns the configuration of the run of one method."""
    config, sizes, train = PRESETS[arguments.preset]
    if arguments.positions is not None:
        sizes = dataclasses.replace(sizes, positions=arguments.positions)
    train = dataclasses.replace(
        train,
        stages=cli.scale_stages(train.stages, arguments.steps, arguments.batch_size),
        seed=arguments.seed,
        parallel=arguments.parallel,
        accumulate=arguments.accumulate,
    )
    evaluation = Evaluation(
        arguments.lengths or lengths_up_to(arguments.length),
        arguments.examples,
        arguments.needles,
        arguments.distractors,
        arguments.depths,
    )
    train_length = max(stage.length for stage in train.stages)
    return RunConfig(Niah(method, config, sizes, arguments.seed, train_length, evaluation), train)


def run(arguments: argparse.Namespace) -> Rows:
    """Trains and evaluates every chosen method, prints a table, writes the report and returns the rows."""
    workdir = arguments.workdir
    configs = {method: run_config(arguments, method) for method in arguments.attention}
    task = next(iter(configs.values())).task
    if is_main_process():
        print(
            f"Needle in a haystack: attention {', '.join(configs)}; seed {arguments.seed}; training with up to "
            f"{task.train_length:,} tokens; evaluation at {', '.join(f'{n:,}' for n in task.evaluation.lengths)} "
            f"tokens. Results go to {workdir}."
        )
    rows = []
    for method, config in configs.items():
        directory = workdir / method
        rows += train_and_evaluate(config, directory, resume=arguments.resume, eval_only=arguments.eval_only)
    if is_main_process():
        print(format_rows(rows))
        cli.print_files(write_report(workdir))
    return rows
