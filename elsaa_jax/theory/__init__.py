"""The paper's rank theory as a tool that tells whether sparse plus low-rank attention is of full rank, and how sure.

    from elsaa_jax import theory

    theory.certify(65_536, num_tables=4, num_bits=4, r=61)  # the isotropic certificate: thresholds, yes or no
    support = theory.sort_lsh_support(query, key, planes, block_size=64)
    theory.generic_rank(support, r=61)  # min(n, nu + r)

Everything is NumPy and SciPy in float64, for one head. The parts: `collisions` (how likely two tokens share a code),
`supports` (graphs and matchings), `rank_bounds` (the theorem and its corollaries), `operators` (attention as a matrix).
docs/theory.md says for each statement of the paper where it is, and what of it holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from elsaa_jax.checks import check_int, check_number
from elsaa_jax.theory.collisions import (
    angular_similarity,
    collision_probability,
    edge_probability,
    isotropic_density,
    isotropic_mean,
)
from elsaa_jax.theory.operators import Operator, fused_operator, race_operator, race_rank, softmax_operator
from elsaa_jax.theory.rank_bounds import (
    MAX_ENUMERATED,
    delta_bound,
    delta_exact,
    delta_of_density,
    density_threshold,
    isotropic_threshold,
    safety_edges,
    smallest_density,
    tables_needed,
)
from elsaa_jax.theory.supports import deficiency, independent_support, matching_size, sort_lsh_support, with_safety

__all__ = [
    "MAX_ENUMERATED",
    "Certificate",
    "Operator",
    "angular_similarity",
    "certify",
    "collision_probability",
    "deficiency",
    "delta_bound",
    "delta_exact",
    "delta_of_density",
    "density_threshold",
    "edge_probability",
    "fused_operator",
    "generic_matrix",
    "generic_rank",
    "independent_support",
    "isotropic_density",
    "isotropic_mean",
    "isotropic_threshold",
    "matching_size",
    "numerical_rank",
    "race_operator",
    "race_rank",
    "safety_edges",
    "smallest_density",
    "softmax_operator",
    "sort_lsh_support",
    "tables_needed",
    "with_safety",
]


def generic_rank(support: np.ndarray, r: int) -> int:
    """rank(S + BA) = min(n, nu(Omega) + r), almost surely: the paper's proposition of matching plus low rank.

    S is any matrix on the support in general position, B (n, r) and A (r, n) have a density. The structural rank lemma
    is its case r = 0.
    """
    check_int("r", r, 0)
    return min(*support.shape, matching_size(support) + r)


def generic_matrix(rng: np.random.Generator, support: np.ndarray, r: int) -> np.ndarray:
    """S + BA with normal entries: S on the support, B (n, r) and A (r, n) full."""
    check_int("r", r, 0)
    rows, columns = support.shape
    sparse = np.where(support, rng.normal(size=support.shape), 0.0)
    return sparse + rng.normal(size=(rows, r)) @ rng.normal(size=(r, columns))


def numerical_rank(matrix: np.ndarray, relative_tolerance: float | None = None) -> int:
    """How many singular values of a matrix (m, n) exceed `relative_tolerance` times the largest.

    Args:
      matrix: (m, n).
      relative_tolerance: None: max(m, n) * 2^-52, the rounding error of the float64 singular values themselves.
    """
    matrix = np.asarray(matrix, np.float64)
    if relative_tolerance is None:
        relative_tolerance = max(matrix.shape) * np.finfo(np.float64).eps
    check_number("relative_tolerance", relative_tolerance, 0.0)
    values = np.linalg.svd(matrix, compute_uv=False)
    return int(np.count_nonzero(values > relative_tolerance * values[0]))


class Certificate(NamedTuple):
    """What the isotropic certificate says of a configuration.

    Attributes:
      density: the mean probability of an edge, q_iso less the slack.
      threshold: Theta_{r,c,delta}; full rank is certified where the density reaches it.
      certified: whether it does.
      confidence: 1 - delta - n^-c where certified, else 0.
      edges_per_query: n * density, what the support costs.
      uniform_threshold: p_{r,c}, which would do if every admissible rectangle had that mean.
    """

    density: float
    threshold: float
    certified: bool
    confidence: float
    edges_per_query: float
    uniform_threshold: float


def certify(
    n: int, *, num_tables: int, num_bits: float, r: int, c: float = 1.0, delta: float = 0.01, slack: float = 0.0
) -> Certificate:
    """Is S + BA of full rank, and how sure is that? The corollary "Isotropic mean Hoeffding certificate".

    It is about the paper's model: independent edges whose probabilities are themselves independent with a mean of
    q_iso - slack or more. A real layer's support has no need of it where it has a perfect matching, which
    `generic_rank` tells.

    Args:
      n: the length.
      num_tables: L, independent hashes, of which one collision is enough.
      num_bits: gamma, bits of each.
      r: the rank of the low-rank branch; `race_rank` is that of RACE.
      c: exponent of the failure n^-c of the support.
      delta: failure of the probabilities.
      slack: eps_iso, by how much q_iso may be too large (`isotropic_mean` tells for a head dimension).
    """
    check_number("slack", slack, 0.0, 1.0)
    density = max(0.0, isotropic_density(num_bits, num_tables) - slack)
    threshold = isotropic_threshold(n, r, c, delta)
    certified = density >= threshold
    confidence = max(0.0, 1.0 - delta - n**-c) if certified else 0.0
    return Certificate(density, threshold, certified, confidence, n * density, density_threshold(n, r, c))
