"""The paper's rank theory, computed and tested: certificates, ranks, bounds, counts, and error over entropy.

Claims: RACE alone has rank L (2^P - 1) + 1 at most, however long the input; the sparse branch that is paired by
rank has a perfect matching by construction, so that it is of full rank without any luck; the theorem's bound holds for
independent edges, and not for those of a real hash.

Command: python -m experiments.rank

With --length, --tables, --bits and --rank it answers: is sparse plus low-rank attention of full rank, and how sure is
that? docs/theory.md explains, docs/results/rank.md has the results.
"""

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
from experiments.engine import cli, pictures
from experiments.engine.errors import disk_errors
from experiments.engine.results import Rows
from experiments.engine.workdir import RESULTS, versions, write_json
from experiments.rank import branch_error, interactions, matchings, report, spectra

# Up to this length the least angular similarity of random tokens is measured, over all pairs.
MAX_MEASURED = 4096
# Of a query and its key, in the errors over entropy: strangers, likeness, and what a trained retrieval comes to.
SIMILARITIES = (0.0, 0.8, 0.98)


def make_parser() -> cli.PlainParser:
    """The command line."""
    parser = cli.PlainParser("The paper's rank theory: certificates, and experiments that test them.")
    parser.set_defaults(workdir=pathlib.Path("runs/rank"))
    add = parser.add_argument
    add("--parts", type=cli.names(tuple(PARTS)), default="all", help=f"all, or some of {','.join(PARTS)}")
    add("--length", type=cli.integer(2), default=65536, help="longest of the certificate")
    add("--tables", type=cli.integer(1), default=4, help="L, independent hashes of the certificate")
    add("--bits", type=cli.integer(1), default=4, help="bits of each hash of the certificate")
    add("--rank", type=cli.integer(0), help="r of the low-rank branch; default: RACE's, with these tables and bits")
    add("--exponent", type=cli.number(0), default=1.0, help="c of the failure n^-c")
    add("--delta", type=cli.number(0, 1), default=0.01, help="of the certificate")
    add("--head-dim", type=cli.integer(2), default=64, help="of the certificate's isotropic tokens")
    add("--supports", type=cli.integer(1), default=5000, help="random supports of the proposition")
    add("--trials", type=cli.integer(1), default=2000, help="supports of each point of the bound")
    add("--seeds", type=cli.integer(2), default=8, help="sets of tokens of the ranks and of the errors")
    add("--max-length", type=cli.integer(32), default=512, help="longest of the ranks and of the operators")
    return parser


def certificate_rows(arguments: argparse.Namespace) -> Rows:
    """The certificates at 64, 256, 1,024, ... and `--length`, where they make sense: r < n."""
    tables, bits = arguments.tables, arguments.bits
    r = theory.race_rank(tables, bits) if arguments.rank is None else arguments.rank
    if r >= arguments.length:
        raise ValueError(f"--rank is {r}; it must be less than --length, which is {arguments.length}")
    lengths = sorted({n for n in (64 * 4**i for i in range(12)) if r < n < arguments.length} | {arguments.length})
    mean = theory.isotropic_mean(bits, tables, arguments.head_dim)
    slack = max(0.0, theory.isotropic_density(bits, tables) - mean)
    rows = []
    for n in lengths:
        options: dict[str, Any] = {"r": r, "c": arguments.exponent, "delta": arguments.delta, "slack": slack}
        start = time.monotonic()
        certificate = theory.certify(n, num_tables=tables, num_bits=bits, **options)
        seconds = time.monotonic() - start
        row = {"n": n, "tables": tables, "bits": bits, "mean_density": mean, **options, **certificate._asdict()}
        row |= {"seconds": seconds, "safety_edges": theory.safety_edges(n, r, arguments.exponent)}
        if n <= MAX_MEASURED:
            tokens = np.random.default_rng([arguments.seed, 5, n]).normal(size=(2, n, arguments.head_dim))
            least = float(theory.angular_similarity(*tokens).min())
            needed = theory.tables_needed(least, bits, certificate.uniform_threshold)
            row |= {"least_similarity": least, "tables_needed": needed if math.isfinite(needed) else None}
        rows.append(row)
    return rows


def proposition_rows(arguments: argparse.Namespace) -> Rows:
    """The lemmas and the proposition on random supports."""
    return [matchings.check_proposition(arguments.seed, arguments.supports)]


def operator_rows(arguments: argparse.Namespace) -> Rows:
    """The library's matrices against the theory's, in every form, at `--max-length`."""
    return [spectra.operator_row(arguments.seed, arguments.max_length, form) for form in spectra.FORMS]


def rank_rows(arguments: argparse.Namespace) -> Rows:
    """Ranks over the length, of tokens that are all different, and of a vocabulary of 64."""
    lengths = [32 << i for i in range((arguments.max_length // 32).bit_length())]
    seeds = _seeds(arguments)
    every, repeated = spectra.rank_rows(seeds, lengths), spectra.rank_rows(seeds, lengths[-1:], vocabulary=64)
    return [{"vocabulary": None, **row} for row in every] + [{"vocabulary": 64, **row} for row in repeated]


def success_rows(arguments: argparse.Namespace) -> Rows:
    """The theorem's bound against frequencies, of one density and of angles."""
    sizes = ((8, 0), (8, 2), (32, 0), (32, 4), (64, 0), (64, 8))
    densities = matchings.success_of_density(arguments.seed, arguments.trials, sizes)
    hashes = matchings.success_of_hashes(arguments.seed, arguments.trials, ((10, 2), (64, 2)))
    return [{"model": "density", **row} for row in densities] + hashes


def entropy_rows(arguments: argparse.Namespace) -> Rows:
    """Bias and variance over temperature, for queries without and with keys that are like them."""
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
    """The example of the paper's appendix."""
    return interactions.count_interactions(arguments.seed)


class Part(NamedTuple):
    """What a part computes, its title, its table, and its picture where it has one."""

    compute: Callable[[argparse.Namespace], Rows]
    title: str
    to_table: Callable[[Rows], str]
    draw: Callable[[pathlib.Path, Rows], bool] | None = None


PARTS = {
    "certificate": Part(certificate_rows, "Certificates", report.certificates),
    "proposition": Part(proposition_rows, "Supports that obey the lemmas and the proposition", report.proposition),
    "operators": Part(operator_rows, "Largest differences of the library's and the theory's", report.operators),
    "ranks": Part(rank_rows, "Matching size and numerical rank", report.ranks, report.draw_ranks),
    "success": Part(success_rows, "Deficiency at most r", report.success, report.draw_success),
    "complexity": Part(complexity_rows, "Interactions of one head", report.complexity),
    "entropy": Part(entropy_rows, "Relative squared error", report.entropy, report.draw_entropy),
}


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Computes the parts, prints their tables, and writes results and pictures."""
    workdir = arguments.workdir
    with disk_errors(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
    print(f"the rank theory: {', '.join(arguments.parts)}; seed {arguments.seed}; all goes to {workdir}", flush=True)
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
        if draw is None:
            continue
        if draw(picture, results[part]):
            written.append(picture)
        else:
            print(pictures.NOT_DRAWN)
    print(f"\n{', '.join(map(str, written))}")
    return results
