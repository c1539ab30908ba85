"""Whether the sparse branch should hash with planes of its own or with those of the low-rank branch.

Claim: trained with branch dropout, shared planes find a needle far beyond the length of training more often than planes
of its own; without branch dropout that gain depends on the seed.

Task: `[filler .. KEY VALUE .. filler] SEP KEY` -> VALUE, with key and value drawn anew for each example, the needle
anywhere between 5 % and 95 % of the filler, and the argmax over the whole vocabulary as the answer. For each seed, one
causal model is trained at lengths up to 1,024 with `share_planes` False and True, crossed with branch dropout 0 and
0.5: the same start, batches and low-rank planes in each cell, and the same examples of each length in evaluation.

The first stage of training is no longer than `min_length`, where the sparse branch is exact and hashes nothing: both
settings of `share_planes` would pass through it alike, so it runs once for the two, and they part ways after it.

Command: python -m experiments.shared_planes --output shared_planes.json

Result: at 16,384 tokens, two seeds of 32 examples, accuracy with own and with shared planes is 0.64 [0.52, 0.75] and
0.95 [0.87, 0.98] with branch dropout, 0.50 [0.38, 0.62] and 0.70 [0.58, 0.80] without (95 % intervals over examples);
without it the two seeds of shared planes lie at 1.00 and 0.41. The whole table is in docs/results/shared_planes.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from elsaa_jax import ELSAA, ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from experiments.engine.stats import wilson_interval
from experiments.haystack import VOCABULARY, make_examples

WIDTH, HEADS, MLP_WIDTH, LAYERS = 64, 4, 128, 2
LEARNING_RATE, WARM_UP_STEPS, REPORT_EVERY = 3e-3, 30, 20
LENGTHS = (512, 1024, 4096, 16384, 65536)
FULL_LENGTH = 8192  # tokens of a batch of evaluation; longer sequences come one by one, and are fewer in proportion
TRAINING, EVALUATION = 0, 1  # streams of random examples

log = functools.partial(print, flush=True)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of training: its share of the steps, and what its batches hold."""

    share: float
    length: int
    batch: int
    needles: int


COMMON_STAGE = Stage(share=0.8, length=64, batch=32, needles=8)
LONG_STAGE = Stage(share=0.2, length=1024, batch=4, needles=4)


class Cell(NamedTuple):
    """One cell of the comparison."""

    share_planes: bool
    branch_dropout: float

    def model(self) -> Model:
        """The model of this cell."""
        config = ElsaaConfig(
            race=RaceConfig(num_tables=4, num_bits=4, chunk_size=128),
            sparse=SortLshConfig(num_bits=12, block_size=64, min_length=256),
            fusion=FusionConfig(branch_dropout_rate=self.branch_dropout),
            share_planes=self.share_planes,
            short_conv=3,
        )
        return Model(config)


class Score(NamedTuple):
    """Right answers of one trained model at one length."""

    share_planes: bool
    branch_dropout: float
    seed: int
    length: int
    correct: int
    examples: int


class State(NamedTuple):
    """What a step of training changes."""

    params: Any
    optimizer: optax.OptState
    step: jax.Array


class Model(nn.Module):
    """A causal pre-LN transformer without positions, read out at its last tokens alone."""

    config: ElsaaConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, num_outputs: int, deterministic: bool) -> jax.Array:
        """(B, S) -> logits of the last tokens, (B, num_outputs, VOCABULARY)."""
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        for layer in range(LAYERS):
            first = x.shape[1] - num_outputs if layer == LAYERS - 1 else 0
            keys = nn.LayerNorm()(x)
            attention = ELSAA(HEADS, is_causal=True, config=self.config, deterministic=deterministic)
            x = x[:, first:] + attention(keys[:, first:], keys)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(MLP_WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def make_batch(rng: np.random.Generator, batch: int, length: int, needles: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (batch, length), and the answers (batch, needles) to the `SEP KEY` pairs at their end."""
    examples = make_examples(rng, batch, length, needles=needles, queries=needles)
    return examples.tokens, examples.answers


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW with clipping, warm-up, and a cosine to 5 % over all steps of training."""
    rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, WARM_UP_STEPS, steps, 0.05 * LEARNING_RATE)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01))


@functools.partial(jax.jit, static_argnames=("model", "steps"))
def train_step(
    state: State, hashes: Any, rng: jax.Array, tokens: jax.Array, answers: jax.Array, *, model: Model, steps: int
) -> tuple[State, jax.Array]:
    """One step on a batch: the new state, and the loss at the queried keys."""
    rngs = {"dropout": jax.random.fold_in(rng, state.step)}

    def loss_of(params: Any) -> jax.Array:
        logits: Any = model.apply({"params": params, "hashes": hashes}, tokens, 2 * answers.shape[1], False, rngs=rngs)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, 1::2], answers).mean()

    loss, gradient = jax.value_and_grad(loss_of)(state.params)
    updates, optimizer = make_optimizer(steps).update(gradient, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), optimizer, state.step + 1), loss


@functools.partial(jax.jit, static_argnames="model")
def count_correct(params: Any, hashes: Any, tokens: jax.Array, answers: jax.Array, *, model: Model) -> jax.Array:
    """How many of the answers (B, 1) to the last tokens are right."""
    logits: Any = model.apply({"params": params, "hashes": hashes}, tokens, 1, True)
    return jnp.sum(jnp.argmax(logits, axis=-1) == answers)


def initialize(cell: Cell, seed: int, steps: int) -> tuple[State, Any]:
    """The state before training, the same in every cell, and the planes of the cell."""
    params_rng, hashes_rng = jax.random.split(jax.random.key(seed))
    rngs, tokens = {"params": params_rng, "hashes": hashes_rng}, jnp.zeros((1, 8), jnp.int32)
    variables = jax.jit(cell.model().init, static_argnums=(2, 3))(rngs, tokens, 1, True)
    params = variables["params"]
    return State(params, make_optimizer(steps).init(params), jnp.int32(0)), variables["hashes"]


def train(cell: Cell, state: State, hashes: Any, stage: Stage, seed: int, steps: int) -> State:
    """The state after one stage of training."""
    rng = np.random.default_rng([TRAINING, seed, stage.length])
    count = round(stage.share * steps)
    start = time.monotonic()
    for step in range(1, count + 1):
        batch = make_batch(rng, stage.batch, stage.length, stage.needles)
        state, loss = train_step(state, hashes, jax.random.key(seed), *batch, model=cell.model(), steps=steps)
        if step % REPORT_EVERY == 0 or step == count:
            loss.block_until_ready()
            left = (time.monotonic() - start) / step * (count - step)
            log(f"length {stage.length}, step {step}/{count}, loss {loss:.4f}, {left:.0f} s left")
    return state


def evaluate(cell: Cell, params: Any, hashes: Any, seed: int, length: int, examples: int) -> Score:
    """The score on fresh examples, the same for every cell, one needle in each."""
    model = cell._replace(branch_dropout=0.0).model()  # off in evaluation anyhow: one program for both rates
    rng = np.random.default_rng([EVALUATION, seed, length])
    size = max(1, FULL_LENGTH // length)
    batches = math.ceil(examples / size)
    correct = sum(
        int(count_correct(params, hashes, *make_batch(rng, size, length, 1), model=model)) for _ in range(batches)
    )
    return Score(*cell, seed, length, correct, batches * size)


def run_seed(seed: int, branch_dropout: float, steps: int, max_length: int, examples: int) -> Iterator[Score]:
    """Trains both settings of `share_planes` from a common first stage, and scores them."""
    cells = [Cell(share_planes, branch_dropout) for share_planes in (False, True)]
    log(f"seed {seed}, branch dropout {branch_dropout}: the common stage")
    state, hashes = initialize(cells[0], seed, steps)
    common = train(cells[0], state, hashes, COMMON_STAGE, seed, steps)
    for cell in cells:
        log(f"seed {seed}, {cell}: the long stage")
        _, hashes = initialize(cell, seed, steps)
        params = train(cell, common, hashes, LONG_STAGE, seed, steps).params
        for length in (length for length in LENGTHS if length <= max_length):
            count = max(1, min(examples, examples * FULL_LENGTH // length))
            score = evaluate(cell, params, hashes, seed, length, count)
            log(f"length {length}: {score.correct} of {score.examples} right")
            yield score


def format_table(scores: Sequence[Score]) -> str:
    """A Markdown table of accuracies with their intervals: each cell seed by seed, then all its seeds together."""
    lengths = sorted({score.length for score in scores})
    rows: dict[tuple[bool, float, str], dict[int, list[Score]]] = {}
    for score in scores:
        for seed in (str(score.seed), "all"):
            row = rows.setdefault((score.share_planes, score.branch_dropout, seed), {})
            row.setdefault(score.length, []).append(score)
    lines = [["share_planes", "branch dropout", "seed", *(f"{length:,}" for length in lengths)]]
    lines.append(["---"] * len(lines[0]))
    lines += [
        [*map(str, name), *(format_accuracy(row[length]) for length in lengths)] for name, row in sorted(rows.items())
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_accuracy(scores: Sequence[Score]) -> str:
    """Accuracy, 95 % interval and number of examples of some scores together."""
    correct, examples = sum(score.correct for score in scores), sum(score.examples for score in scores)
    low, high = wilson_interval(correct, examples)
    return f"{correct / examples:.2f} [{low:.2f}, {high:.2f}] n={examples}"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Compares planes of its own with shared ones for the sparse branch of ELSAA.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=2, help="models of each cell")
    parser.add_argument("--steps", type=int, default=500, help="training steps of a model")
    parser.add_argument("--max-length", type=int, choices=LENGTHS, default=16384, help="longest evaluation")
    parser.add_argument("--examples", type=int, default=64, help="of each model and length, fewer above 8,192 tokens")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for the scores")
    args = parser.parse_args()
    if min(args.seeds, args.examples) < 1 or args.steps <= WARM_UP_STEPS:
        parser.error(f"--seeds and --examples must be at least 1, and --steps more than {WARM_UP_STEPS}")
    if args.output and not args.output.parent.is_dir():
        parser.error(f"--output: {args.output.parent} is not a directory")
    return args


def main() -> None:
    """Runs every cell and prints the table."""
    args = parse_arguments()
    scores: list[Score] = []
    for seed, branch_dropout in itertools.product(range(args.seeds), (0.0, 0.5)):
        scores += run_seed(seed, branch_dropout, args.steps, args.max_length, args.examples)
    log(format_table(scores))
    if args.output:
        args.output.write_text(json.dumps([score._asdict() for score in scores], indent=2) + "\n")


if __name__ == "__main__":
    main()
