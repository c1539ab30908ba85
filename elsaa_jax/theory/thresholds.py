"""Densities and numbers of hash tables that make full rank likely, and the certificate (appendix C)."""

from __future__ import annotations

import itertools
import math
import numbers
from typing import Any, NamedTuple

import numpy as np

from elsaa_jax.checks import check_number
from elsaa_jax.theory.collisions import isotropic_density
from elsaa_jax.theory.rank_bounds import check_sizes, diagonal_sums, exp_up, log_binomials, log_delta_of_density

# Up to this n `isotropic_threshold` searches every admissible pair by default.
MAX_EVERY_PAIR = 4096


def density_threshold(n: int, r: int, c: float = 1.0) -> float:
    """Computes p_{r,c}, a density at which full rank fails with probability at most n^-c.

    p_{r,c} = (8 log(e n / R) + (c + 2) log(n) / R) / n with R = r + 1. For small n it exceeds 1, and the corollary then
    has no density that is enough. It is 0 if r >= n, because the low-rank part alone has full rank.

    Args:
      n: Length of the input.
      r: Rank of the low-rank part.
      c: Exponent of the failure probability n^-c.

    Example:
      >>> from elsaa_jax import theory
      >>> round(theory.density_threshold(65_536, r=61), 6)
      0.00098
    """
    n, r = check_sizes(n, r)
    check_number("c", c, 0.0, open_low=True)
    if r >= n:
        return 0.0
    return (8 * math.log(math.e * n / (r + 1)) + (float(c) + 2) * math.log(n) / (r + 1)) / n


def smallest_density(n: int, r: int, failure: float) -> float:
    """Finds the smallest density whose `delta_of_density` is at most `failure`, to 0.01 %.

    This is the threshold of the theorem itself; p_{r,c} bounds it from above.

    Args:
      n: Length of the input.
      r: Rank of the low-rank part.
      failure: Failure probability to allow.

    Returns:
      The density, or inf if even a density of 1 fails too often.

    Example:
      >>> from elsaa_jax import theory
      >>> round(theory.smallest_density(1024, r=0, failure=1 / 1024), 4)
      0.0144
    """
    n, r = check_sizes(n, r)
    check_number("failure", failure, 0.0, open_low=True)

    def is_enough(density: float) -> bool:
        sums = itertools.accumulate(diagonal_sums(n, r, density), np.logaddexp)
        return all(exp_up(float(total)) <= failure for total in sums)

    if is_enough(0.0):
        return 0.0
    if not is_enough(1.0):
        return math.inf
    low, high = 0.0, 1.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def tables_needed(least_similarity: float, num_bits: float, density: float) -> float:
    """Computes the least number of hash tables that reaches a density in the worst case.

    It is the least integer L >= 1 with L >= -log(1 - p) / rho_min^gamma.

    Args:
      least_similarity: Smallest angular similarity of any query and key, rho_min.
      num_bits: Bits of each hash, gamma.
      density: Density to reach, p, for example from `density_threshold`.

    Returns:
      L as a float. It is inf if no number is enough, or if the number is too large for a float.

    Example:
      >>> from elsaa_jax import theory
      >>> theory.tables_needed(0.3, num_bits=2, density=0.4)
      6.0
    """
    check_number("least_similarity", least_similarity, 0.0, 1.0)
    check_number("num_bits", num_bits, 0.0, open_low=True)
    check_number("density", density, 0.0)
    if density == 0:
        return 1.0
    if density >= 1 or least_similarity == 0:
        return math.inf
    rho, gamma, mass = float(least_similarity), float(num_bits), -math.log1p(-float(density))
    power = rho**gamma
    if power > np.finfo(np.float64).tiny:
        needed = mass / power
    else:  # The power is inaccurate or 0 as a float, but its logarithm is not.
        log_needed = math.log(mass) - gamma * math.log(rho)
        needed = math.exp(log_needed) if log_needed < math.log(np.finfo(np.float64).max) else math.inf
    return needed if math.isinf(needed) else max(1.0, float(math.ceil(needed)))


def isotropic_threshold(
    n: int, r: int, c: float = 1.0, delta: float = 0.01, *, every_pair: bool | None = None
) -> float:
    """Computes Theta_{r,c,delta}, the mean edge probability that the isotropic certificate asks for.

    Theta is the maximum over admissible (a, h) of tau + beta with
    tau = (log C(n, a) + log C(n, h) + (c + 2) log n) / (a h) and
    beta = sqrt((log C(n, a) + log C(n, h) + log(n^2 / delta)) / (2 a h)).
    If the q_ij are independent with a mean of Theta or more, full rank fails with probability at most delta + n^-c.

    The maximum lies on the edge a + h = n + R: log C(n, h) is concave in h and 0 at h = 0, so log C(n, h) / h falls
    with h, and so does a constant over h. Hence tau and beta fall with h for each a. For large n only the edge is
    searched.

    Args:
      n: Length of the input.
      r: Rank of the low-rank part.
      c: Exponent of the failure probability n^-c of the support.
      delta: Failure probability of the edge probabilities, above 0 and below 1.
      every_pair: Whether to search all pairs instead of the edge. None searches all pairs up to n = 4,096.

    Returns:
      Theta, or 0 if r >= n.

    Example:
      >>> from elsaa_jax import theory
      >>> round(theory.isotropic_threshold(65_536, r=61), 4)
      0.0097
    """
    n, r = check_sizes(n, r)
    check_number("c", c, 0.0, open_low=True)
    _check_delta(delta)
    if r >= n:
        return 0.0
    c, log_delta = float(c), math.log(delta)
    log_choices = log_binomials(n)
    if every_pair is None:
        every_pair = n <= MAX_EVERY_PAIR

    def largest(a: np.ndarray | int, h: np.ndarray) -> float:
        choices, area = log_choices[a] + log_choices[h], np.multiply(a, h, dtype=np.float64)
        tau = (choices + (c + 2) * math.log(n)) / area
        beta = np.sqrt((choices + 2 * math.log(n) - log_delta) / (2 * area))
        return float(np.max(tau + beta))

    least = n + r + 1
    if every_pair:
        return max(largest(a, np.arange(least - a, n + 1)) for a in range(r + 1, n + 1))
    a = np.arange(r + 1, n + 1)
    return largest(a, least - a)


def safety_edges(n: int, r: int, c: float = 1.0) -> float:
    """Computes the expected number of edges of the safety sparsifier, n^2 min(1, p_{r,c}).

    Edges that the hash has found as well are included.

    Args:
      n: Length of the input.
      r: Rank of the low-rank part.
      c: Exponent of the failure probability n^-c.

    Example:
      >>> from elsaa_jax import theory
      >>> round(theory.safety_edges(65_536, r=0))
      8519280
    """
    n, r = check_sizes(n, r)
    return n * n * min(1.0, density_threshold(n, r, c))


class Certificate(NamedTuple):
    """Verdict of the isotropic certificate on a configuration.

    Attributes:
      density: Mean edge probability, q_iso minus the slack.
      threshold: Theta_{r,c,delta}, the density that the certificate asks for.
      certified: Whether the density reaches the threshold and the confidence is positive.
      confidence: 1 - delta - n^-c if certified, otherwise 0. It is 1 if r >= n.
      edges_per_query: n * density, the cost of such a support.
      uniform_threshold: p_{r,c}, which would be enough if every admissible rectangle had that mean.
      log_delta: log Delta_r if every admissible rectangle had the mean `density`; -inf if r >= n.
    """

    density: float
    threshold: float
    certified: bool
    confidence: float
    edges_per_query: float
    uniform_threshold: float
    log_delta: float


def certify(
    n: int, *, num_tables: int, num_bits: float, r: int, c: float = 1.0, delta: float = 0.01, slack: float = 0.0
) -> Certificate:
    """Tells whether S + BA has full rank, and with which confidence, by the isotropic certificate of appendix C.

    The certificate is about the model of the paper: independent edges whose probabilities are themselves independent,
    with a mean of at least q_iso - slack. A real support with a perfect matching does not need it; `generic_rank` gives
    the rank for a real support.

    Args:
      n: Length of the input.
      num_tables: Number of independent hashes, L. A pair is an edge if it collides in at least one of them.
      num_bits: Bits of each hash, gamma.
      r: Rank of the low-rank branch. `race_rank` gives that of RACE.
      c: Exponent of the failure probability n^-c of the support.
      delta: Failure probability of the edge probabilities, above 0 and below 1.
      slack: Amount eps_iso by which q_iso may exceed the true mean. `isotropic_mean` gives the true mean.

    Example:
      >>> from elsaa_jax import theory
      >>> certificate = theory.certify(65_536, num_tables=4, num_bits=4, r=61)
      >>> certificate.certified, round(certificate.confidence, 3), round(certificate.edges_per_query)
      (True, 0.99, 14911)
    """
    n, r = check_sizes(n, r)
    check_number("slack", slack, 0.0, 1.0)
    density = max(0.0, isotropic_density(num_bits, num_tables) - float(slack))
    threshold = isotropic_threshold(n, r, c, delta)
    confidence = 1.0 if r >= n else max(0.0, 1.0 - float(delta) - float(n) ** -float(c))
    certified = density >= threshold and confidence > 0
    return Certificate(
        density=density,
        threshold=threshold,
        certified=certified,
        confidence=confidence if certified else 0.0,
        edges_per_query=n * density,
        uniform_threshold=density_threshold(n, r, c),
        log_delta=log_delta_of_density(n, r, density),
    )


def _check_delta(delta: Any) -> None:
    is_number = isinstance(delta, numbers.Real) and not isinstance(delta, bool)
    if not is_number or not 0 < delta < 1:
        raise ValueError(f"delta is {delta!r}; it must be a number above 0 and below 1")
