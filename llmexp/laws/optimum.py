"""Find the best size for a budget of compute, and the compute for a loss, for many laws at a time.

The compute of a run is its tokens times the FLOPs a token of its model: a smooth function of the
model's size that runs have measured, 6 N only where nothing else is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmexp.laws.surface import Axes

STEPS = 50  # at most; some 5 suffice
NEAR = 1e-12  # a step that ends a search
REACH = 30.0  # natural logs of compute that are searched


@dataclass(frozen=True)
class Price:
    """Log FLOPs a token over log size: a parabola, and beyond the runs its tangents."""

    curve: np.ndarray  # coefficients of log size less the middle, the highest power first
    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, sizes: np.ndarray, per_token: np.ndarray) -> Price:
        """Return the curve through the FLOPs a token of runs of these sizes."""
        x, y = np.log(sizes), np.log(per_token)
        middle, ends = float(x.mean()), (float(x.min()), float(x.max()))
        found = cls(np.array([1.0, y.mean()]), middle, *ends)  # in proportion
        for degree in range(1, min(3, len(set(sizes)))):
            if found.miss(sizes, per_token) < 1e-9:
                break
            other = cls(np.polyfit(x - middle, y, degree), middle, *ends)
            found = other if other.slope(np.array(ends)).min() > 0.1 else found
        return found

    def miss(self, sizes: np.ndarray, per_token: np.ndarray) -> float:
        """Return the largest relative difference from the runs."""
        return float(np.abs(np.expm1(self.at(np.log(sizes)) - np.log(per_token))).max())

    def at(self, x: np.ndarray) -> np.ndarray:
        """Return log FLOPs a token of models of log size x."""
        inside = np.clip(x, self.low, self.high)
        return np.polyval(self.curve, inside - self.middle) + self.slope(inside) * (x - inside)

    def slope(self, x: np.ndarray) -> np.ndarray:
        """Return d log FLOPs a token / d log size."""
        inside = np.clip(x, self.low, self.high)
        return np.asarray(np.polyval(np.polyder(self.curve), inside - self.middle))


@dataclass(frozen=True)
class Frontier:
    """The best that laws allow at each compute: rows are laws, figures natural logs."""

    laws: np.ndarray
    axes: Axes
    price: Price

    def sizes(self, compute: np.ndarray) -> np.ndarray:
        """Return the log size with the lowest loss at log compute: a number, or one for each law.

        There the gain of a larger model, alpha A N^-alpha, is the loss of the tokens that it costs.
        Their logs are nearly straight lines over log N.
        """
        (a, b), (alpha, beta) = self.axes.factors(self.laws).T, self.laws[:, 3:].T
        x = np.full(len(self.laws), self.price.middle)
        for _ in range(STEPS):
            slope = self.price.slope(x)
            cost = b + np.log(beta * slope) - beta * (compute - self.price.at(x))
            step = (a + np.log(alpha) - alpha * x - cost) / (alpha + beta * slope)
            x = x + step
            if np.abs(step).max() < NEAR:
                break
        return x

    def _terms(self, compute: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the three terms of the loss of the best size."""
        sizes = self.sizes(compute)
        tokens = compute - self.price.at(sizes)
        (a, b), (alpha, beta) = self.axes.factors(self.laws).T, self.laws[:, 3:].T
        return np.exp(self.laws[:, 0]), np.exp(a - alpha * sizes), np.exp(b - beta * tokens)

    def tokens(self, compute: np.ndarray) -> np.ndarray:
        """Return the log tokens of the best size at log compute."""
        return np.asarray(compute - self.price.at(self.sizes(compute)))

    def losses(self, compute: np.ndarray) -> np.ndarray:
        """Return the log loss of the best size at log compute."""
        return np.asarray(np.log(sum(self._terms(compute))))

    def compute(self, losses: np.ndarray, near: float) -> np.ndarray:
        """Return the least log compute for log losses, searched from `near` on; inf: never.

        The log of the loss above E is nearly a straight line over log compute; its slope is that of
        the tokens alone, as the size is the best one.
        """
        above = np.exp(losses) - np.exp(self.laws[:, 0])
        goal = np.log(np.where(above > 0, above, 1.0))
        c = np.full(len(self.laws), near)
        for _ in range(STEPS):
            _, size, tokens = self._terms(c)
            slope = self.laws[:, 4] * tokens / (size + tokens)
            step = np.clip((np.log(size + tokens) - goal) / slope, -REACH, REACH)
            c = c + step
            if np.abs(step).max() < NEAR:
                break
        return np.where((above > 0) & (c < near + REACH), c, np.inf)

    def exponent(self, first: float, last: float) -> np.ndarray:
        """Return by which power of compute the best size grows between two log computes."""
        return np.asarray(
            (self.sizes(np.array(last)) - self.sizes(np.array(first))) / (last - first)
        )
