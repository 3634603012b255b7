"""The middle of values, which values far off do not move."""

from __future__ import annotations

import statistics
from collections.abc import Collection

ROBUST = 1.4826  # standard deviations in a median distance from the median, for normal values


def middle(values: Collection[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation by the median distance from it.

    Values that are far off widen neither.
    """
    median = statistics.median(values)
    return median, ROBUST * statistics.median(abs(value - median) for value in values)
