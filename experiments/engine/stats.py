"""Confidence intervals of results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def wilson_interval(correct: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Returns Wilson's score interval of a proportion, given `correct` of `n`; z = 1.96 gives 95 % confidence.

    Its ends are (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n) for p = correct / n.
    """
    if n < 1 or not 0 <= correct <= n:
        raise ValueError(f"correct is {correct!r} and n is {n!r}; n must be at least 1 and correct from 0 to n")
    share, spread = correct / n, z * z / n
    center = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    # At 0 and n the ends are exactly 0 and 1, which rounding could miss.
    low = 0.0 if correct == 0 else center - half
    high = 1.0 if correct == n else center + half
    return low, high


def mean_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Returns the mean of two or more values, and the ends of its 95 % interval by Student's t."""
    count = len(values)
    if count < 2:
        raise ValueError(f"there are {count} values; an interval needs at least 2")
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(count)
    half = float(stats.t.ppf(0.975, count - 1)) * error
    return mean, mean - half, mean + half


Interval = tuple[float, float]


def widen(value: float, interval: Interval, error: float) -> Interval:
    """Widens an interval of `value` at both ends by an independent error; the squares of the errors add up."""
    low, high = interval
    return value - math.hypot(value - low, error), value + math.hypot(high - value, error)


def difference_interval(value: float, interval: Interval, other: float, other_interval: Interval) -> Interval:
    """Returns the interval of the difference of two independent values; for two proportions it is Newcombe's."""
    (low, high), (other_low, other_high) = interval, other_interval
    difference = value - other
    down = math.hypot(value - low, other_high - other)
    up = math.hypot(high - value, other - other_low)
    return difference - down, difference + up
