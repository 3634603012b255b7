"""Means, intervals and differences between runs, with the noise they stand in. numpy only."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BATCHES = 10  # of the batch means
# Nats per token. Rounding that differs between two cuts of one batch grows to about this much in a run, and 0.01 % of
# perplexity helps nobody: what is below is not called a difference, whatever its error.
RESOLUTION = 1e-4


@dataclass(frozen=True)
class Difference:
    """An estimated difference and the half width of its interval."""

    mean: float
    half: float
    method: str  # in words

    @property
    def real(self) -> bool:
        return abs(self.mean) > max(self.half, RESOLUTION)


@functools.cache
def t_quantile(p: float, df: float) -> float:
    """The p-quantile (0 < p < 1) of Student's t with `df` > 0 degrees of freedom, to about 1e-9 relative."""
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
    """I_x(a, b) by its continued fraction (Abramowitz and Stegun 26.5.8), evaluated by Lentz's method."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction is slow
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
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


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, tuple[float, float] | None]:
    """Mean and its t-interval; no interval for a single value."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean())
    if len(x) < 2:
        return mean, None
    half = t_quantile((1 + level) / 2, len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return mean, (mean - half, mean + half)


def series_difference(d: np.ndarray, level: float = 0.95) -> Difference | None:
    """Mean of a series of autocorrelated differences, by non-overlapping batch means; None under 20 values.

    The series is cut into 10 equal stretches, whose means are nearly independent when a stretch is long beside the
    correlation time; their t-interval has 9 degrees of freedom (Schmeiser 1982, "Batch size effects in the analysis of
    simulation output"; Ibragimov and Mueller 2010 for few groups). Its two-sided test at 5 % is wrong in 5 % of cases
    for white noise, and in under 10 % as long as a stretch is at least five correlation times (1+r)/(1-r) of an AR(1).
    """
    d = np.asarray(d, dtype=float)
    d = d[np.isfinite(d)]
    size = len(d) // BATCHES
    if size < 2:
        return None
    means = d[len(d) - size * BATCHES :].reshape(BATCHES, size).mean(axis=1)
    half = t_quantile((1 + level) / 2, BATCHES - 1) * float(means.std(ddof=1)) / math.sqrt(BATCHES)
    return Difference(float(means.mean()), half, "paired by step")


def paired_seeds(d: Sequence[float], level: float = 0.95) -> Difference:
    """Mean of the differences of at least two pairs of runs that share a seed (Student's paired t)."""
    mean, interval = mean_interval(d, level)
    assert interval is not None
    return Difference(mean, interval[1] - mean, f"paired by {len(d)} seeds")


def pooled_seeds(a: Sequence[float], b: Sequence[float], groups: Sequence[Sequence[float]], level: float) -> Difference:
    """mean(b) - mean(a) beside the spread over seeds within `groups`, of which one has several (one-way analysis of
    variance: one spread for all settings, so that a setting with one seed can be judged too)."""
    df = sum(len(g) - 1 for g in groups)
    variance = sum(float(np.var(g)) * len(g) for g in groups) / df
    half = t_quantile((1 + level) / 2, df) * math.sqrt(variance * (1 / len(a) + 1 / len(b)))
    return Difference(float(np.mean(b) - np.mean(a)), half, "beside the spread over seeds")


def detrended_deviation(losses: np.ndarray) -> float | None:
    """Standard deviation of a step's loss about its trend, from second differences (von Neumann); None under 20 rows.

    Var(x[i-1] - 2 x[i] + x[i+1]) is 6 sigma^2 for white noise, and a straight trend drops out.
    """
    x = losses[np.isfinite(losses)]
    if len(x) < 20:
        return None
    second = x[2:] - 2 * x[1:-1] + x[:-2]
    return float(np.sqrt(np.mean(second**2) / 6))
