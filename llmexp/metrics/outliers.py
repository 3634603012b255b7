"""Outlier steps: loss or gradient norm far off the steps before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

ENOUGH = 32  # steps in the window before anything is judged, or all of a smaller window
# A loss that stands still differs by rounding alone (some 2**-24 in fp32): that is no outlier.
LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class Limits:
    """The range of losses and of norms that are no outliers, both ends included."""

    loss: tuple[float, float]
    norm: tuple[float, float]

    def hold(self, loss: float, norm: float) -> bool:
        return self.loss[0] <= loss <= self.loss[1] and self.norm[0] <= norm <= self.norm[1]


class Outliers:
    """A trailing window over loss and norm, on the host. Values enter it clamped to the limits of
    their step, so that one spike does not blind it and a level that lasts is learned; what is not
    finite never enters."""

    def __init__(self, sigma: float | None, window: int) -> None:
        self.sigma = sigma
        self._needed = min(ENOUGH, window)
        # losses and norms, oldest first: the order decides how sums round
        self._values = np.empty((2, window))
        self._count = 0
        self.limits: Limits | None = None  # for the next step; None while too little is known

    def add(self, loss: float, norm: float) -> None:
        """Take the figures of a step, which become part of the limits of the next one."""
        if self.sigma is None or not (math.isfinite(loss) and math.isfinite(norm)):
            return
        if self.limits is not None:
            loss, norm = _clamp(loss, *self.limits.loss), _clamp(norm, *self.limits.norm)
        if self._count == self._values.shape[1]:
            self._values[:, :-1] = self._values[:, 1:]
        else:
            self._count += 1
        self._values[:, self._count - 1] = loss, norm
        self._renew()

    def _renew(self) -> None:
        self.limits = None
        if self.sigma is not None and self._count >= self._needed:
            values = self._values[:, : self._count]
            means = np.add.reduce(values, 1) / self._count
            off = values - means[:, None]
            squares = np.add.reduce(off * off, 1).tolist()
            reaches = [
                self.sigma * max(math.sqrt(square / (self._count - 1)), LEAST_DEVIATION * abs(mean))
                for mean, square in zip(means.tolist(), squares, strict=True)
            ]
            loss, norm = (
                (mean - reach, mean + reach)
                for mean, reach in zip(means.tolist(), reaches, strict=True)
            )
            self.limits = Limits(loss, norm)

    def state_dict(self) -> dict[str, Any]:
        return {"window": self._values[:, : self._count].T.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = state["window"][-self._values.shape[1] :]
        self._count = len(kept)
        self._values[:, : self._count] = np.array(kept).reshape(-1, 2).T
        self._renew()


def describe(limits: Limits, loss: float, norm: float) -> str:
    """Return what is off, with figures."""
    found = []
    for name, value, (low, high) in (
        ("loss", loss, limits.loss),
        ("gradient norm", norm, limits.norm),
    ):
        inside = low <= value <= high
        found.append(
            f"{name} {value:.4g}"
            + ("" if inside else f", not within {max(low, 0.0):.4g} to {high:.4g}")
        )
    return "; ".join(found)


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
