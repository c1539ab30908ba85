"""The command line of the rank experiment, and its parts."""

from __future__ import annotations

import argparse
import itertools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from elsaa_jax import theory
from experiments.engine import cli
from experiments.engine.errors import disk_errors
from experiments.engine.results import Rows
from experiments.engine.workdir import RESULTS, versions, write_json
from experiments.rank import branch_error, costs, interactions, matchings, report, spectra

# Longest input for which the smallest angular similarity of random tokens is measured, over all pairs.
MAX_MEASURED = 4096
# Cosines of a query and its key in the errors over entropy: unrelated, similar, and as after training on retrieval.
SIMILARITIES = (0.0, 0.8, 0.98)


def make_parser() -> cli.PlainParser:
    """Returns the parser of the command line."""
    parser = cli.PlainParser("Computes the certificates of the paper's rank theory and tests them by experiments.")
    parser.set_defaults(workdir=pathlib.Path("runs/rank"))
    parser.set_help(seed="Random seed of tokens, supports and hash planes.")
    add = parser.add_argument
    add("--parts", type=cli.names(tuple(PARTS)), default="all", help=f"Parts to run: {cli.one_or_more(tuple(PARTS))}.")
    add("--length", type=cli.integer(2), default=65536, help="Longest input of the certificates, in tokens.")
    add("--tables", type=cli.integer(1), default=4, help="Number of hash tables, L, of the certificates.")
    add("--bits", type=cli.integer(1), default=4, help="Number of bits of each hash table of the certificates.")
    add(
        "--rank",
        type=cli.integer(0),
        help="Rank r of the low-rank branch. Default: the rank of RACE with these tables and bits.",
    )
    add("--exponent", type=cli.number(0), default=1.0, help="Exponent c of the failure probability n^-c.")
    add("--delta", type=cli.number(0, 1), default=0.01, help="Failure probability of the edges.")
    add("--head-dim", type=cli.integer(2), default=64, help="Head dimension of the isotropic tokens.")
    add("--supports", type=cli.integer(1), default=5000, help="Number of random supports that test the proposition.")
    add("--trials", type=cli.integer(1), default=2000, help="Number of random supports for each point of the bound.")
    add("--seeds", type=cli.integer(2), default=8, help="Number of token sets for the ranks and the errors.")
    add("--max-length", type=cli.integer(32), default=512, help="Longest input of the ranks and operators, in tokens.")
    return parser


def certificate_rows(arguments: argparse.Namespace) -> Rows:
    """Computes the certificates at 64, 256, 1,024, ... and `--length` tokens."""
    tables, bits = arguments.tables, arguments.bits
    r = theory.race_rank(tables, bits) if arguments.rank is None else arguments.rank
    lengths = sorted({n for n in (64 * 4**i for i in range(12)) if n < arguments.length} | {arguments.length})
    mean = theory.isotropic_mean(bits, tables, arguments.head_dim)
    slack = max(0.0, theory.isotropic_density(bits, tables) - mean)
    rows = []
    for n in lengths:
        options: dict[str, Any] = {"r": r, "c": arguments.exponent, "delta": arguments.delta, "slack": slack}
        start = time.monotonic()
        certificate = theory.certify(n, num_tables=tables, num_bits=bits, **options)
        seconds = time.monotonic() - start
        row = {"n": n, "tables": tables, "bits": bits, "mean_density": mean, **options, **certificate._asdict()}
        # JSON has no infinity: with r >= n the bound is 0, and it has no logarithm.
        row["log_delta"] = certificate.log_delta if math.isfinite(certificate.log_delta) else None
        row |= {"seconds": seconds, "safety_edges": theory.safety_edges(n, r, arguments.exponent)}
        if n <= MAX_MEASURED:
            tokens = np.random.default_rng([arguments.seed, 5, n]).normal(size=(2, n, arguments.head_dim))
            least = float(theory.angular_similarity(*tokens).min())
            needed = theory.tables_needed(least, bits, certificate.uniform_threshold)
            row |= {"least_similarity": least, "tables_needed": needed if math.isfinite(needed) else None}
        rows.append(row)
    return rows


def proposition_rows(arguments: argparse.Namespace) -> Rows:
    """Tests the lemmas and the proposition on random supports."""
    return [matchings.check_proposition(arguments.seed, arguments.supports)]


def operator_rows(arguments: argparse.Namespace) -> Rows:
    """Compares the matrices of the library with those of the theory, in every form, at `--max-length` tokens."""
    return [spectra.operator_row(arguments.seed, arguments.max_length, form) for form in spectra.FORMS]


def rank_rows(arguments: argparse.Namespace) -> Rows:
    """Computes ranks over the length for tokens that all differ, and for a vocabulary of 64."""
    lengths = [32 << i for i in range((arguments.max_length // 32).bit_length())]
    seeds = _seeds(arguments)
    every, repeated = spectra.rank_rows(seeds, lengths), spectra.rank_rows(seeds, lengths[-1:], vocabulary=64)
    return [{"vocabulary": None, **row} for row in every] + [{"vocabulary": 64, **row} for row in repeated]


def success_rows(arguments: argparse.Namespace) -> Rows:
    """Compares the theorem's bound with frequencies, for equal edge probabilities and for those of angles."""
    sizes = ((8, 0), (8, 2), (32, 0), (32, 4), (64, 0), (64, 8))
    densities = matchings.success_of_density(arguments.seed, arguments.trials, sizes)
    hashes = matchings.success_of_hashes(arguments.seed, arguments.trials, ((10, 2), (64, 2)))
    return [{"model": "density", **row} for row in densities] + hashes


def entropy_rows(arguments: argparse.Namespace) -> Rows:
    """Measures bias and variance over temperature, for queries with and without similar keys."""
    settings = [branch_error.Setting(similarity=similarity) for similarity in SIMILARITIES]
    seeds = _seeds(arguments)
    rows: Rows = []
    for setting, temperature in itertools.product(settings, branch_error.TEMPERATURES):
        rows += branch_error.error_rows(setting, (temperature,), seeds)
        print(f"similarity {setting.similarity}, temperature {temperature}: done", flush=True)
    return rows


def _seeds(arguments: argparse.Namespace) -> range:
    return range(arguments.seed, arguments.seed + arguments.seeds)


def complexity_rows(arguments: argparse.Namespace) -> Rows:
    """Counts the interactions in the example of the paper's appendix."""
    return interactions.count_interactions(arguments.seed)


def cost_rows(arguments: argparse.Namespace) -> Rows:
    """Compares the formulas for parameters, hashing, sorting and memory with counts from the library."""
    return costs.cost_rows(arguments.seed)


class Part(NamedTuple):
    """A part of the experiment.

    Attributes:
      compute: Function from the flags to the rows of the part.
      title: Heading of the table.
      to_table: Function that formats the rows.
      draw: Function that draws a picture, and returns False without Matplotlib. None if there is no picture.
    """

    compute: Callable[[argparse.Namespace], Rows]
    title: str
    to_table: Callable[[Rows], str]
    draw: Callable[[pathlib.Path, Rows], bool] | None = None


PARTS = {
    "certificate": Part(certificate_rows, "Certificates", report.certificates),
    "proposition": Part(
        proposition_rows, "Random supports that obey the lemmas and the proposition", report.proposition
    ),
    "operators": Part(
        operator_rows, "Largest differences between the matrices of the library and of the theory", report.operators
    ),
    "ranks": Part(rank_rows, "Matching size and numerical rank", report.ranks, report.draw_ranks),
    "success": Part(success_rows, "Deficiency at most r", report.success, report.draw_success),
    "complexity": Part(complexity_rows, "Interactions of one head", report.complexity),
    "costs": Part(cost_rows, "Parameters, hashing, sorting and memory", report.costs),
    "entropy": Part(entropy_rows, "Relative squared error", report.entropy, report.draw_entropy),
}


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Computes the chosen parts, prints their tables, and writes results and pictures to the work directory."""
    workdir = arguments.workdir
    with disk_errors(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
    parts = ", ".join(arguments.parts)
    print(f"Parts: {parts}. Seed: {arguments.seed}. Results go to {workdir}.", flush=True)
    flags = {name: value for name, value in vars(arguments).items() if name not in ("workdir", "config", "traceback")}
    results: dict[str, Rows] = {}
    written = [workdir / RESULTS]
    for part in arguments.parts:
        compute, title, to_table, draw = PARTS[part]
        start = time.monotonic()
        results[part] = compute(arguments)
        print(f"\n## {title}\n\n{to_table(results[part])}\n\n({time.monotonic() - start:.0f} s)", flush=True)
        write_json(workdir / RESULTS, {"flags": flags, "versions": versions(), "parts": results})
        picture = workdir / f"{part}.png"
        if draw is not None and draw(picture, results[part]):
            written.append(picture)
    if any(PARTS[part].draw for part in arguments.parts):
        cli.print_files(written)
    else:  # No part has a picture, so none is missing.
        print(f"\nWrote {written[0]}.")
    return results
