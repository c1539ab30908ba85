"""Sparse supports as bipartite graphs: who attends to whom, and how many rows and columns can be matched."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csgraph, csr_array

from elsaa_jax import reference
from elsaa_jax.checks import check_number
from elsaa_jax.theory.collisions import check_unit


def independent_support(rng: np.random.Generator, probability: np.ndarray) -> np.ndarray:
    """Omega_ij ~ Bernoulli(q_ij), all independent: the paper's model of the sparse branch.

    Args:
      rng: where the edges come from.
      probability: (..., n, n), q; further axes in front give as many supports.
    """
    probability = check_unit("probability", probability)
    return rng.random(probability.shape) < probability


def with_safety(rng: np.random.Generator, support: np.ndarray, density: float) -> np.ndarray:
    """Omega_LSH union Omega_safe, where each pair is in Omega_safe with probability min(1, density), independently.

    With `density` = p_{r,c} (`rank_bounds.density_threshold`) the union has deficiency at most r with probability
    1 - n^-c, whatever the hash has found.
    """
    check_number("density", density, 0.0)
    support = _boolean(support)
    return support | independent_support(rng, np.full(support.shape, min(1.0, density)))


def sort_lsh_support(query: np.ndarray, key: np.ndarray, planes: np.ndarray, **options: Any) -> np.ndarray:
    """The support of the sparse branch for one head, (T, S) bool, as the definition in `reference` gives it.

    Args:
      query: (T, H).
      key: (S, H).
      planes: (P, H).
      **options: `block_size`, `min_length`, `num_neighbors`, `pairing` and `is_causal` of `sort_lsh_attention`.
    """
    query, key = (np.asarray(x)[None, :, None, :] for x in (query, key))
    return reference.sort_lsh_support(query, key, planes, **options)[0, 0]


def matching_size(support: np.ndarray) -> int:
    """nu(Omega), the size of a maximum matching of rows and columns, by Hopcroft and Karp's algorithm."""
    matched = csgraph.maximum_bipartite_matching(csr_array(_boolean(support)), perm_type="column")
    return int(np.count_nonzero(matched >= 0))


def deficiency(support: np.ndarray) -> int:
    """d(Omega) = n - nu(Omega), how many of the n rows a maximum matching leaves out."""
    return len(support) - matching_size(support)


def _boolean(support: np.ndarray) -> np.ndarray:
    support = np.asarray(support)
    if support.ndim != 2 or support.dtype != np.bool_:
        raise ValueError(f"support has shape {support.shape} and dtype {support.dtype}; it must be a boolean matrix")
    return support
