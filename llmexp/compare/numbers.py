"""Figures with as many digits as their uncertainty bears."""

from __future__ import annotations

import math

from llmexp.compare.table import shown


def with_interval(value: float, half: float | None, digits: int) -> str:
    """Return `2.564 ± 0.011`: two digits of the half width, and the value as far as those; `1,500` alone where the half
    width is less than can be seen in it."""
    place = digits - 1 - math.floor(math.log10(abs(value))) if value else 12  # decimals that the value shows
    if half is None or not math.isfinite(half) or half < 0.5 * 10.0**-place:
        return shown(value, digits)
    decimals = min(1 - math.floor(math.log10(half)), place + 1)
    if decimals <= 0:
        return f"{round(value, decimals):,.0f} ± {round(half, decimals):,.0f}"
    return f"{value:,.{decimals}f} ± {half:.{decimals}f}"
