"""Outlier steps: loss or gradient norm far above the steps before."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from llmexp.metrics.robust import middle

ENOUGH = 32  # steps in the window before anything is judged, or all of a smaller window
LASTING = (
    4  # outliers skipped with no update between them are a new level, as the weights stood still
)
# A loss that stands still differs by rounding alone (some 2**-24 in fp32): that is no outlier.
LEAST_DEVIATION = 1e-6
SCALE = 2**200  # units in 1: the smallest numbers of fp32 keep their digits
LARGEST = 1e80  # what is beyond it counts as this; its square in units is a float


@dataclass(frozen=True)
class Limits:
    """Hold the usual range of losses and of norms; a step above one of them is an outlier.

    A low loss or a small norm harms nothing: what is below is neither counted nor skipped.
    """

    loss: tuple[float, float]
    norm: tuple[float, float]

    def hold(self, loss: float, norm: float) -> bool:
        return loss <= self.loss[1] and norm <= self.norm[1]


class Trailing:
    """Keep mean and standard deviation of the last values of a series.

    They are from running sums in units of 1 / SCALE: sums of integers are exact, so a value that
    has left the window leaves no trace.
    """

    def __init__(self, window: int) -> None:
        self.values: deque[float] = deque(maxlen=window)
        self._sum = self._squares = 0

    def add(self, value: float) -> None:
        if len(self.values) == self.values.maxlen:
            gone = _in_units(self.values[0])
            self._sum -= gone
            self._squares -= gone * gone
        self.values.append(value)
        new = _in_units(value)
        self._sum += new
        self._squares += new * new

    def forget(self) -> None:
        self.values.clear()
        self._sum = self._squares = 0

    def about(self, sigma: float) -> tuple[float, float]:
        """Return the ends of `sigma` standard deviations about the mean. Needs two values."""
        n = len(self.values)
        mean = self._sum / n / SCALE
        deviation = math.sqrt((n * self._squares - self._sum**2) / (n * (n - 1))) / SCALE
        reach = sigma * max(deviation, LEAST_DEVIATION * abs(mean))
        return mean - reach, mean + reach


class Judge:
    """Judge loss and norm of each step by a trailing window, on the host.

    Values enter it clamped to the limits of their step, so that one spike does not blind it and a
    level that lasts is learned; what is not finite never enters. After LASTING skipped outliers in
    a row it begins anew.
    """

    def __init__(self, sigma: float, window: int) -> None:
        self.sigma = sigma
        self._needed = min(ENOUGH, window)
        self._losses, self._norms = Trailing(window), Trailing(window)
        self.skipped = 0  # outliers since the last update
        self.limits: Limits | None = None  # for the next step; None while too little is known

    def add(self, loss: float, norm: float, skipped: bool = False) -> None:
        """Take the figures of a step, which become part of the limits of the next one.

        `skipped`: it was an outlier, and made no update.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return
        self.skipped = self.skipped + 1 if skipped else 0
        if self.skipped == LASTING:
            self.forget()
        if self.limits is not None:
            loss, norm = _clamp(loss, *self.limits.loss), _clamp(norm, *self.limits.norm)
        self._losses.add(loss)
        self._norms.add(norm)
        self._renew()

    def forget(self) -> None:
        """Judge no step until enough new ones are known: those to come are of another kind."""
        for series in (self._losses, self._norms):
            series.forget()
        self.limits = None

    def robust(self) -> Limits | None:
        """Return limits about the medians of the window, which values far off do not widen.

        None while too little is known.
        """
        if self.limits is None:
            return None
        ends = []
        for series in (self._losses, self._norms):
            median, deviation = middle(series.values)
            reach = self.sigma * max(deviation, LEAST_DEVIATION * abs(median))
            ends.append((median - reach, median + reach))
        return Limits(*ends)

    def _renew(self) -> None:
        if len(self._losses.values) >= self._needed:
            self.limits = Limits(self._losses.about(self.sigma), self._norms.about(self.sigma))

    def state_dict(self) -> dict[str, Any]:
        pairs = zip(self._losses.values, self._norms.values, strict=True)
        return {"window": [[loss, norm] for loss, norm in pairs], "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for loss, norm in state["window"]:
            self._losses.add(loss)
            self._norms.add(norm)
        self.skipped = state["skipped"]
        self._renew()


def describe(limits: Limits, loss: float, norm: float) -> str:
    """Return what is above its limit, with figures."""
    named = ("loss", loss, limits.loss), ("gradient norm", norm, limits.norm)
    found = []
    for name, value, (_, high) in named:
        found.append(f"{name} {value:.4g}" + f", above {high:.4g}" * (value > high))
    return "; ".join(found)


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _in_units(value: float) -> int:
    return int(_clamp(value, -LARGEST, LARGEST) * SCALE)
