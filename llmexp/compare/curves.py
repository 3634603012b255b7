"""One quantity over training of the runs that differ in the seed alone: its rows, smoothed, and
fewer of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from llmexp.compare.figures import counts, positions
from llmexp.compare.records import Entry

AXES = ("tokens", "steps", "time")


@dataclass(frozen=True)
class Curve:
    """The rows that all runs of an entry have."""

    x: dict[str, np.ndarray]  # by axis; `steps` is always there
    y: np.ndarray  # [runs, rows], finite


def curve(entry: Entry, key: str) -> Curve | None:
    """Return the quantity over the steps that the entry's runs share; None where no run has it."""
    alive = [r for r in entry.runs if counts(r)] or list(entry.runs)
    runs = [r for r in alive if key in r.columns and np.isfinite(r.columns[key]).any()]
    if not runs:
        return None
    steps_of = [r.columns["step"][np.isfinite(r.columns[key])] for r in runs]
    steps = functools.reduce(np.intersect1d, steps_of)
    if not len(steps):
        runs, steps = runs[:1], steps_of[0]
    rows = [np.searchsorted(r.columns["step"], steps) for r in runs]
    x = {
        axis: np.mean([positions(r, axis)[at] for r, at in zip(runs, rows, strict=True)], axis=0)
        for axis in AXES
        if all(len(positions(r, axis)) for r in runs)
    }
    return Curve(x, np.stack([r.columns[key][at] for r, at in zip(runs, rows, strict=True)]))


def smooth(y: np.ndarray, share: float) -> np.ndarray:
    """Return the centred means over that share of the rows: without lag, and of fewer rows near the
    ends."""
    rows = y.shape[-1]
    reach = int(share * rows) // 2
    first, last = (
        np.maximum(np.arange(rows) - reach, 0),
        np.minimum(np.arange(rows) + reach + 1, rows),
    )
    sums = np.cumsum(np.insert(y, 0, 0.0, axis=-1), axis=-1)
    return np.asarray((sums[..., last] - sums[..., first]) / (last - first)) if reach else y


def downsample(y: np.ndarray, limit: int) -> np.ndarray:
    """Return ascending indices of at most `limit` (>= 4) known values with which a curve looks as
    before.

    The known values are cut into runs of equal length; of each its lowest and its highest value
    stay, and the first and the last value of all. So every spike stays visible, at the place where
    it was. What is not finite is left out. Raises ValueError for a smaller limit.
    """
    if limit < 4:
        raise ValueError(
            f"limit={limit}: at least 4 points are needed for the two ends and the two extremes"
        )
    known = np.flatnonzero(np.isfinite(y))
    if len(known) <= limit:
        return known
    inner = known[1:-1]
    width = -(-len(inner) // ((limit - 2) // 2))
    # The last bucket is filled up with its own last value, which changes neither its minimum nor
    # its maximum.
    buckets = inner[np.minimum(np.arange(-(-len(inner) // width) * width), len(inner) - 1)].reshape(
        -1, width
    )
    values = y[buckets]
    rows = np.arange(len(buckets))
    lowest, highest = buckets[rows, values.argmin(axis=1)], buckets[rows, values.argmax(axis=1)]
    return np.unique(np.concatenate([known[:1], lowest, highest, known[-1:]]))
