"""Intervals of means, the studentized range, and the seeds that would be needed."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence

import numpy as np

# The chance with which as many seeds as `seeds_needed` says find such a difference.
POWER = 0.8
_MOST = 1000  # seeds that could be asked for


def tail(q: float, count: int, df: float) -> float:
    """Return P(Q > q) for the studentized range of `count` values, to 1e-6.

    scipy.stats has it too, for a second of import and some tenths for each value.
    """
    from scipy.special import ndtr, stdtr

    if count == 2:
        return 2 * float(stdtr(df, -q / math.sqrt(2)))
    width = 9 / math.sqrt(2 * df)
    logs = np.linspace(-40 / df - width, width, 120 + int(400 / df))
    # The density of log s, where df s^2 is chi-squared.
    weights = np.exp(df * (logs - np.exp(2 * logs) / 2 + 0.5))
    z = np.linspace(-8.5, 8.5, 137)
    heights = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    inside = (ndtr(z) - ndtr(z - q * np.exp(logs)[:, None])) ** (count - 1) @ heights
    return float(np.clip(1 - count * (weights @ inside) / weights.sum(), 0, 1))


def at_least(count: int) -> int:
    """Return a round number of settings, from `count` to an eighth more."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


@functools.cache
def quantile(count: int, df: float, alpha: float = 0.05) -> float:
    """Return the q with P(Q > q) = alpha for the studentized range of `count` values, to 1e-5."""
    from scipy.special import stdtrit

    low, high = (
        -math.sqrt(2) * float(stdtrit(df, alpha / pairs / 2))
        for pairs in (1, math.comb(count, 2))  # a single pair; all of them by Bonferroni
    )
    if count == 2:
        return low

    def height(q: float) -> float:
        return math.log(max(tail(q, count, df), 1e-300) / alpha)

    # False position (Illinois' rule) on the logarithm of the tail, which is nearly straight.
    at_low, at_high = map(height, (low, high))
    while True:
        q = (low * at_high - high * at_low) / (at_high - at_low)
        at = height(q)
        if abs(at) < 1e-6:
            return q
        if at > 0:
            low, at_low, at_high = q, at, at_high / 2
        else:
            high, at_high, at_low = q, at, at_low / 2


def mean_interval(values: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Return the mean and its 95 % interval (Student's t); no interval for a single value."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean())
    if len(x) < 2:
        return mean, None
    t = quantile(2, len(x) - 1) / math.sqrt(2)
    half = t * float(x.std(ddof=1)) / math.sqrt(len(x))
    return mean, (mean - half, mean + half)


def seeds_needed(
    spread: float, size: float, rivals: int = 2, df: float = 1.0, alpha: float = 0.05
) -> int | None:
    """Return the seeds a setting that find a difference of `size` with a chance of 80 %.

    None where these are more than 1000.

    `spread` is the standard deviation of the difference of a pair of seeds, `df` the degrees of
    freedom that each seed beyond the first adds. The half width of the interval and the margin for
    the power must fit into `size`.
    """
    from scipy.special import stdtrit

    def enough(n: int) -> bool:
        freedom = round(df * (n - 1), 1)
        margin = quantile(rivals, freedom, alpha) / math.sqrt(2) + float(stdtrit(freedom, POWER))
        return margin * spread / math.sqrt(n) <= size

    found = bisect.bisect_left(range(_MOST + 1), True, lo=2, key=enough)
    return found if size > 0 and found <= _MOST else None
