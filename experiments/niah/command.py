"""Needle in a haystack: trained on 1,024 tokens, asked at 65,536 and beyond.

Claim: causal ELSAA with shared planes finds the needle at every length; exact attention does too, at quadratic cost;
the ablations show which parts it takes.

Command: python -m experiments.niah --length 65536

A model is trained at lengths up to 1,024 and evaluated at 512, 1,024, ... up to `--length`; each accuracy has its
number of examples and its 95 % interval. docs/results/niah.md has the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from elsaa_jax import ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from experiments.engine import cli, pictures
from experiments.engine.config import RunConfig, TrainConfig
from experiments.engine.parallel import is_main_process
from experiments.engine.run import load_variables, train_and_evaluate
from experiments.engine.table import format_table
from experiments.engine.transformer import ModelConfig
from experiments.engine.workdir import RESULTS, read_json, stored_task, versions, write_json
from experiments.niah.haystack import DEPTHS, NUM_VALUES
from experiments.niah.task import METHODS, Evaluation, Niah, NiahStage, last_logits

SHORTEST = 512

CONFIG = ElsaaConfig(
    race=RaceConfig(num_tables=4, num_bits=4, chunk_size=128),
    sparse=SortLshConfig(num_bits=12, block_size=64, min_length=256),
    fusion=FusionConfig(branch_dropout_rate=0.5),
    share_planes=True,
    short_conv=3,
)
PAPER_CONFIG = ElsaaConfig(
    race=RaceConfig(num_tables=4, num_bits=4, chunk_size=64),
    sparse=SortLshConfig(num_bits=5, block_size=64, min_length=256, pairing="rank"),
    fusion=FusionConfig(gate_hidden=128),
    share_planes=False,
)
PAPER_SIZES = ModelConfig(
    width=256,
    num_layers=4,
    num_heads=4,
    mlp_width=1024,
    positions="learned",
    num_positions=1025,
    tie_head=True,
    dropout_rate=0.1,
)


TRAINING = TrainConfig(
    stages=(NiahStage(300, 64, 32, 8, 8), NiahStage(250, 256, 16, 16, 16), NiahStage(50, 1024, 8, 8, 8)),
    learning_rate=6e-3,
)
PAPER_TRAINING = TrainConfig(
    stages=(NiahStage(5880, 1024, 1024),),
    learning_rate=3e-4,
    warmup_steps=118,
    decay="linear",
    final_fraction=0.0,
    b2=0.999,
)


def load(workdir: str | pathlib.Path, attention: str = "elsaa") -> Callable[[Any], jax.Array]:
    """A trained model as a function from tokens (B, N) to logits (B, 179) at the last position.

    Args:
      workdir: of `python -m experiments.niah`.
      attention: which of its models.
    """
    task, variables = load_task(workdir, attention)
    return lambda tokens: last_logits(task.model, variables, jnp.asarray(tokens, jnp.int32))


def load_task(workdir: str | pathlib.Path, attention: str) -> tuple[Niah, dict[str, Any]]:
    """The task of one method of a work dir, and the variables of its trained model."""
    directory = pathlib.Path(workdir) / attention
    task = stored_task(directory, CLASSES)
    return task, load_variables(task, directory)


def make_parser() -> cli.Parser:
    """The command line."""
    parser = cli.Parser("Needle in a haystack: how far does retrieval reach?", tuple(METHODS), default="elsaa")
    add = parser.add_argument
    add("--length", type=cli.integer(SHORTEST), default=65536, help="longest of the evaluation")
    add("--lengths", type=_lengths, help="of the evaluation, instead of all up to --length")
    add("--examples", type=cli.integer(1), help="of each length; default: 500 up to 4,096 tokens, fewer beyond")
    add("--needles", type=cli.integer(1), default=1, help="in each example of the evaluation; one is asked")
    add("--distractors", type=cli.integer(0), default=0, help="further needles, which are never asked")
    add("--depths", type=_depths, default=(), help="places of the needle, from 0.05 to 0.95; default: anywhere")
    add("--positions", choices=("none", "learned", "rope"), help="of the model; default: none, or the preset's")
    add("--preset", choices=("default", "paper"), default="default", help="paper: its model and training, for a GPU")
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
    """512, 1,024, ... and `length` itself."""
    doubled = [SHORTEST << i for i in range((length // SHORTEST).bit_length())]
    return tuple(sorted({*doubled, length}))


def run_config(arguments: argparse.Namespace, method: str) -> RunConfig:
    """The run of one method."""
    paper = arguments.preset == "paper"
    config, sizes, train = (PAPER_CONFIG, PAPER_SIZES, PAPER_TRAINING) if paper else (CONFIG, ModelConfig(), TRAINING)
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


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains and evaluates every method, and reports."""
    workdir = arguments.workdir or pathlib.Path("runs/niah")
    configs = {method: run_config(arguments, method) for method in arguments.attention}
    task = next(iter(configs.values())).task
    if is_main_process():
        print(
            f"needle in a haystack: {', '.join(configs)}; seed {arguments.seed}; trained up to "
            f"{task.train_length:,} tokens, evaluated at {', '.join(f'{n:,}' for n in task.evaluation.lengths)}; all "
            f"goes to {workdir}"
        )
    rows = []
    for method, config in configs.items():
        directory = workdir / method
        rows += train_and_evaluate(config, directory, resume=arguments.resume, eval_only=arguments.eval_only)
    if is_main_process():
        print(format_rows(rows))
        files = write_report(workdir)
        print(f"\n{', '.join(map(str, files))}")
        if len(files) == 1:
            print(pictures.NOT_DRAWN)
    return rows


def write_report(workdir: pathlib.Path) -> list[pathlib.Path]:
    """Writes results.json and the pictures, of all that was ever evaluated in the work dir; returns their paths."""
    stored = {method: read_json(workdir / method / RESULTS) for method in METHODS}
    stored = {method: results for method, results in stored.items() if results is not None}
    rows = [row for results in stored.values() for row in results["rows"]]
    configs = {method: results["config"] for method, results in stored.items()}
    write_json(workdir / RESULTS, {"config": configs, "versions": versions(), "rows": rows})
    anywhere = [row for row in rows if row["n"] and row["depth"] is None and not row["distractors"]]
    written = [workdir / RESULTS]
    if anywhere:
        curves: dict[str, list[tuple[int, float, float, float]]] = {}
        for row in anywhere:
            point = (row["length"], row["accuracy"], row["low"], row["high"])
            curves.setdefault(row["attention"], []).append(point)
        path, trained = workdir / "accuracy.png", anywhere[0]["train_length"]
        if pictures.accuracy_over_length(path, curves, trained=trained, chance=1 / NUM_VALUES):
            written.append(path)
    for method in dict.fromkeys(row["attention"] for row in rows):
        cells = depth_cells([row for row in rows if row["attention"] == method and not row["distractors"]])
        path = workdir / f"depths_{method}.png"
        if cells and pictures.heat_map(path, cells, title=f"{method}: accuracy"):
            written.append(path)
    return written


def depth_cells(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, float], float]:
    """Accuracy by length and depth: of fixed depths where there are any, else of parts of the context."""
    fixed = {(row["length"], row["depth"]): row["accuracy"] for row in rows if row["n"] and row["depth"] is not None}
    return fixed or {
        (row["length"], part["depth"]): part["correct"] / part["n"]
        for row in rows
        for part in row.get("by_depth", [])
        if part["n"]
    }


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """The table: a line for each method, length, depth and number of distractors."""
    header = ("attention", "tokens", "depth", "distractors", "accuracy", "95 % interval", "n", "s/example")
    lines = []
    for row in rows:
        place = "any" if row["depth"] is None else f"{row['depth']:.2f}"
        line = [row["attention"], f"{row['length']:,}", place, row["distractors"]]
        if not row["n"]:
            lines.append([*line, "-", row["skipped"], 0, "-"])
            continue
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append([*line, f"{row['accuracy']:.3f}", interval, row["n"], f"{row['seconds_per_example']:.3f}"])
    return format_table(header, lines)


# What the config of a run is made of.
CLASSES = (Niah, ElsaaConfig, RaceConfig, SortLshConfig, FusionConfig, ModelConfig, Evaluation)
