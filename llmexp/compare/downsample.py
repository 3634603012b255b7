"""Fewer points of a curve, and none of its extremes lost."""

from __future__ import annotations

import numpy as np


def downsample(y: np.ndarray, limit: int) -> np.ndarray:
    """Where to read a curve so that it looks as before: ascending indices of at most `limit` (>= 4) known values.

    The known values are cut into runs of equal length; of each its lowest and its highest value stay, and the first
    and the last value of all. So every spike stays visible, at the place where it was. What is not finite is left out.
    Raises ValueError for a smaller limit.
    """
    if limit < 4:
        raise ValueError(f"limit={limit}: at least 4 points are needed for the two ends and the two extremes")
    known = np.flatnonzero(np.isfinite(y))
    if len(known) <= limit:
        return known
    inner = known[1:-1]
    width = -(-len(inner) // ((limit - 2) // 2))
    # The last bucket is filled up with its own last value, which changes neither its minimum nor its maximum.
    buckets = inner[np.minimum(np.arange(-(-len(inner) // width) * width), len(inner) - 1)].reshape(-1, width)
    values = y[buckets]
    rows = np.arange(len(buckets))
    lowest, highest = buckets[rows, values.argmin(axis=1)], buckets[rows, values.argmax(axis=1)]
    return np.unique(np.concatenate([known[:1], lowest, highest, known[-1:]]))
