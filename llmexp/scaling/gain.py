"""Compare two ladders: how much compute a change needs for the loss that its baseline has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmexp.scaling.law import Estimate, Surface


@dataclass(frozen=True)
class Need:
    """Compute of a change as a multiple of its baseline's, at equal loss along the frontiers."""

    flops: float  # of the baseline
    ratio: Estimate
    shown: bool  # the interval leaves out 1


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

    def needs(compute: float) -> np.ndarray:
        """Return the log ratios of compute at equal loss: of the fits, then of their draws."""
        return change.frontier.compute(baseline.frontier.losses(compute), compute) - compute

    def need(compute: float) -> Need:
        ratio = Estimate.of(needs(compute))
        return Need(math.exp(compute), ratio, not ratio.low <= 1 <= ratio.high)

    first, common = max(baseline.span[0], change.span[0]), min(baseline.span[1], change.span[1])
    target = baseline.target or change.target
    last = common if target is None else math.log(target)
    further = trend = None
    if abs(last - common) > 1e-6:
        further = need(last)
        with np.errstate(invalid="ignore"):
            moved = Estimate.of(np.nan_to_num(needs(last) - needs(common)), log=False)
        if not moved.low <= 0 <= moved.high:  # all but 5 % of the draws agree
            trend = "shrinks" if (moved.low > 0) == (last > common) else "grows"
    curve = [need(float(c)) for c in np.linspace(min(first, common), max(common, last), points)]
    return Gain(change.ladder.name, baseline.ladder.name, need(common), further, trend, curve)
