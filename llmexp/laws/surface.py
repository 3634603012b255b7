"""Fit E + A x^-alpha (one axis) or E + A N^-alpha + B D^-beta (two): many samples at a time.

For fixed exponents a law is linear in E, A and B (variable projection): the search begins at the
best of a grid of exponents, each with the least squares of the others. The fit itself minimises the
sum of Huber's function, delta 1e-3, of the differences of log losses, as Hoffmann et al. (2022).

A law is a row: log E, the logs of its k factors, its k exponents. `x` holds, for each axis, the log
of each run's figure there: (k, runs).
"""

from __future__ import annotations

import numpy as np

DELTA = 1e-3  # of Huber's function, in log loss
EXPONENTS = np.geomspace(0.02, 2.0, 33)  # tried before the search
BOUNDS = (0.005, 4.0)  # of an exponent
STARTS = 4  # places that the search begins at
WITHOUT_E = -40.0  # log E of a law without E
CHUNK = 50_000  # losses that are computed at a time


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


def huber(residuals: np.ndarray, delta: float = DELTA) -> np.ndarray:
    """Return the sums of Huber's function over the last axis."""
    size = np.abs(residuals)
    inside = np.minimum(size, delta)
    return np.asarray((inside * (size - inside / 2)).sum(axis=-1))


def fit(x: np.ndarray, logs: np.ndarray, with_e: bool = True) -> tuple[np.ndarray, float]:
    """Return the law that fits log losses best, and its Huber sum."""
    middle = x.mean(axis=1, keepdims=True)
    starts = _moved(_starts(x - middle, logs, with_e), middle)
    laws, sums = refine(starts, x, np.tile(logs, (len(starts), 1)), most=1000)
    return laws[np.argmin(sums)], float(sums.min())


def _moved(laws: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return the laws over x + by of laws over x."""
    k = len(by)
    factors = laws[:, 1 : 1 + k] + laws[:, 1 + k :] * by[:, 0]
    return np.concatenate([laws[:, :1], factors, laws[:, 1 + k :]], axis=1)


def refine(
    laws: np.ndarray, x: np.ndarray, logs: np.ndarray, delta: float = DELTA, most: int = 200
) -> tuple[np.ndarray, np.ndarray]:
    """Return laws near the given ones that fit samples of log losses best, and their Huber sums.

    Samples and laws are rows. `delta`: infinity makes it least squares.
    """
    middle, size = x.mean(axis=1, keepdims=True), max(1, CHUNK // logs.shape[1])
    laws, sums = _moved(laws, -middle), np.empty(len(logs))
    for part in (slice(i, i + size) for i in range(0, len(logs), size)):
        laws[part], sums[part] = _refine(laws[part], x - middle, logs[part], delta, most)
    return _moved(laws, middle), sums


def _refine(
    laws: np.ndarray, x: np.ndarray, logs: np.ndarray, delta: float, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Step to the least squares with Huber's weights about each law (Gauss-Newton).

    A step that does not lower the sum is not taken, and the next one is damped (Levenberg and
    Marquardt).
    """
    laws, rest = laws.copy(), log_losses(laws, x) - logs
    best, exponents = huber(rest, delta), slice(1 + len(x), None)
    damping, idle = np.full(len(laws), 2e-5), np.zeros(len(laws), int)
    going, diagonal = np.arange(len(laws)), np.arange(laws.shape[1])
    for _ in range(most):
        by = slopes(laws[going], x)
        size = np.maximum(np.abs(rest[going]), 1e-300)
        weighted = by * np.minimum(1, delta / size)[:, None, :]
        square = weighted @ by.transpose(0, 2, 1)
        scale = square[:, diagonal, diagonal]
        square[:, diagonal, diagonal] += (
            damping[going, None] * scale + 1e-12 * scale.max(axis=1, keepdims=True) + 1e-300
        )
        step = np.linalg.solve(square, -weighted @ rest[going, :, None])[:, :, 0]
        tried = laws[going] + np.clip(step, -2, 2)
        tried[:, exponents] = np.clip(tried[:, exponents], *BOUNDS)
        there = log_losses(tried, x) - logs[going]
        sums = huber(there, delta)
        lower, gained = sums < best[going], best[going] - sums
        damping[going] = np.where(lower, np.maximum(damping[going] / 5, 1e-9), damping[going] * 6)
        little = np.where(lower, gained < 1e-9 * sums + 1e-18, damping[going] > 1e6)
        idle[going] = np.where(lower & ~little, 0, idle[going] + little)
        good = going[lower]
        laws[good], rest[good], best[good] = tried[lower], there[lower], sums[lower]
        going = going[idle[going] < 3]
        if not len(going):
            break
    return laws, best


def _starts(x: np.ndarray, logs: np.ndarray, with_e: bool) -> np.ndarray:
    """Return laws to begin at: the best of a grid of exponents, each with the best E, A and B.

    These are the non-negative least squares of relative differences, solved for each choice of
    which of them are 0.
    """
    k, loss = len(x), np.exp(logs)
    grid = np.stack(np.meshgrid(*[EXPONENTS] * k, indexing="ij")).reshape(k, -1).T
    powers = np.exp(-grid[:, :, None] * x)
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
    factors = np.log(np.maximum(found[lowest], 1e-4 * loss.min()))
    if not with_e:
        factors[:, 0] = WITHOUT_E
    return np.concatenate([factors, grid[lowest]], axis=1)
