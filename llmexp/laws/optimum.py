"""Find the best size for a budget of compute, and the compute for a loss, for many laws at a time.

The compute of a run is its tokens times the FLOPs a token of its model: a smooth function of the
model's size that runs have measured, 6 N only where nothing else is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.polynomial import Polynomial

_STEPS = 50  # at most; some 5 suffice
NEAR = 1e-12  # a step that ends a search
REACH = 30.0  # natural logs of compute that are searched


@dataclass(frozen=True)
class FlopsBySize:
    """Log FLOPs a token over log size: a parabola, and beyond the runs its tangents."""

    curve: Polynomial
    low: float
    high: float

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> FlopsBySize:
        """Return the curve through log FLOPs a token of runs by their log sizes, three or more.

        It is a line, or in proportion, where a larger model would cost less than a smaller one.
        """
        ends = float(x.min()), float(x.max())
        for degree in (2, 1):
            found = cls(Polynomial.fit(x, y, degree), *ends)
            if found.slope(np.array(ends)).min() > 0.1:
                return found
        return cls(Polynomial([float((y - x).mean()), 1.0]), *ends)

    def at(self, x: np.ndarray) -> np.ndarray:
        """Return log FLOPs a token of models of log size x."""
        inside = np.clip(x, self.low, self.high)
        return self.curve(inside) + self.slope(inside) * (x - inside)

    def slope(self, x: np.ndarray) -> np.ndarray:
        """Return d log FLOPs a token / d log size."""
        return np.asarray(self.curve.deriv()(np.clip(x, self.low, self.high)))


@dataclass(frozen=True)
class Frontier:
    """The best that laws allow at each compute: a figure for each law, all natural logs."""

    laws: np.ndarray
    price: FlopsBySize

    def sizes(self, compute: np.ndarray | float) -> np.ndarray:
        """Return the size with the lowest loss at some compute: a number, or one for each law.

        There the gain of a larger model, alpha A N^-alpha, is the loss of the tokens that it costs.
        Their logs are nearly straight lines over log N.
        """
        _, a, b, alpha, beta = self.laws.T
        x = np.full(len(self.laws), (self.price.low + self.price.high) / 2)
        for _ in range(_STEPS):
            slope = self.price.slope(x)
            cost = b + np.log(beta * slope) - beta * (compute - self.price.at(x))
            step = (a + np.log(alpha) - alpha * x - cost) / (alpha + beta * slope)
            x = x + step
            if np.abs(step).max() < NEAR:
                break
        return x

    def tokens(self, compute: np.ndarray | float) -> np.ndarray:
        """Return the tokens of the best size at some compute."""
        return compute - self.price.at(self.sizes(compute))

    def losses(self, compute: np.ndarray | float) -> np.ndarray:
        """Return the loss of the best size at some compute."""
        return np.asarray(np.log(np.exp(self.laws[:, 0]) + sum(self._terms(compute))))

    def _terms(self, compute: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """Return what size and tokens leave of the loss of the best size."""
        _, a, b, alpha, beta = self.laws.T
        sizes = self.sizes(compute)
        return np.exp(a - alpha * sizes), np.exp(b - beta * (compute - self.price.at(sizes)))

    def compute(self, losses: np.ndarray, near: float) -> np.ndarray:
        """Return the least compute for losses, searched from `near` on; inf: never.

        The log of the loss above E is nearly a straight line over log compute; its slope is that of
        the tokens alone, as the size is the best one.
        """
        above = np.exp(losses) - np.exp(self.laws[:, 0])
        goal = np.log(np.where(above > 0, above, 1.0))
        c = np.full(len(self.laws), near)
        for _ in range(_STEPS):
            size, tokens = self._terms(c)
            slope = self.laws[:, 4] * tokens / (size + tokens)
            step = np.clip((np.log(size + tokens) - goal) / slope, -REACH, REACH)
            c = c + step
            if np.abs(step).max() < NEAR:
                break
        return np.where((above > 0) & (c < near + REACH), c, np.inf)
