"""Means, intervals and differences of settings over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmexp.compare.inference import Model, quantile

# The chance with which as many seeds as `seeds_needed` says find such a difference.
POWER = 0.8


@dataclass(frozen=True)
class Difference:
    """An estimated difference of two settings and the half width of its 95 % interval."""

    mean: float
    half: float
    basis: str  # what it rests on, in words, such as: 3 seeds
    seeds: int  # on each side, the fewer of the two
    df: float  # degrees of freedom of the noise
    rivals: int  # settings among which they were judged, so that all their intervals hold together
    spread: float  # standard deviation of the difference of a single pair of seeds

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

    def seeds_needed(self, size: float) -> int | None:
        """Return the seeds a setting that would find a difference of `size`; None for too many."""
        return seeds_needed(self.spread, size, self.rivals, self.df / max(1, self.seeds - 1))


def estimate(model: Model, weights: np.ndarray, rivals: int = 2, alpha: float = 0.05) -> Difference:
    """Estimate a sum of settings with weights that add up to 0, and its interval.

    The intervals of all pairs of `rivals` hold together with a chance of 1 - alpha.
    """
    found = model.contrast(weights)
    half = found.half(rivals, alpha)
    counts = np.bincount(model.of_cell, minlength=len(weights))[weights != 0]
    low, high = int(counts.min()), int(counts.max())
    basis = f"{low} seeds" if low == high else f"{low} to {high} seeds"
    spread = found.error * math.sqrt(low)
    return Difference(found.mean, half, basis, low, found.df, rivals, spread)


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
    spread: float, size: float, rivals: int = 2, df: float = 1.0, most: int = 1000
) -> int | None:
    """Return the seeds a setting that find a difference of `size` with a chance of 80 %.

    None where these are more than `most`.

    `spread` is the standard deviation of the difference of a pair of seeds, `df` the degrees of
    freedom that each seed beyond the first adds. The half width of the interval and the margin for
    the power must fit into `size`.
    """
    from scipy.special import stdtrit

    def enough(n: int) -> bool:
        freedom = round(df * (n - 1), 1)
        margin = quantile(rivals, freedom) / math.sqrt(2) + float(stdtrit(freedom, POWER))
        return margin * spread / math.sqrt(n) <= size

    if size <= 0 or not enough(most):
        return None
    low, high = 1, 2  # not enough, to be tried
    while not enough(high):
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
