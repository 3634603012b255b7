"""Compare two ladders: how much compute a change needs for the loss that its baseline has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmexp.laws.fitting import Surface
from llmexp.laws.law import Estimate


@dataclass(frozen=True)
class Need:
    """Compute of a change as a multiple of its baseline's, at equal loss along the frontiers."""

    flops: float  # of the baseline
    ratio: Estimate
    shown: bool  # the interval leaves out 1

    @classmethod
    def of(cls, compute: float, best: np.ndarray, draws: np.ndarray) -> Need:
        """Return the need of the fits and their draws at log compute."""
        e = Estimate.of(best, draws)
        return cls(math.exp(compute), e, not e.low <= 1 <= e.high)


@dataclass(frozen=True)
class Gain:
    """The needs of a change at the largest common budget and further on."""

    change: str
    baseline: str
    common: Need
    further: Need | None
    trend: str | None  # grows | shrinks; None where it cannot be told
    curve: list[Need]  # from the first common budget on


def gain(baseline: Surface, change: Surface, points: int = 9) -> Gain:
    """Return what a change needs of its baseline's compute.

    Both frontiers are drawn anew, each with its own noise.
    """
    common = min(baseline.largest, change.largest)
    first = max(baseline.span[0], change.span[0])
    target = baseline.target or change.target
    last = common if target is None else math.log(target)
    best, draws = _needs(baseline, change, common)
    at = Need.of(common, best, draws)
    further = trend = None
    if target is not None and abs(last - common) > 1e-6:
        best_there, draws_there = _needs(baseline, change, last)
        further = Need.of(last, best_there, draws_there)
        trend = _trend(best, draws, best_there, draws_there, last > common)
    steps = np.linspace(min(first, common), max(common, last), points)
    curve = [Need.of(c, *_needs(baseline, change, c)) for c in map(float, steps)]
    return Gain(change.ladder.name, baseline.ladder.name, at, further, trend, curve)


def _needs(baseline: Surface, change: Surface, compute: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the log ratios of compute at equal loss: of the fits, and of their draws."""
    c = np.array(compute)
    best = change.best.compute(baseline.best.losses(c), compute) - compute
    draws = change.draws.compute(baseline.draws.losses(c), compute) - compute
    return best, draws


def _trend(
    best: np.ndarray, draws: np.ndarray, there: np.ndarray, draws_there: np.ndarray, beyond: bool
) -> str | None:
    """Tell how the gain changes with compute, if all but 5 % of the draws agree that it does."""
    with np.errstate(invalid="ignore"):
        moved = np.nan_to_num(draws_there - draws, nan=0.0)
    e = Estimate.of(np.nan_to_num(there - best), moved, log=False)
    if e.low <= 0 <= e.high:
        return None
    more_compute = (e.low > 0) == beyond
    return "shrinks" if more_compute else "grows"
