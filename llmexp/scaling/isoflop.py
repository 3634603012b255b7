"""Fit a parabola in log N to the losses of each budget, and a line through their lowest points.

This is Hoffmann's second approach: plain and widely used, and biased even without noise. The
bias is known here: that of the same parabolas through the fitted surface's losses at these runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmexp.scaling.law import DRAWS, Estimate, Surface


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
    law, drawn = np.log(s.at(*s.ensemble.x)), s.ensemble.noises(DRAWS // 2, len(s.losses))
    losses = np.vstack([s.losses, np.exp(law), np.exp(law + drawn)])  # as measured, by the law, ...
    minima, compute, lows = [], [], []
    for r in s.rungs:
        if r.what != "budget" or len(set(s.sizes[r.runs])) < 3:
            continue
        x = np.log(s.sizes[r.runs])
        low, loss, curve = _lowest(x, losses[:, r.runs])
        if curve[0] > 0:
            inside = bool(x.min() <= low[0] <= x.max())
            figures = math.exp(r.compute), math.exp(low[0]), float(loss[0]), inside
            minima.append(Parabola(*figures, tuple(map(float, curve))))
            compute.append(r.compute)
            lows.append(low)
    if len(minima) < 2:
        return None
    at = math.log(s.predicted.flops)
    slope, level = np.polyfit(np.array(compute) - at, np.array(lows), 1)  # of measured, law, draws
    first, last = min(compute), max(compute)
    true_slope = (s.frontier.sizes(last)[0] - s.frontier.sizes(first)[0]) / (last - first)

    def about(found: np.ndarray) -> np.ndarray:
        """Return what was measured, and draws about it."""
        return found[0] + np.append(0, found[2:] - found[1])

    return Parabolas(
        minima,
        Estimate.of(about(slope), log=False),
        float(slope[1] - true_slope),
        Estimate.of(about(level)),
        float(np.expm1(level[1] - s.frontier.sizes(at)[0])),
    )


def _lowest(x: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where parabolas through rows of losses are lowest, the loss there, the first curve.

    Where one has no curvature upwards, the lowest point is that of the runs.
    """
    middle = x.mean()
    a, b, c = np.polyfit(x - middle, losses.T, 2)
    up = a > 1e-12
    low = np.where(up, -b / (2 * np.where(up, a, 1.0)), (x - middle)[losses.argmin(axis=1)])
    low = np.clip(low, x.min() - middle - 3, x.max() - middle + 3)
    curve = np.array([a[0], b[0] - 2 * a[0] * middle, c[0] - b[0] * middle + a[0] * middle**2])
    return low + middle, (a * low + b) * low + c, curve
