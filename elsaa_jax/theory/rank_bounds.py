"""Bounds on the probability that sparse plus low rank is not of full rank (section 4, appendices B and C).

Full rank fails where the support has deficiency above r, that is, where some a rows have no edge into some h columns
with a, h >= R and a + h >= n + R for R = r + 1 (Hall). Such pairs (a, h) are called admissible here. Logarithms are
natural, and binomial coefficients are computed as logarithms, by gammaln.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, logsumexp

from elsaa_jax.checks import check_int, check_number
from elsaa_jax.theory.collisions import check_unit

# Largest n of `delta_exact`: 4^n pairs of sets.
MAX_ENUMERATED = 10
# Up to this n `isotropic_threshold` looks at every admissible pair.
MAX_EVERY_PAIR = 4096


def log_binomials(n: int) -> np.ndarray:
    """log C(n, t) for t = 0, ..., n."""
    t = np.arange(n + 1)
    return gammaln(n + 1) - gammaln(t + 1) - gammaln(n - t + 1)


def delta_exact(probability: np.ndarray, r: int) -> float:
    """Delta_r = sum over I, U with |I|, |U| >= R, |I| + |U| >= n + R of exp(-Lambda(I, U)), by enumeration.

    The theorem: rank(S + BA) = n with probability at least 1 - Delta_r. Delta_r may exceed 1, and says nothing then.

    Args:
      probability: (n, n), q, with n <= 10.
      r: the rank of BA, from 0 to n - 1.
    """
    probability = _check_probability(probability)
    n = len(probability)
    _check_sizes(n, r)
    if n > MAX_ENUMERATED:
        raise ValueError(f"n is {n}; it must be at most {MAX_ENUMERATED}: `delta_bound` serves beyond")
    members = (np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(np.float64)
    size = members.sum(1)
    admissible = _admissible(size[:, None], size[None, :], n, r + 1)
    return float(np.exp(-(members @ probability @ members.T))[admissible].sum())


def least_masses(probability: np.ndarray) -> np.ndarray:
    """Lower bounds of Lambda(I, U) over all |I| = a, |U| = h, at [a - 1, h - 1].

    The h columns of a row hold at least its h smallest entries, and a rows at least the a smallest of these sums; the
    same with rows and columns exchanged; the larger of the two is taken. It is exact where all entries are equal.
    """
    probability = _check_probability(probability)

    def by_rows(q: np.ndarray) -> np.ndarray:
        return np.cumsum(np.sort(np.cumsum(np.sort(q, axis=1), axis=1), axis=0), axis=0)

    return np.maximum(by_rows(probability), by_rows(probability.T).T)


def delta_bound(probability: np.ndarray, r: int) -> float:
    """An upper bound of Delta_r for any n, by rectangles grouped by size.

    sum over admissible (a, h) of C(n, a) C(n, h) exp(-mass), with the mass of that size from `least_masses`; in time
    n^2 log n and memory n^2.
    """
    masses = least_masses(probability)
    n = len(masses)
    _check_sizes(n, r)
    log_choices = log_binomials(n)[1:]
    size = np.arange(1, n + 1)
    admissible = _admissible(size[:, None], size[None, :], n, r + 1)
    return _exp(logsumexp((log_choices[:, None] + log_choices[None, :] - masses)[admissible]))


def delta_of_density(n: int, r: int, density: float) -> float:
    """Delta_r where every q_ij is `density`, or a bound of it where every admissible rectangle has that mean or more.

    sum over admissible (a, h) of C(n, a) C(n, h) exp(-density a h), in time n^2 and memory n.
    """
    _check_sizes(n, r)
    check_number("density", density, 0.0, 1.0)
    log_choices, sizes = log_binomials(n), np.arange(n + 1)
    rows = []
    for a in range(r + 1, n + 1):
        h = slice(n + r + 1 - a, None)
        terms = log_choices[a] + log_choices[h] - density * a * sizes[h]
        top = terms.max()
        rows.append(top + np.log(np.exp(terms - top).sum()))
    return _exp(logsumexp(rows))


def density_threshold(n: int, r: int, c: float = 1.0) -> float:
    """p_{r,c} = (8 log(e n / R) + (c + 2) log(n) / R) / n: with this density full rank fails with probability <= n^-c.

    For small n it exceeds 1, and no density is enough for the corollary.
    """
    _check_sizes(n, r)
    check_number("c", c, 0.0, open_low=True)
    return (8 * math.log(math.e * n / (r + 1)) + (c + 2) * math.log(n) / (r + 1)) / n


def smallest_density(n: int, r: int, failure: float) -> float:
    """The smallest density whose `delta_of_density` is at most `failure`, to 0.01 %; inf where 1 is not enough.

    What p_{r,c} bounds from above: the theorem's own threshold, without the detour through the binomial lemma.
    """
    check_number("failure", failure, 0.0, open_low=True)
    if delta_of_density(n, r, 1.0) > failure:
        return math.inf
    low, high = 0.0, 1.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of_density(n, r, middle) <= failure else (middle, high)
    return high


def tables_needed(least_similarity: float, num_bits: float, density: float) -> float:
    """The least integer L >= -log(1 - p) / rho_min^gamma: enough tables in the worst case; inf where none are.

    Args:
      least_similarity: rho_min, the least of the angular similarities.
      num_bits: gamma.
      density: p, as from `density_threshold`.
    """
    check_number("least_similarity", least_similarity, 0.0, 1.0)
    check_number("num_bits", num_bits, 0.0, open_low=True)
    check_number("density", density, 0.0)
    if density >= 1 or least_similarity == 0:
        return math.inf
    return max(1.0, float(math.ceil(-math.log1p(-density) / least_similarity**num_bits)))


def isotropic_threshold(
    n: int, r: int, c: float = 1.0, delta: float = 0.01, *, every_pair: bool | None = None
) -> float:
    """Theta_{r,c,delta} = max over admissible (a, h) of tau_{a,h,c} + beta_{a,h,delta}.

    tau = (log C(n, a) + log C(n, h) + (c + 2) log n) / (a h),
    beta = sqrt((log C(n, a) + log C(n, h) + log(n^2 / delta)) / (2 a h)).
    With independent q_ij of a mean of Theta or more, full rank fails with probability at most delta + n^-c.

    The largest values lie on the edge a + h = n + R, which alone is searched where n is large: log C(n, h) is concave
    in h and 0 at h = 0, so log C(n, h) / h falls with h, and so does constant / h; hence tau and beta fall with h for
    each a, and the smallest h that is admissible gives their maximum.

    Args:
      n: the length.
      r: the rank of BA, from 0 to n - 1.
      c: exponent of the failure n^-c of the support.
      delta: failure of the probabilities, above 0.
      every_pair: whether to search all pairs and not the edge alone; None: up to n = 4,096.
    """
    _check_sizes(n, r)
    check_number("c", c, 0.0, open_low=True)
    check_number("delta", delta, 0.0, 1.0, open_low=True)
    log_choices = log_binomials(n)
    if every_pair is None:
        every_pair = n <= MAX_EVERY_PAIR

    def largest(a: np.ndarray | int, h: np.ndarray) -> float:
        choices, area = log_choices[a] + log_choices[h], np.multiply(a, h, dtype=np.float64)
        tau = (choices + (c + 2) * math.log(n)) / area
        beta = np.sqrt((choices + 2 * math.log(n) - math.log(delta)) / (2 * area))
        return float(np.max(tau + beta))

    least = n + r + 1
    if every_pair:
        return max(largest(a, np.arange(least - a, n + 1)) for a in range(r + 1, n + 1))
    a = np.arange(r + 1, n + 1)
    return largest(a, least - a)


def safety_edges(n: int, r: int, c: float = 1.0) -> float:
    """The expected number of edges of the safety sparsifier, n^2 min(1, p_{r,c}), those of the hash included."""
    return n * n * min(1.0, density_threshold(n, r, c))


def _admissible(a: np.ndarray, h: np.ndarray, n: int, least: int) -> np.ndarray:
    return (a >= least) & (h >= least) & (a + h >= n + least)


def _exp(x: float) -> float:
    """exp x, inf where it is too large for a float."""
    with np.errstate(over="ignore"):
        return float(np.exp(x))


def _check_probability(probability: np.ndarray) -> np.ndarray:
    probability = check_unit("probability", probability)
    if probability.ndim != 2 or probability.shape[0] != probability.shape[1]:
        raise ValueError(f"probability has shape {probability.shape}; it must be a square matrix")
    return probability


def _check_sizes(n: int, r: int) -> None:
    check_int("n", n, 1)
    check_int("r", r, 0, n - 1)
