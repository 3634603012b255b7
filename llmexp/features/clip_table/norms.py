"""Gradient norms of a run: how often and how strongly it clipped, and how other limits would have.

Norms are counted in logarithmic bins on the host, which reads every step's norm with the outcome of
that step.
"""

from __future__ import annotations

import math

from llmexp.config.values import Plain
from llmexp.train.clipping import EPSILON

PER_OCTAVE = 64  # bins: 1.1 % wide; every power of two is an edge
# EPSILON is added to norms: the lowest bin is that of 2**-20
LOWEST, HIGHEST = -20 * PER_OCTAVE, 20 * PER_OCTAVE - 1
QUANTILES = (50, 90, 99)  # per cent


class Norms:
    """Count the norms of a run's applied updates, before clipping.

    `limit` is that of its own clipping, None where the norm has none that stays; `moving`: it has
    another one at each step.
    """

    def __init__(self, limit: float | None = None, moving: bool = False) -> None:
        self.limit, self.moving = limit, moving
        self.steps = self.clipped = 0
        self._coefficients = 0.0
        # by number: how many, and the sum of 1 / (norm + EPSILON)
        self._bins: dict[int, list[float]] = {}

    def add(self, norm: float, clipped: bool, factor: float = 1.0) -> None:
        """Take an applied update: its finite norm, at least 0, and the factor on its gradient."""
        padded = norm + EPSILON
        number = min(max(math.floor(math.log2(padded) * PER_OCTAVE), LOWEST), HIGHEST)
        found = self._bins.setdefault(number, [0, 0.0])
        found[0] += 1
        found[1] += 1 / padded
        self.steps += 1
        self.clipped += clipped
        self._coefficients += factor

    def quantile(self, percent: float) -> float:
        """Return the upper edge of the bin that this quantile of the norm lies in.

        Needs at least one norm.
        """
        below = 0.0
        for number, (count, _) in sorted(self._bins.items()):
            below += count
            if below >= percent / 100 * self.steps:
                return 2 ** ((number + 1) / PER_OCTAVE)
        raise ValueError("no norm was counted")

    def at(self, limit: float) -> tuple[float, float]:
        """Return (share of steps clipped, mean coefficient) had these norms met this limit.

        It is exact where the limit is an edge of a bin; else the bin that it lies in is divided in
        proportion. Needs at least one norm.
        """
        if limit == self.limit:
            return self.clipped / self.steps, self._coefficients / self.steps
        above = inverse = 0.0  # sums round by their order: one that a resume does not change
        for number, (count, inverses) in sorted(self._bins.items()):
            low, high = 2 ** (number / PER_OCTAVE), 2 ** ((number + 1) / PER_OCTAVE)
            part = min(max((high - limit) / (high - low), 0.0), 1.0)
            if number == HIGHEST and limit < high:
                part = 1.0  # open above
            above += part * count
            inverse += part * inverses
        return above / self.steps, (self.steps - above + limit * inverse) / self.steps

    def summary(self) -> Plain:
        """Return what status.json holds: steps, share clipped, quantiles, a table of other limits.

        The table is right to the first order only: under another limit the run would have gone
        elsewhere. Empty where no norm was counted.
        """
        if not self.steps:
            return {}
        quantiles = {str(q): self.quantile(q) for q in QUANTILES}
        first, last = min(self._bins) // PER_OCTAVE, max(self._bins) // PER_OCTAVE + 1
        middle = math.floor(math.log2(quantiles["50"]))
        powers = range(max(first, middle - 3), min(last, middle + 4) + 1)
        limits = {*quantiles.values(), *(2.0**k for k in powers)}
        if self.limit is not None:
            limits.add(self.limit)
        table = []
        for limit in sorted(limits):
            share, mean = self.at(limit)
            table.append({"limit": limit, "share": share, "coefficient": mean})
        share = self.clipped / self.steps
        found: Plain = {"steps": self.steps, "share": share, "quantiles": quantiles, "table": table}
        if self.moving:
            found["own"] = {"share": share, "coefficient": self._coefficients / self.steps}
        return found

    def state_dict(self) -> Plain:
        bins = [[number, *found] for number, found in sorted(self._bins.items())]
        sums = [self.steps, self.clipped, self._coefficients]
        return {"sums": sums, "bins": bins}

    def load_state_dict(self, state: Plain) -> None:
        self.steps, self.clipped, self._coefficients = state["sums"]
        self._bins = {number: [count, inverses] for number, count, inverses in state["bins"]}


def clip_line(summary: Plain, own: float | None, what: str = "steps") -> str:
    """Return a summary as a line for a reader; `own` is the run's own limit, of `what` it clips.

    What other limits would have done is in status.json and on the page of a comparison.
    """
    row = next((row for row in summary["table"] if row["limit"] == own), None)
    row, at = summary.get("own") or row, " at moving limits" if "own" in summary else f" at {own}"
    parts = []
    if row:
        mean = f", mean coefficient {row['coefficient']:.3f}" if "coefficient" in row else ""
        parts.append(f"{100 * row['share']:.3g} % of {what} clipped{at}{mean}")
    if quantiles := [f"{q} % {value:.4g}" for q, value in summary["quantiles"].items()]:
        parts.append(f"quantiles {', '.join(quantiles)}")
    return "; ".join(parts)
