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
        mean = abs(self.mean) if abs(self.mean) > 1e-12 else 0.0
        # A smaller interval is the rounding of the sum.
        half = self.half if self.half > 1e-9 * abs(self.mean) else 0.0
        return f"{mean:.2g} ± {half:.2g}"


@functools.cache
def t_quantile(p: float, df: float) -> float:
    """Return the p-quantile (0 < p < 1) of Student's t with `df` > 0 degrees of freedom, to about
    1e-9 relative."""
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while _t_tail(high, df) > 1 - p and high < 1e300:
        low, high = high, high * 2
    middle = (low + high) / 2
    while low < middle < high:
        low, high = (middle, high) if _t_tail(middle, df) > 1 - p else (low, middle)
        middle = (low + high) / 2
    return middle


def _t_tail(t: float, df: float) -> float:
    """P(T > t) for t >= 0 and df >= 1. With t = sqrt(df) tan(a) the density is C cos(a)^(df-1),
    smooth in a, so Gauss's rule over [0, a] converges fast."""
    half = math.atan(t / math.sqrt(df)) / 2
    nodes, weights = _gauss()
    area = half * float(weights @ (np.cos(half * (1 + nodes)) ** (df - 1)))
    log = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(math.pi) / 2
    return 0.5 - math.exp(log) * area


@functools.cache
def _gauss() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(100)


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
    basis, spread = f"{len(d)} seeds, paired", float(np.std(d, ddof=1))
    return Difference(mean, interval[1] - mean, basis, len(d), spread)


def unpaired_seeds(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Difference:
    """Estimate mean(b) - mean(a) from at least three seeds on each side, whose spreads may differ
    (Welch's t).

    Over two seeds a side, Welch's degrees of freedom are too many: where one spread is ten times
    the other, an interval of 95 % misses in 7 % of cases.
    """
    mean, error, df = welch(np.array(a), np.array(b))
    half = t_quantile((1 + level) / 2, float(df)) * float(error)
    spread = math.sqrt(float(np.var(a, ddof=1)) + float(np.var(b, ddof=1)))
    basis = f"{len(a)} and {len(b)} seeds"
    return Difference(float(mean), half, basis, min(len(a), len(b)), spread)


def welch(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean(b) - mean(a) along the last axis, its standard error and Welch's degrees of
    freedom."""
    of_a, of_b = (np.var(x, axis=-1, ddof=1) / x.shape[-1] for x in (a, b))
    total = of_a + of_b
    squares = of_a**2 / (a.shape[-1] - 1) + of_b**2 / (b.shape[-1] - 1)
    df = np.divide(total**2, squares, out=np.ones_like(total), where=total > 0)
    return np.mean(b, axis=-1) - np.mean(a, axis=-1), np.sqrt(total), df


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
    tell: under 20 values, or where fewer than 4 independent ones remain."""
    d = np.asarray(d, dtype=float)
    d = d[np.isfinite(d)]
    if len(d) < 20:
        return None
    mean, error, independent = (float(x) for x in autocorrelated(d))
    if independent < 4:
        return None
    half = t_quantile((1 + level) / 2, independent - 1) * error if error else 0.0
    return Difference(mean, half, "step by step")


def autocorrelated(d: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean of a series along the last axis, its standard error (0 for the same value at
    every step) and the independent values that it counts as.

    These are n (1-r)/(1+r), r the correlation from one step to the next (AR(1); Bartlett 1946). r
    is estimated too low in a short series: its bias (1+4r)/n is added, and one standard error.
    """
    n = d.shape[-1]
    mean = d.mean(axis=-1)
    centred = d - mean[..., None]
    variance = np.mean(centred**2, axis=-1)
    constant = variance <= (1e-12 * np.maximum(abs(mean), 1e-300)) ** 2
    variance = np.where(constant, 1.0, variance)
    r = np.maximum(0.0, np.sum(centred[..., 1:] * centred[..., :-1], axis=-1) / n / variance)
    r += (1 + 4 * r) / n + np.sqrt(np.maximum(0.0, 1 - r * r) / n)
    independent = n * (1 - r) / (1 + r)
    known = np.where(independent > 1, independent, np.inf)
    error = np.sqrt(variance * n / (n - 1) / (1 - 1 / known) / known)
    return mean, np.where(constant, 0.0, error), np.where(constant, n, independent)
