"""Ranks of sparse plus low-rank matrices: predicted from the support, and counted from singular values."""

from __future__ import annotations

import numpy as np

from elsaa_jax.checks import check_int, check_number
from elsaa_jax.theory.matchings import matching_size
from elsaa_jax.theory.supports import Support, check_support, to_dense


def generic_rank(support: Support, r: int, *, normalized_sum: bool = False) -> int:
    """Predicts the rank of S + BA as min(n, nu + r), the paper's proposition of matching plus low rank.

    nu is the size of a maximum matching of the support. The prediction holds almost surely if the entries of S are in
    general position on the support, and B (n, r) and A (r, n) have a joint density and are independent of S. With r = 0
    it is the lemma on structural rank.

    Fusion with `kind="sum"` and constant gates is an exception. If every row has a key, the vector of ones lies in the
    column spaces of both branches, because the rows of each sum to a constant. The two spaces then share a direction,
    and the rank is min(n, nu + r - 1).

    Args:
      support: Boolean matrix, dense or SciPy sparse.
      r: Rank of the low-rank part.
      normalized_sum: Whether the matrix is such a sum of two branches with constant weights.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> support = np.zeros((5, 5), bool)
      >>> support[:, 0] = True
      >>> theory.generic_rank(support, r=2), theory.generic_rank(support, r=2, normalized_sum=True)
      (3, 2)
    """
    check_int("r", r, 0)
    support = check_support(support)
    rank = matching_size(support) + int(r)
    if normalized_sum and r > 0 and np.all(support.sum(axis=1) > 0):
        rank -= 1
    return min(*support.shape, rank)


def generic_matrix(rng: np.random.Generator, support: Support, r: int) -> np.ndarray:
    """Draws S + BA with normal entries: S on the support, and full factors B (n, r) and A (r, n).

    Args:
      rng: Source of all entries.
      support: Boolean matrix, dense or SciPy sparse.
      r: Rank of the low-rank part.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> support = np.eye(4, dtype=bool)
      >>> support[2:] = False
      >>> theory.numerical_rank(theory.generic_matrix(np.random.default_rng(0), support, r=1))
      3
    """
    check_int("r", r, 0)
    support = to_dense(support)
    rows, columns = support.shape
    sparse = np.where(support, rng.normal(size=support.shape), 0.0)
    return sparse + rng.normal(size=(rows, r)) @ rng.normal(size=(r, columns))


def numerical_rank(matrix: np.ndarray, relative_tolerance: float | None = None) -> int:
    """Counts the singular values of a matrix that exceed `relative_tolerance` times the largest one.

    Args:
      matrix: Matrix of any shape (m, n). An empty one has rank 0.
      relative_tolerance: Threshold relative to the largest singular value. None means max(m, n) * 2^-52, the rounding
        error of the float64 singular values themselves.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> theory.numerical_rank(np.ones((3, 5)))
      1
    """
    matrix = np.asarray(matrix, np.float64)
    if relative_tolerance is None:
        relative_tolerance = max(matrix.shape) * float(np.finfo(np.float64).eps)
    check_number("relative_tolerance", relative_tolerance, 0.0)
    if matrix.size == 0:
        return 0
    values = np.linalg.svd(matrix, compute_uv=False)
    return int(np.count_nonzero(values > relative_tolerance * values[0]))
