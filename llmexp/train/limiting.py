"""Measure what a limit is of, besides the norm of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llmexp.data.window import Window
from llmexp.train.clipping import Rule
from llmexp.train.feature import Feature

RUNGS = range(-4, 5)  # limits that are tried beside the own one: that x 2**k
_OWN = 1 + RUNGS.index(0)
SIZE = 1 + 2 * len(RUNGS)  # figures of a step


class Limiting(Feature):
    """Put into the rows what a feature limits, from the figures of each applied update.

    `values` are the keys of figures that are a number a step, with the limit of each; `units` names
    what is clipped one by one, with its limit (`as_figures`). `features.clip_table` counts them.
    """

    values: Mapping[str, float | None] = {}
    units: Mapping[str, float] = {}
    found: Mapping[str, Any] = {}  # in the step
    outcome: Any = None  # the `Outcome` of the last step

    def figures(self, targets: Any, scale: Tensor) -> dict[str, Any]:
        found, self.found = dict(self.found), {}
        return found

    def finished(self, outcome: Any) -> None:
        super().finished(outcome)
        self.outcome = outcome

    def row(self, window: Window) -> dict[str, Any]:
        found, outcome = super().row(window), self.outcome
        if outcome is None or outcome.skipped:
            return found
        found |= {key: outcome.more[key] for key in self.values if key in outcome.more}
        shares = ((unit, shares_of(outcome.more, unit)) for unit in self.units)
        return found | {f"clipped_{unit}": pair[0] for unit, pair in shares if pair}


class LimitingRule(Limiting, Rule):
    """Be a rule whose limit is of something else than the norm of the whole gradient."""

    def factor(self, outcome: Any) -> float | None:
        """Return the mean factor of what is clipped one by one."""
        shares = [shares_of(outcome.more, unit) for unit in self.units]
        return shares[0][1] if shares and shares[0] else None


def on_ladder(values: Tensor, limit: float) -> Tensor:
    """Return for each value 1, whether it is above each rung of a limit, and min(1, rung / value).

    The rungs are limit x 2**k for k in RUNGS; the result is float64, (values, SIZE), of which sums
    are taken.
    """
    exponents = torch.arange(RUNGS.start, RUNGS.stop, device=values.device, dtype=torch.float64)
    limits = limit * 2.0**exponents
    values = values.double().reshape(-1, 1)
    factors = (limits / values).clamp(max=1.0)
    return torch.cat((torch.ones_like(values), values > limits, factors), 1)


def as_figures(unit: str, sums: Tensor) -> dict[str, Tensor]:
    """Return the sums of `on_ladder` as figures of a step."""
    return {f"{unit}/{i}": value for i, value in enumerate(sums)}


def sums_of(figures: Mapping[str, float], unit: str) -> list[float]:
    """Return the sums that are among the figures of a step; none where they are not."""
    return [figures[f"{unit}/{i}"] for i in range(SIZE) if f"{unit}/{i}" in figures]


def shares_of(figures: Mapping[str, float], unit: str) -> tuple[float, float] | None:
    """Return (share of units clipped, mean factor) of an update; None without a unit."""
    sums = sums_of(figures, unit)
    if not sums or not sums[0]:
        return None
    return sums[_OWN] / sums[0], min(1.0, sums[_OWN + len(RUNGS)] / sums[0])
