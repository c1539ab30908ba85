"""Sparse supports: boolean matrices that tell which query attends to which key.

A support is a boolean matrix (queries, keys), either a NumPy array or a SciPy sparse matrix. Use a sparse one for long
inputs: a dense support of 65,536 tokens takes 4 GiB.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, overload

import numpy as np
from scipy.sparse import csr_array, issparse

from elsaa_jax import reference
from elsaa_jax.checks import check_number
from elsaa_jax.theory.collisions import check_unit
from elsaa_jax.theory.sorted_supports import sorted_support

# A boolean NumPy array or any SciPy sparse matrix of dtype bool; SciPy has no type stubs.
Support: TypeAlias = Any


def independent_support(rng: np.random.Generator, probability: np.ndarray) -> np.ndarray:
    """Draws a support of independent edges, Omega_ij ~ Bernoulli(q_ij), the paper's model of the sparse branch.

    Args:
      rng: Source of the edges.
      probability: Edge probabilities q, (..., n, n). Leading axes give as many supports.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> theory.independent_support(np.random.default_rng(0), np.full((2, 3), 1.0)).sum()
      np.int64(6)
    """
    probability = check_unit("probability", probability)
    return rng.random(probability.shape) < probability


def with_safety(rng: np.random.Generator, support: Support, density: float) -> Support:
    """Adds a safety sparsifier to a support: each pair is added with probability min(1, density), independently.

    With the density p_{r,c} of `density_threshold`, the union has deficiency at most r with probability at least
    1 - n^-c, whatever the support was.

    Args:
      rng: Source of the added edges.
      support: Boolean matrix, dense or SciPy sparse.
      density: Probability of each added edge.

    Returns:
      The union, dense if the support is dense and a CSR array otherwise.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> union = theory.with_safety(np.random.default_rng(0), np.eye(100, dtype=bool), density=0.5)
      >>> bool(union.diagonal().all()), bool(0.4 < union.mean() < 0.6)
      (True, True)
    """
    check_number("density", density, 0.0)
    density = min(1.0, float(density))
    if not issparse(support):
        return to_dense(support) | independent_support(rng, np.full(np.shape(support), density))
    support = check_support(support)
    return (support + _sparse_bernoulli(rng, support.shape, density)).astype(bool)


@overload
def sort_lsh_support(
    query: np.ndarray, key: np.ndarray, planes: np.ndarray, *, sparse: Literal[True], **options: Any
) -> csr_array: ...


@overload
def sort_lsh_support(
    query: np.ndarray, key: np.ndarray, planes: np.ndarray, *, sparse: Literal[False] = False, **options: Any
) -> np.ndarray: ...


def sort_lsh_support(
    query: np.ndarray, key: np.ndarray, planes: np.ndarray, *, sparse: bool = False, **options: Any
) -> Support:
    """Computes the support of the sparse branch for one head.

    Args:
      query: Queries, (T, H).
      key: Keys, (S, H).
      planes: Hash planes, (P, H).
      sparse: Whether to return a SciPy CSR array, built by sorted search in time O(edges + n log n log(n / N0)). False
        returns a dense array by the definition in `elsaa_jax.reference`, in quadratic time.
      **options: `block_size`, `min_length`, `num_neighbors`, `pairing` and `is_causal` of `sort_lsh_attention`.

    Returns:
      The support, (T, S) bool.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> query, key = np.random.default_rng(0).normal(size=(2, 4096, 8))
      >>> support = theory.sort_lsh_support(query, key, np.eye(8)[:5], sparse=True, block_size=64)
      >>> support.shape, support.nnz  # Every query reads one block of 64 keys.
      ((4096, 4096), 262144)
    """
    if sparse:
        return sorted_support(query, key, planes, **options)
    query, key = (np.asarray(x)[None, :, None, :] for x in (query, key))
    return reference.sort_lsh_support(query, key, np.asarray(planes), **options)[0, 0]


def check_support(support: Support) -> csr_array:
    """Returns a support as a CSR array without stored zeros; raises ValueError unless it is a boolean matrix."""
    if not issparse(support):
        support = np.asarray(support)
    if support.ndim != 2 or support.dtype != np.bool_:
        raise ValueError(f"support has shape {support.shape} and dtype {support.dtype}; it must be a boolean matrix")
    found = csr_array(support)
    if not found.data.all():  # A stored False is no edge.
        found = found.copy()
        found.eliminate_zeros()
    return found


def to_dense(support: Support) -> np.ndarray:
    """Returns a support as a dense boolean array; raises ValueError unless it is a boolean matrix."""
    if issparse(support):
        return check_support(support).toarray()
    support = np.asarray(support)
    if support.ndim != 2 or support.dtype != np.bool_:
        raise ValueError(f"support has shape {support.shape} and dtype {support.dtype}; it must be a boolean matrix")
    return support


def _sparse_bernoulli(rng: np.random.Generator, shape: tuple[int, int], density: float) -> csr_array:
    """Draws independent edges of one probability in time and memory proportional to their number.

    The gaps between the edges of a row-by-row scan are independent and geometric.
    """
    rows, columns = shape
    cells, last, found = rows * columns, -1, []
    while density > 0 and last < cells:
        number = int(1.1 * density * (cells - last)) + 100
        gaps = rng.geometric(density, min(number, 1 << 22))
        places = last + np.cumsum(np.minimum(gaps, cells + 1))  # A sum of larger gaps would overflow.
        found.append(places)
        last = int(places[-1])
    places = np.concatenate([np.zeros(0, np.int64), *found])
    places = places[places < cells]
    edges = np.ones(len(places), bool), (places // max(columns, 1), places % max(columns, 1))
    return csr_array(edges, shape=shape)
