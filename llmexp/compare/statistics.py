"""Means, intervals and differences between runs, with the noise they stand in. numpy only."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# chance with which as many seeds as `seeds_needed` says find a difference of the size asked for
POWER = 0.8


@dataclass(frozen=True)
class Difference:
    """An estimated difference and the half width of its interval."""

    mean: float
    half: float
    basis: str  # what it rests on, in words, such as: 3 seeds
    pairs: int = 0  # seeds on each side, the fewer of the two
    spread: float = 0.0  # standard deviation of the difference of a single pair of seeds

    @property
    def real(self) -> bool:
        """Tell whether the interval leaves out zero, as printed: `0.0030 ± 0.0030` touches it."""
        return abs(self.mean) > 1e-12 and float(f"{abs(self.mean):.2g}") > float(f"{self.half:.2g}")

    @property
    def text(self) -> str:
        """Return the size with its interval: 0.0034 ± 0.0018."""
        half = (
            self.half if self.half > 1e-9 * abs(self.mean) else 0.0
        )  # else it is the rounding of the sum
        return f"{abs(self.mean) if abs(self.mean) > 1e-12 else 0.0:.2g} ± {half:.2g}"


@functools.cache
def t_quantile(p: float, df: float) -> float:
    """Return the p-quantile (0 < p < 1) of Student's t with `df` > 0 degrees of freedom, to about
    1e-9 relative."""
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while _t_tail(high, df) > 1 - p and high < 1e300:
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tail(middle, df) > 1 - p else (low, middle)
    return (low + high) / 2


def _t_tail(t: float, df: float) -> float:
    """P(T > t) for t >= 0: I_{df/(df+t^2)}(df/2, 1/2) / 2 (Abramowitz and Stegun 26.7.1)."""
    return _incomplete_beta(df / (df + t * t), df / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) by its continued fraction (Abramowitz and Stegun 26.5.8), evaluated by Lentz's
    method."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction is slow
        return 1 - _incomplete_beta(1 - x, b, a)
    front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return math.exp(front) * value / a


def mean_interval(
    values: Sequence[float], level: float = 0.95
) -> tuple[float, tuple[float, float] | None]:
    """Return mean and its t-interval; no interval for a single value."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean())
    if len(x) < 2:
        return mean, None
    half = t_quantile((1 + level) / 2, len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return mean, (mean - half, mean + half)


def paired_seeds(d: Sequence[float], level: float = 0.95) -> Difference:
    """Estimate the mean of the differences of at least two pairs of runs that share a seed
    (Student's paired t)."""
    mean, interval = mean_interval(d, level)
    assert interval is not None
    return Difference(
        mean, interval[1] - mean, f"{len(d)} seeds, paired", len(d), float(np.std(d, ddof=1))
    )


def unpaired_seeds(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Difference:
    """Estimate mean(b) - mean(a) from at least three seeds on each side, whose spreads may differ
    (Welch's t).

    Over two seeds a side, Welch's degrees of freedom are too many: where one spread is ten times
    the other, an interval of 95 % misses in 7 % of cases.
    """
    errors = [float(np.var(x, ddof=1)) / len(x) for x in (a, b)]
    total = sum(errors)
    df = (
        total**2 / sum(e**2 / (len(x) - 1) for e, x in zip(errors, (a, b), strict=True))
        if total
        else 1.0
    )
    half = t_quantile((1 + level) / 2, df) * math.sqrt(total)
    spread = math.sqrt(float(np.var(a, ddof=1)) + float(np.var(b, ddof=1)))
    fewer = min(len(a), len(b))
    return Difference(
        float(np.mean(b) - np.mean(a)), half, f"{len(a)} and {len(b)} seeds", fewer, spread
    )


def seeds_needed(spread: float, size: float, level: float = 0.95, most: int = 1000) -> int | None:
    """Return the seeds per setting that find a difference of `size` with a chance of 80 %; None
    above `most`.

    `spread` is the standard deviation of the difference of a pair of seeds. The half width of the
    interval and the margin for the power, (t_level + t_power) spread / sqrt(n), must fit into
    `size`.
    """

    def enough(n: int) -> bool:
        margin = t_quantile((1 + level) / 2, n - 1) + t_quantile(POWER, n - 1)
        return margin * spread / math.sqrt(n) <= size

    if size <= 0 or not enough(most):
        return None
    return bisect.bisect_left(range(2, most + 1), True, key=enough) + 2


def series_difference(d: np.ndarray, level: float = 0.95) -> Difference | None:
    """Estimate the mean of a series of autocorrelated differences; None where it is too short to
    tell.

    The series counts as n (1-r)/(1+r) independent values, r its correlation from one step to the
    next (AR(1); Bartlett 1946). r is estimated too low in a short series: its bias (1+4r)/n is
    added, and one standard error. Under 20 values, or where fewer than 4 independent ones remain,
    there is no answer.
    """
    d = np.asarray(d, dtype=float)
    d = d[np.isfinite(d)]
    n = len(d)
    if n < 20:
        return None
    mean = float(d.mean())
    centred = d - mean
    variance = float(np.mean(centred**2))
    if variance <= (1e-12 * max(abs(mean), 1e-300)) ** 2:  # the same at every step
        return Difference(mean, 0.0, "step by step")
    r = max(0.0, float(np.sum(centred[1:] * centred[:-1])) / n / variance)
    r += (1 + 4 * r) / n + math.sqrt(max(0.0, 1 - r * r) / n)
    independent = n * (1 - r) / (1 + r)
    if independent < 4:
        return None
    error = math.sqrt(variance * n / (n - 1) / (1 - 1 / independent) / independent)
    return Difference(mean, t_quantile((1 + level) / 2, independent - 1) * error, "step by step")
