"""Bounds on the probability that sparse plus low-rank attention lacks full rank (section 4 and appendix B).

Full rank fails if the support has deficiency above r. By Hall's theorem that means: some a rows have no edge into some
h columns, with a, h >= R and a + h >= n + R, where R = r + 1. Such pairs of sizes (a, h) are called admissible here.
With r >= n there are none, and every bound is 0. Logarithms are natural.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
from scipy.special import gammaln, logsumexp

from elsaa_jax.checks import check_int, check_number
from elsaa_jax.theory.collisions import check_unit

# Largest n that `delta_exact` enumerates: there are 4^n pairs of sets.
MAX_ENUMERATED = 10
# Terms that are smaller than the largest term of their diagonal by this exponent are left out.
NEGLIGIBLE = 50.0


def check_sizes(n: int, r: int) -> tuple[int, int]:
    """Checks a length n >= 1 and a rank r >= 0, and returns both as Python integers, which cannot overflow."""
    check_int("n", n, 1)
    check_int("r", r, 0)
    return int(n), int(r)


def log_binomials(n: int) -> np.ndarray:
    """Returns log C(n, t) for t = 0, ..., n."""
    t = np.arange(n + 1)
    return gammaln(n + 1) - gammaln(t + 1) - gammaln(n - t + 1)


def delta_exact(probability: np.ndarray, r: int) -> float:
    """Computes Delta_r, the failure bound of the theorem, by enumerating all pairs of sets.

    Delta_r is the sum of exp(-Lambda(I, U)) over all row sets I and column sets U of admissible sizes, where
    Lambda(I, U) is the sum of q over I x U. The theorem says that rank(S + BA) = n with probability at least
    1 - Delta_r. Delta_r may exceed 1; the theorem says nothing then.

    Args:
      probability: Edge probabilities q, (n, n) with n <= 10.
      r: Rank of the low-rank part BA.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> round(theory.delta_exact(np.full((4, 4), 0.9), r=0), 4)
      0.4494
    """
    probability = _check_probability(probability)
    n, r = check_sizes(len(probability), r)
    if n > MAX_ENUMERATED:
        raise ValueError(f"n is {n}; it must be at most {MAX_ENUMERATED}: use `delta_bound` for longer inputs")
    members = (np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(np.float64)
    size = members.sum(1)
    admissible = _admissible(size[:, None], size[None, :], n, r + 1)
    return float(np.exp(-(members @ probability @ members.T))[admissible].sum())


def least_masses(probability: np.ndarray) -> np.ndarray:
    """Computes a lower bound of Lambda(I, U) over all |I| = a and |U| = h, stored at [a - 1, h - 1].

    The h columns of a row hold at least its h smallest entries, and a rows hold at least the a smallest of these sums.
    The same is done with rows and columns exchanged, and the larger bound is taken. It is exact if all entries are
    equal.
    """
    probability = _check_probability(probability)

    def by_rows(q: np.ndarray) -> np.ndarray:
        return np.cumsum(np.sort(np.cumsum(np.sort(q, axis=1), axis=1), axis=0), axis=0)

    return np.maximum(by_rows(probability), by_rows(probability.T).T)


def log_delta_bound(probability: np.ndarray, r: int) -> float:
    """Computes the logarithm of `delta_bound`, which does not underflow.

    Args:
      probability: Edge probabilities q, (n, n).
      r: Rank of the low-rank part BA.

    Returns:
      log of an upper bound of Delta_r, or -inf if r >= n.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> round(theory.log_delta_bound(np.ones((800, 800)), r=0), 1)
      -792.6
    """
    masses = least_masses(probability)
    n, r = check_sizes(len(masses), r)
    if r >= n:
        return -math.inf
    log_choices = log_binomials(n)[1:]
    size = np.arange(1, n + 1)
    admissible = _admissible(size[:, None], size[None, :], n, r + 1)
    return float(logsumexp((log_choices[:, None] + log_choices[None, :] - masses)[admissible]))


def delta_bound(probability: np.ndarray, r: int) -> float:
    """Computes an upper bound of Delta_r for any n, by grouping rectangles by their sizes.

    The bound is the sum over admissible (a, h) of C(n, a) C(n, h) exp(-mass), where the mass of that size comes from
    `least_masses`. It takes time n^2 log n and memory n^2. A bound that is too small for a float is rounded up to the
    smallest positive float; `log_delta_bound` gives its logarithm.

    Args:
      probability: Edge probabilities q, (n, n).
      r: Rank of the low-rank part BA.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> q = np.full((4, 4), 0.9)
      >>> bool(np.isclose(theory.delta_bound(q, r=0), theory.delta_exact(q, r=0)))
      True
    """
    return exp_up(log_delta_bound(probability, r))


def log_delta_of_density(n: int, r: int, density: float) -> float:
    """Computes the logarithm of `delta_of_density`, which neither underflows nor overflows.

    Args:
      n: Length of the input.
      r: Rank of the low-rank part BA.
      density: Probability of every edge.

    Returns:
      log Delta_r, or -inf if r >= n.

    Example:
      >>> from elsaa_jax import theory
      >>> round(theory.log_delta_of_density(65_536, r=61, density=0.001), 1)
      -3571.8
    """
    n, r = check_sizes(n, r)
    check_number("density", density, 0.0, 1.0)
    return float(functools.reduce(np.logaddexp, diagonal_sums(n, r, float(density)), -math.inf))


def delta_of_density(n: int, r: int, density: float) -> float:
    """Computes Delta_r if every edge has the same probability.

    It is the sum over admissible (a, h) of C(n, a) C(n, h) exp(-density a h). It also bounds Delta_r if every
    admissible rectangle has at least this mean probability. A value that is too small for a float is rounded up to the
    smallest positive float; `log_delta_of_density` gives its logarithm.

    Args:
      n: Length of the input.
      r: Rank of the low-rank part BA.
      density: Probability of every edge.

    Example:
      >>> from elsaa_jax import theory
      >>> round(theory.delta_of_density(1024, r=0, density=0.02), 6)
      3e-06
    """
    return exp_up(log_delta_of_density(n, r, density))


def diagonal_sums(n: int, r: int, density: float) -> Iterator[float]:
    """Yields log D_k, the sums along the diagonals a + h = n + R + k for k = 0, 1, ..., until the rest vanishes.

    The terms T(a, h) = C(n, a) C(n, h) exp(-density a h) obey

        (a + h) T(a, h) = (n - a + 1) exp(-density h) T(a - 1, h) + (n - h + 1) exp(-density a) T(a, h - 1).

    A cell (a, h) of diagonal k therefore enters D_{k+1} with the weight
    ((n - a) exp(-density h) + (n - h) exp(-density a)) / (n + R + k + 1). With i = n - h and j = n - a, whose sum is
    n - R - k, the numerator is exp(-density (R + k)) (i exp(-density i) + j exp(-density j)), and the last bracket is
    at most min(n - R - k, 2 / (e density)). So D_{k+1} <= g_k D_k with a factor g_k < 1 that falls with k, and all
    diagonals after k sum to at most D_k g_k / (1 - g_k). The loop ends when that is below the rounding error of the
    total.

    Args:
      n: Length of the input.
      r: Rank of the low-rank part.
      density: Probability of every edge.
    """
    least = r + 1
    log_choices, sizes = log_binomials(n), np.arange(n + 1, dtype=np.float64)
    total = -math.inf
    for k in range(n - r):
        span = n + least + k
        first = (span + 1) // 2  # The half with a >= h is enough: the terms are symmetric.
        a, h = slice(first, n + 1), slice(span - n, span - first + 1)
        terms = log_choices[a] + log_choices[h][::-1] - density * (sizes[a] * sizes[h][::-1])
        top = float(terms.max())
        weights = 2 * np.exp(terms[terms > top - NEGLIGIBLE] - top).sum()
        if span % 2 == 0:  # The term a = h exists once.
            weights -= math.exp(terms[0] - top)
        diagonal = top + math.log(weights)
        yield diagonal
        total = float(np.logaddexp(total, diagonal))
        bracket = n - least - k if density == 0 else min(n - least - k, 2 / (math.e * density))
        factor = math.exp(-density * (least + k)) * bracket / (span + 1)
        if factor == 0 or diagonal + math.log(factor / (1 - factor)) < total - 40:
            return


def exp_up(x: float) -> float:
    """Computes exp(x) as an upper bound: inf if it is too large for a float, never 0 for a finite x."""
    if x == -math.inf:
        return 0.0
    with np.errstate(over="ignore", under="ignore"):
        return max(float(np.exp(x)), math.ulp(0.0))


def _admissible(a: np.ndarray, h: np.ndarray, n: int, least: int) -> np.ndarray:
    return (a >= least) & (h >= least) & (a + h >= n + least)


def _check_probability(probability: np.ndarray) -> np.ndarray:
    probability = check_unit("probability", probability)
    if probability.ndim != 2 or probability.shape[0] != probability.shape[1]:
        raise ValueError(f"probability has shape {probability.shape}; it must be a square matrix")
    return probability
