"""Fit E + A x^-alpha (one axis) or E + A N^-alpha + B D^-beta (two): many samples at a time.

For fixed exponents a law is linear in E, A and B (variable projection): the search begins at the
best of a grid of exponents, each with the least squares of the others. The fit itself minimises the
sum of Huber's function, delta 1e-3, of the differences of log losses, as Hoffmann et al. (2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DELTA = 1e-3  # of Huber's function, in log loss
EXPONENTS = np.geomspace(0.02, 2.0, 33)  # tried before the search
BOUNDS = (0.005, 4.0)  # of an exponent
STARTS = 4  # places that the search begins at
WITHOUT_E = -40.0  # log E of a law without E
CHUNK = 50_000  # losses that are computed at a time


@dataclass(frozen=True)
class Axes:
    """Hold what the terms are powers of: log x of each run, about the middle of all runs."""

    logs: np.ndarray  # (axes, runs)
    middle: np.ndarray  # (axes, 1)

    @classmethod
    def of(cls, *values: np.ndarray) -> Axes:
        """Return the axes of figures of runs, such as N and D."""
        logs = np.log(np.array(values, dtype=float))
        middle = logs.mean(axis=1, keepdims=True)
        return cls(logs - middle, middle)

    def at(self, *logs: np.ndarray) -> Axes:
        """Return axes with the same middle for other log values."""
        return Axes(np.array(logs, dtype=float) - self.middle, self.middle)

    def take(self, chosen: np.ndarray) -> Axes:
        """Return the axes of some of the runs."""
        return Axes(self.logs[:, chosen], self.middle)

    def factors(self, laws: np.ndarray) -> np.ndarray:
        """Return log A, log B of each law, which holds the logs of its terms in the middle."""
        k = len(self.logs)
        return np.asarray(laws[:, 1 : 1 + k] + laws[:, 1 + k :] * self.middle[:, 0])


def log_losses(laws: np.ndarray, axes: Axes) -> np.ndarray:
    """Return the log loss of each law (log E, logs of the terms in the middle, exponents)."""
    return np.asarray(np.log(sum(_terms(laws, axes))))


def _terms(laws: np.ndarray, axes: Axes) -> list[np.ndarray]:
    k = len(axes.logs)
    found = [laws[:, 1 + i, None] - laws[:, 1 + k + i, None] * axes.logs[i] for i in range(k)]
    return [np.exp(np.broadcast_to(laws[:, :1], found[0].shape)), *map(np.exp, found)]


def slopes(laws: np.ndarray, axes: Axes) -> np.ndarray:
    """Return d log loss / d each number of each law: (laws, numbers, runs)."""
    terms = _terms(laws, axes)
    shares = [term / sum(terms) for term in terms]
    exponents = [-share * x for share, x in zip(shares[1:], axes.logs, strict=True)]
    return np.stack([*shares, *exponents], axis=1)


def huber(residuals: np.ndarray, delta: float = DELTA) -> np.ndarray:
    """Return the sums of Huber's function over the last axis."""
    size = np.abs(residuals)
    inside = np.minimum(size, delta)
    return np.asarray((inside * (size - inside / 2)).sum(axis=-1))


def refine(
    laws: np.ndarray, axes: Axes, logs: np.ndarray, delta: float = DELTA, most: int = 200
) -> tuple[np.ndarray, np.ndarray]:
    """Return laws near the given ones that fit samples of log losses best, and their Huber sums.

    Samples and laws are rows. `delta`: infinity makes it least squares.
    """
    size = max(1, CHUNK // logs.shape[1])
    parts = [
        _refine(laws[i : i + size].copy(), axes, logs[i : i + size], delta, most)
        for i in range(0, len(logs), size)
    ]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _refine(
    laws: np.ndarray, axes: Axes, logs: np.ndarray, delta: float, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Step to the least squares with Huber's weights about each law (Gauss-Newton).

    A step that does not lower the sum is taken back and damped (Levenberg and Marquardt).
    """
    count, width = laws.shape
    best, damping, idle = np.full(count, np.inf), np.full(count, 1e-4), np.zeros(count, int)
    square, slope = np.zeros((count, width, width)), np.zeros((count, width))
    tried, going, diagonal = laws.copy(), np.arange(count), np.arange(width)
    for _ in range(most):
        residuals = log_losses(tried[going], axes) - logs[going]
        sums = huber(residuals, delta)
        lower = sums < best[going]
        good, bad, residuals = going[lower], going[~lower], residuals[lower]
        little = best[good] - sums[lower] < 1e-9 * sums[lower] + 1e-18
        best[good], laws[good] = sums[lower], tried[good]
        damping[good], damping[bad] = np.maximum(damping[good] / 5, 1e-9), damping[bad] * 6
        idle[good], idle[bad] = (
            np.where(little, idle[good] + 1, 0),
            idle[bad] + (damping[bad] > 1e6),
        )
        by = slopes(laws[good], axes)
        weighted = by * np.minimum(1, delta / np.maximum(np.abs(residuals), 1e-300))[:, None, :]
        square[good] = weighted @ by.transpose(0, 2, 1)
        slope[good] = (weighted @ residuals[:, :, None])[:, :, 0]
        going = going[idle[going] < 3]
        if not len(going):
            break
        matrix = square[going]
        scale = matrix[:, diagonal, diagonal]
        matrix[:, diagonal, diagonal] += (
            damping[going, None] * scale + 1e-12 * scale.max(axis=1, keepdims=True) + 1e-300
        )
        step = np.linalg.solve(matrix, -slope[going][:, :, None])[:, :, 0]
        tried[going] = laws[going] + np.clip(step, -2, 2)
        exponents = slice(1 + len(axes.logs), None)
        tried[going, exponents] = np.clip(tried[going, exponents], *BOUNDS)
    return laws, best


def projected(axes: Axes, logs: np.ndarray, with_e: bool = True) -> np.ndarray:
    """Return laws to begin at: the best of a grid of exponents, each with the best E, A and B.

    These are the non-negative least squares of relative differences, solved for each choice of
    which of them are 0.
    """
    k, loss = len(axes.logs), np.exp(logs)
    grid = np.stack(np.meshgrid(*[EXPONENTS] * k, indexing="ij")).reshape(k, -1).T
    powers = np.exp(-grid[:, :, None] * axes.logs)
    columns = np.concatenate([np.ones((len(grid), 1, len(loss))), powers], axis=1) / loss
    square, right = columns @ columns.transpose(0, 2, 1), columns.sum(axis=2)
    best, found = np.full(len(grid), np.inf), np.zeros((len(grid), 1 + k))
    for chosen in range(1, 2 ** (1 + k)):
        on = [i for i in range(1 + k) if chosen >> i & 1]
        if on[0] == 0 and not with_e:
            continue
        part = square[:, on][:, :, on] + 1e-13 * len(loss) * np.eye(len(on))
        solved = np.linalg.solve(part, right[:, on, None])[:, :, 0]
        rest = len(loss) - (solved * right[:, on]).sum(axis=1)
        good = (solved >= 0).all(axis=1) & (rest < best)
        best[good], found[good] = rest[good], 0
        found[np.ix_(good, on)] = solved[good]
    lowest = np.argsort(best)[:STARTS]
    laws = np.concatenate([np.log(np.maximum(found[lowest], 1e-4 * loss.min())), grid[lowest]], 1)
    if not with_e:
        laws[:, 0] = WITHOUT_E
    return laws


def fit(axes: Axes, logs: np.ndarray, with_e: bool = True) -> tuple[np.ndarray, float]:
    """Return the law that fits log losses best, and its Huber sum."""
    starts = projected(axes, logs, with_e)
    laws, sums = refine(starts, axes, np.tile(logs, (len(starts), 1)), most=1000)
    return laws[np.argmin(sums)], float(sums.min())
