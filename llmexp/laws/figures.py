"""Write figures with their intervals for a reader."""

from __future__ import annotations

import math

from llmexp.laws.law import Estimate

UNITS = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"), (1.0, ""))


def flops_text(flops: float) -> str:
    """Return FLOPs with three digits at most: 1e16, 2.15e18."""
    mantissa, _, power = f"{flops:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"


def plain(e: Estimate) -> str:
    """Return `0.49 [0.45, 0.54]`; `any` for an end that there is not."""
    if not all(map(math.isfinite, (e.value, e.low, e.high))):
        return f"{_short(e.value)} [{_short(e.low)}, {_short(e.high)}]"
    d = _decimals(e.low, e.high)
    return f"{e.value:.{d}f} [{e.low:.{d}f}, {e.high:.{d}f}]"


def sized(e: Estimate, what: str = "") -> str:
    """Return `8.2 M parameters [6.9, 9.8]`: ends in the unit of the value, if near enough."""
    (size, unit), what = _unit(e.value), f" {what}" if what else ""
    if not e.high < 100 * e.value or e.low < e.value / 100:
        return f"{big(e.value)}{what} [{big(e.low)}, {big(e.high)}]"
    d = _decimals(e.low / size, e.high / size)
    low, high = (f"{v / size:,.{d}f}" for v in (e.low, e.high))
    return f"{e.value / size:,.{d}f}{unit}{what} [{low}, {high}]"


def factor(e: Estimate) -> str:
    """Return `406 [389, 789]`, with three digits."""
    return f"{_short(e.value)} [{_short(e.low)}, {_short(e.high)}]"


def big(value: float) -> str:
    """Return `203 M`; with an exponent what is below 0.01 or above 10,000 T."""
    if not math.isfinite(value):
        return "any"
    size, unit = _unit(value)
    if not 0.01 <= value / size < 1e4:
        return f"{value:.1e}"
    return f"{float(f'{value / size:.3g}'):,.10g}{unit}"


def _unit(value: float) -> tuple[float, str]:
    return next(((s, u) for s, u in UNITS if value >= 0.9995 * s), UNITS[-1])


def _decimals(low: float, high: float) -> int:
    """Return how many decimals show an interval: one or two digits of its half width."""
    half = (high - low) / 2
    return max(0, min(6, math.ceil(-math.log10(half / 3)))) if half > 0 else 4


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "any"
