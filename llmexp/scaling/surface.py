"""Fit E + A x^-alpha (one axis) or E + A N^-alpha + B D^-beta (two): many samples at a time.

For fixed exponents a law is linear in E, A and B (variable projection): the search begins at the
best of a grid of exponents, each with the least squares of the others. The fit itself minimises the
sum of Huber's function, delta 1e-3, of the differences of log losses, as Hoffmann et al. (2022).

A law is a row: log E, the logs of its k factors, its k exponents. `x` holds, for each axis, the log
of each run's figure there: (k, runs).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import Polynomial
from scipy.optimize import nnls
from scipy.special import huber

DELTA = 1e-3  # of Huber's function, in log loss
EXPONENTS = np.geomspace(0.02, 2.0, 17)  # tried before the search
BOUNDS = (0.005, 4.0)  # of an exponent
_STARTS = 4  # places that the search begins at
WITHOUT_E = -40.0  # log E of a law without E
_STEPS = 50  # at most; some 5 suffice
NEAR = 1e-12  # a step that ends a search
REACH = 30.0  # natural logs of compute that are searched


def log_losses(laws: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the log loss of each law at each place: (laws, runs)."""
    return np.asarray(np.log(sum(_terms(laws, x))))


def _terms(laws: np.ndarray, x: np.ndarray) -> list[np.ndarray]:
    k = len(x)
    powers = [laws[:, 1 + i, None] - laws[:, 1 + k + i, None] * x[i] for i in range(k)]
    return [np.exp(np.broadcast_to(laws[:, :1], powers[0].shape)), *map(np.exp, powers)]


def slopes(laws: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return d log loss / d each number of each law: (laws, numbers, runs)."""
    terms = _terms(laws, x)
    shares = [term / sum(terms) for term in terms]
    return np.stack([*shares, *(-s * axis for s, axis in zip(shares[1:], x, strict=True))], axis=1)


def fit_surface(x: np.ndarray, logs: np.ndarray, with_e: bool = True) -> tuple[np.ndarray, float]:
    """Return the law that fits log losses best, and its Huber sum."""
    middle = x.mean(axis=1, keepdims=True)
    starts = _moved(_starts(x - middle, logs, with_e), middle)
    laws, sums = refine(starts, x, np.tile(logs, (len(starts), 1)), most=1000)
    return laws[np.argmin(sums)], float(sums.min())


def _starts(x: np.ndarray, logs: np.ndarray, with_e: bool) -> np.ndarray:
    """Return laws to begin at: the best of a grid of exponents, each with the best E, A and B.

    These are the non-negative least squares of relative differences.
    """
    k, loss, found = len(x), np.exp(logs), []
    for exponents in itertools.product(EXPONENTS, repeat=k):
        terms = [np.full(len(loss), float(with_e)), *np.exp(-np.array(exponents)[:, None] * x)]
        factors, rest = nnls((np.array(terms) / loss).T, np.ones(len(loss)))
        found.append((rest, *factors, *exponents))
    laws = np.array(sorted(found)[:_STARTS])[:, 1:]
    laws[:, : 1 + k] = np.log(np.maximum(laws[:, : 1 + k], 1e-4 * loss.min()))
    if not with_e:
        laws[:, 0] = WITHOUT_E
    return laws


def _moved(laws: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return the laws over x + by of laws over x."""
    k, found = len(by), laws.copy()
    found[:, 1 : 1 + k] += found[:, 1 + k :] * by[:, 0]
    return found


def refine(
    laws: np.ndarray, x: np.ndarray, logs: np.ndarray, delta: float = DELTA, most: int = 200
) -> tuple[np.ndarray, np.ndarray]:
    """Return laws near the given ones that fit samples of log losses best, and their Huber sums.

    Samples and laws are rows. Each step is to the least squares with Huber's weights about the law
    (Gauss-Newton); one that does not lower the sum is not taken, and the next one is damped
    (Levenberg and Marquardt). `delta`: infinity makes it least squares.
    """
    middle = x.mean(axis=1, keepdims=True)
    laws, x = _moved(laws, -middle), x - middle
    rest = log_losses(laws, x) - logs
    best, exponents = huber(delta, rest).sum(axis=-1), slice(1 + len(x), None)
    damping, idle = np.full(len(laws), 2e-5), np.zeros(len(laws), int)
    going, diagonal = np.arange(len(laws)), np.arange(laws.shape[1])
    for _ in range(most):
        by = slopes(laws[going], x)
        weighted = by * np.minimum(1, delta / np.maximum(np.abs(rest[going]), 1e-300))[:, None, :]
        square = weighted @ by.transpose(0, 2, 1)
        scale = square[:, diagonal, diagonal]
        least = 1e-12 * scale.max(axis=1, keepdims=True) + 1e-300
        square[:, diagonal, diagonal] += damping[going, None] * scale + least
        step = np.linalg.solve(square, -weighted @ rest[going, :, None])[:, :, 0]
        tried = laws[going] + np.clip(step, -2, 2)
        tried[:, exponents] = np.clip(tried[:, exponents], *BOUNDS)
        there = log_losses(tried, x) - logs[going]
        sums = huber(delta, there).sum(axis=-1)
        lower, gained = sums < best[going], best[going] - sums
        damping[going] = np.where(lower, np.maximum(damping[going] / 5, 1e-9), damping[going] * 6)
        little = np.where(lower, gained < 1e-9 * sums + 1e-18, damping[going] > 1e6)
        idle[going] = np.where(lower & ~little, 0, idle[going] + little)
        good = going[lower]
        laws[good], rest[good], best[good] = tried[lower], there[lower], sums[lower]
        going = going[idle[going] < 3]
        if not len(going):
            break
    return _moved(laws, middle), best


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
