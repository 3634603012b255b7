"""Fit a parabola in log N to the losses of each budget, and a line through their lowest points.

This is Hoffmann's second approach: plain and widely used, and biased even without noise. The
bias is known here: that of the same parabolas through the fitted surface's losses at these runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmexp.laws.bootstrap import DRAWS
from llmexp.laws.fitting import Surface
from llmexp.laws.law import Estimate
from llmexp.laws.surface import log_losses


@dataclass(frozen=True)
class Parabola:
    """The parabola of a budget: loss over log N; where it is lowest."""

    flops: float
    parameters: float
    loss: float
    inside: bool  # the lowest point lies between the sizes of the runs
    curve: tuple[float, ...]  # coefficients, the highest power first


@dataclass(frozen=True)
class Parabolas:
    """The parabolas of all budgets, and the line through their lowest points."""

    minima: list[Parabola]
    exponent: Estimate
    exponent_bias: float
    parameters: Estimate  # at the compute that is asked for
    parameters_bias: float  # a share


def parabolas(s: Surface) -> Parabolas | None:
    """Return them; None where fewer than two budgets have three sizes and a lowest point."""
    x, drawn = np.log(s.sizes), s.ensemble.noises(DRAWS // 2, len(s.losses))
    plain = log_losses(s.ensemble.law, s.axes)
    rungs = [r for r in s.rungs if r.what == "budget" and len(set(s.sizes[r.runs])) > 2]
    rungs = [r for r in rungs if _lowest(x[r.runs], s.losses[None, r.runs])[2][0] > 0]
    if len(rungs) < 2:
        return None
    compute = np.array([r.compute for r in rungs])
    at = math.log(s.predicted.flops)

    def lines(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return slope and size at the compute that is asked for."""
        lows = np.stack([_lowest(x[r.runs], losses[:, r.runs])[0] for r in rungs], axis=1)
        middle = compute - compute.mean()
        slope = (lows * middle).sum(axis=1) / (middle**2).sum()
        return slope, lows.mean(axis=1) + slope * (at - compute.mean())

    slope, size = lines(s.losses[None])
    slope_of_law, size_of_law = lines(np.exp(plain))
    slopes, sizes = lines(np.exp(plain + drawn))
    each = []
    for r in rungs:
        low, loss, _, curve = _lowest(x[r.runs], s.losses[None, r.runs])
        inside = x[r.runs].min() <= low[0] <= x[r.runs].max()
        figures = math.exp(r.compute), math.exp(low[0]), float(loss[0]), bool(inside)
        each.append(Parabola(*figures, tuple(map(float, curve[0]))))
    truth = s.best.exponent(compute.min(), compute.max())[0]
    return Parabolas(
        each,
        Estimate.of(slope, slope + slopes - slope_of_law, log=False),
        float(slope_of_law[0] - truth),
        Estimate.of(size, size + sizes - size_of_law),
        float(np.expm1(size_of_law[0] - s.best.sizes(np.array(at))[0])),
    )


def _lowest(
    x: np.ndarray, losses: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return where parabolas through rows of losses are lowest, the loss there, and the curves.

    The third is the curvature; where a draw has none upwards, the lowest point is that of the runs.
    """
    middle = x.mean()
    curves = np.polyfit(x - middle, losses.T, 2).T
    a, b, c = curves.T
    up = a > 1e-12
    safe = np.where(up, a, 1.0)
    low = np.where(up, -b / (2 * safe), (x - middle)[losses.argmin(axis=1)])
    low = np.clip(low, x.min() - middle - 3, x.max() - middle + 3)
    shifted = np.stack([a, b - 2 * a * middle, c - b * middle + a * middle**2], axis=1)
    return low + middle, (a * low + b) * low + c, a, shifted
