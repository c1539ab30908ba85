"""Matchings of random supports: tests of the proposition, and the theorem's bound compared with frequencies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from elsaa_jax import reference, theory
from experiments.engine.stats import wilson_interval

# Standard errors by which a frequency must lie below the bound for the bound to count as violated.
VIOLATION_Z = 4.0
EdgeModel = Literal["independent", "hashed"]


def random_support(rng: np.random.Generator, n: int) -> tuple[np.ndarray, int]:
    """Draws a support (n, n) of random density with a planted deficiency.

    One of four cases is drawn: nothing planted, empty rows, empty columns, or a Hall violator, which is a set of a rows
    with a - d neighbours in all.

    Returns:
      The support, and the planted deficiency d, which its own deficiency reaches or exceeds.
    """
    support = rng.random((n, n)) < rng.choice([1.0, 2.0, 4.0, 8.0, 16.0]) / n
    size = int(rng.integers(1, n + 1))
    chosen = rng.permutation(n)[:size]
    match rng.integers(4):
        case 1:
            support[chosen] = False
            return support, size
        case 2:
            support[:, chosen] = False
            return support, size
        case 3:
            planted = int(rng.integers(1, size + 1))
            neighbors = np.zeros(n, bool)
            neighbors[rng.permutation(n)[: size - planted]] = True
            support[chosen] = neighbors & (rng.random((size, n)) < 0.8)
            return support, planted
    return support, 0


def check_proposition(seed: int, supports: int, max_length: int = 24) -> dict[str, Any]:
    """Counts how many random supports obey the structural rank lemma, the completion lemma and the proposition."""
    rng = np.random.default_rng([seed, 1])
    counts = {"supports": supports, "deficient": 0, "structural": 0, "completion": 0, "proposition": 0}
    for _ in range(supports):
        n = int(rng.integers(1, max_length + 1))
        support, _ = random_support(rng, n)
        r = int(rng.integers(0, n + 1))
        matching = theory.matching_size(support)
        counts["deficient"] += matching < n
        counts["structural"] += theory.numerical_rank(theory.generic_matrix(rng, support, 0)) == matching
        counts["proposition"] += theory.numerical_rank(theory.generic_matrix(rng, support, r)) == theory.generic_rank(
            support, r
        )
        # The completion lemma is about any S of rank k: here a product of dense factors.
        k, nothing = int(rng.integers(0, n + 1)), np.zeros((n, n), bool)
        completed = theory.generic_matrix(rng, nothing, k) + theory.generic_matrix(rng, nothing, r)
        counts["completion"] += theory.numerical_rank(completed) == min(n, k + r)
    return counts


def sample_support(
    rng: np.random.Generator, model: EdgeModel, query: np.ndarray, key: np.ndarray, num_bits: int, num_tables: int
) -> np.ndarray:
    """Draws the pairs of a query and a key that collide in at least one of L tables.

    Args:
      rng: Source of the edges or planes.
      model: "independent" draws each pair independently with its own probability, as in the paper. "hashed" draws
        planes that all pairs share, as a real hash does: the probabilities are the same, but pairs are not independent.
      query: Queries, (n, H).
      key: Keys, (n, H).
      num_bits: Bits of each table.
      num_tables: Number of tables, L.
    """
    similarity = theory.angular_similarity(query, key)
    if model == "independent":
        return theory.independent_support(rng, theory.edge_probability(similarity, num_bits, num_tables))
    support = np.zeros(similarity.shape, bool)
    for planes in rng.normal(size=(num_tables, num_bits, query.shape[1])):
        support |= reference.hard_codes(query, planes)[:, None] == reference.hard_codes(key, planes)[None, :]
    return support


def success_row(sample: Callable[[], np.ndarray], trials: int, r: int, failure_bound: float) -> dict[str, Any]:
    """Measures how often a sample has deficiency at most r, with a 95 % interval, and compares it with 1 - Delta."""
    successes = sum(theory.deficiency(sample()) <= r for _ in range(trials))
    low, high = wilson_interval(successes, trials)
    bound = max(0.0, 1.0 - failure_bound)
    return {
        "r": r,
        "trials": trials,
        "success": successes / trials,
        "low": low,
        "high": high,
        "bound": bound,
        "violated": wilson_interval(successes, trials, VIOLATION_Z)[1] < bound,
    }


def success_of_density(seed: int, trials: int, sizes: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
    """Tests the bound for edges of one probability, from 0.5 to 1.5 times the density at which Delta falls to 1."""
    rows = []
    for n, r in sizes:
        first = theory.smallest_density(n, r, 1.0)
        for factor in (0.5, 0.75, 1.0, 1.25, 1.5):
            density = min(1.0, factor * first)
            rng = np.random.default_rng([seed, 2, n, r, round(100 * factor)])
            sample = functools.partial(theory.independent_support, rng, np.full((n, n), density))
            row = success_row(sample, trials, r, theory.delta_of_density(n, r, density))
            rows.append({"n": n, "density": density, "paper_density": theory.density_threshold(n, r), **row})
    return rows


def success_of_hashes(
    seed: int, trials: int, sizes: tuple[tuple[int, int], ...], head_dim: int = 16
) -> list[dict[str, Any]]:
    """Tests the bound for edges from the angles of random tokens, in the paper's model and with a real hash.

    Args:
      seed: Random seed of all draws.
      trials: Number of supports for each row.
      sizes: Pairs of length and bits. Delta is enumerated for short lengths and bounded otherwise.
      head_dim: Head dimension of queries and keys.
    """
    rows = []
    for n, num_bits in sizes:
        query, key = np.random.default_rng([seed, 3, n]).normal(size=(2, n, head_dim))
        similarity = theory.angular_similarity(query, key)
        delta_of = theory.delta_exact if n <= theory.MAX_ENUMERATED else theory.delta_bound
        for num_tables, r, model in itertools.product((1, 2, 4), (0, 2), get_args(EdgeModel)):
            delta = delta_of(theory.edge_probability(similarity, num_bits, num_tables), r)
            rng = np.random.default_rng([seed, 4, n, num_tables, r, model == "hashed"])
            sample = functools.partial(sample_support, rng, model, query, key, num_bits, num_tables)
            row = success_row(sample, trials, r, delta)
            rows.append({"model": model, "n": n, "num_bits": num_bits, "num_tables": num_tables, **row})
    return rows
