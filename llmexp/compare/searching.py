"""Find out which knobs of a search mattered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmexp.compare.records import Record

RESAMPLED = 400
_SPARE = 5  # degrees of freedom that the noise needs


@dataclass(frozen=True)
class Importance:
    """The share of the order of the trials' losses that a knob explains beyond the others."""

    key: str
    share: float
    low: float  # ends of its 95 % interval
    high: float
    told: bool  # whether chance alone would hardly make it so large


def importances(trials: Sequence[Record], keys: Sequence[str], metric: str) -> list[Importance]:
    """Return what each knob explains of the ranks of the losses beyond all others.

    By least squares: a number has a parabola, of its logarithm where it spans a decade; anything
    else has a level each. Intervals are quantiles over resampled trials. A knob is told by an F
    test, with Holm's correction for all of them. Empty where trials are too few.
    """
    from scipy.special import fdtrc

    losses = np.array([r.figures[metric] for r in trials])
    ranks = losses.argsort().argsort().astype(float)
    blocks = [_columns([r.config.get(key) for r in trials]) for key in keys]
    every = np.arange(len(trials))
    spare = len(trials) - int(np.linalg.matrix_rank(_design(blocks, every)))
    if spare < _SPARE:
        return []
    shares, left = _shares(blocks, ranks, every)
    random = np.random.default_rng(0)
    again = [_shares(blocks, ranks, random.choice(every, len(every))) for _ in range(RESAMPLED)]
    low, high = np.quantile([one for one, _ in again], (0.025, 0.975), axis=0)
    sizes = np.array([block.shape[1] for block in blocks])
    p = fdtrc(sizes, spare, shares / sizes / (max(left, 1e-12) / spare))
    told, going = np.zeros(len(keys), bool), True
    for number, i in enumerate(np.argsort(p)):
        going = going and bool(p[i] * (len(keys) - number) < 0.05)
        told[i] = going
    columns = (found.tolist() for found in (shares, low, high, told))
    return list(map(Importance, keys, *columns))


def _columns(values: Sequence[object]) -> np.ndarray:
    """Return what a knob puts into the design."""
    if all(type(v) in (int, float) for v in values):
        x = np.array(values, dtype=float)
        x = np.log(x) if x.min() > 0 and x.max() >= 10 * x.min() else x
        x = (x - x.mean()) / (x.std() or 1.0)
        return np.stack([x, x**2], axis=1)[:, : len(np.unique(x)) - 1]
    levels = sorted(set(map(repr, values)))[1:]
    return np.array([[repr(v) == level for level in levels] for v in values], dtype=float)


def _design(blocks: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray:
    return np.hstack([np.ones((len(rows), 1)), *(block[rows] for block in blocks)])


def _shares(
    blocks: Sequence[np.ndarray], ranks: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, float]:
    """Return the share of the squares that each knob explains beyond the others, and the rest."""
    y = ranks[rows] - ranks[rows].mean()

    def left(without: int | None = None) -> float:
        design = _design([b for i, b in enumerate(blocks) if i != without], rows)
        return float(((y - design @ np.linalg.lstsq(design, y, rcond=None)[0]) ** 2).sum())

    whole, rest = float((y**2).sum()) or 1.0, left()
    return np.array([left(i) - rest for i in range(len(blocks))]) / whole, rest / whole
