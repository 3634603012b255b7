"""Count what rules of clipping look at besides the norm, and what other limits would have done."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmexp.metrics.norms import Norms


class _Ladder:
    """Count how many of a step's units a rule clipped, and how many other limits would have.

    The limits are the own one times powers of two; `figures` of a step, from the device, are the
    number of units, how many were above each limit, and the sum of the factors at each.
    """

    def __init__(self, limit: float, powers: range) -> None:
        self.limit = limit
        self._limits = [limit * 2.0**k for k in powers]
        self._own = 1 + powers.index(0)
        self.size = 1 + 2 * len(powers)
        self._sums = [0.0] * self.size

    def add(self, figures: Sequence[float]) -> None:
        """Take the figures of an applied update."""
        self._sums = [a + b for a, b in zip(self._sums, figures, strict=True)]

    def shares(self, figures: Sequence[float]) -> tuple[float, float] | None:
        """Return (share of units clipped, mean factor) of an update; None without a unit."""
        count, clipped, factors = (
            figures[i] for i in (0, self._own, self._own + len(self._limits))
        )
        return (clipped / count, min(1.0, factors / count)) if count else None

    def summary(self) -> dict[str, Any]:
        """Return what status.json holds: share clipped, a table of other limits; or nothing."""
        count, places = self._sums[0], len(self._limits)
        if not count:
            return {}
        above, factors = self._sums[1 : 1 + places], self._sums[1 + places :]
        table = [
            {"limit": limit, "share": a / count, "coefficient": f / count}
            for limit, a, f in zip(self._limits, above, factors, strict=True)
        ]
        share = self._sums[self._own] / count
        return {"limit": self.limit, "share": share, "quantiles": {}, "table": table}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": list(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = list(state["sums"])


class Measures:
    """Count what a rule looks at besides the norm, from the figures of each applied update.

    `values` are the keys of figures that are a number a step, with the limit of each; `units` names
    what a rule clips one by one, with its limit. The figures come in this order.
    """

    def __init__(
        self, values: Mapping[str, float | None], units: Mapping[str, float], powers: range
    ) -> None:
        self._values = {key: Norms("norm", limit) for key, limit in values.items()}
        self._units = {key: _Ladder(limit, powers) for key, limit in units.items()}

    def __bool__(self) -> bool:
        """Return whether anything is counted."""
        return bool(self._values or self._units)

    def add(self, figures: Sequence[float]) -> None:
        """Take the figures of an applied update."""
        for norms, value in zip(self._values.values(), figures, strict=False):
            if math.isfinite(value):  # a limit may be none
                norms.add(max(value, 0.0), norms.limit is not None and value > norms.limit)
        for _, ladder, own in self._by_unit(figures):
            ladder.add(own)

    def _by_unit(self, figures: Sequence[float]) -> Iterator[tuple[str, _Ladder, Sequence[float]]]:
        at = len(self._values)
        for key, ladder in self._units.items():
            yield key, ladder, figures[at : at + ladder.size]
            at += ladder.size

    def row(self, figures: Sequence[float]) -> dict[str, float]:
        """Return what the row of an applied update says of it.

        That is the values, the shares of units, and the mean factor of those that are no heads.
        """
        found = dict(zip(self._values, figures, strict=False))
        for key, ladder, own in self._by_unit(figures):
            if shares := ladder.shares(own):
                found[f"clipped_{key}"] = shares[0]
                if key != "heads":
                    found["clip_coefficient"] = shares[1]
        return found

    def summary(self) -> dict[str, Any]:
        """Return for each value and kind of unit what status.json holds, where it was measured."""
        found = {}
        for key, norms in self._values.items():
            if summary := norms.summary():
                table = [
                    {k: v for k, v in row.items() if k != "coefficient"} for row in summary["table"]
                ]
                found[key] = {"limit": norms.limit} | summary | {"table": table}
        return found | {key: s for key, one in self._units.items() if (s := one.summary())}

    def state_dict(self) -> dict[str, Any]:
        return {key: one.state_dict() for key, one in (self._values | self._units).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, one in (self._values | self._units).items():
            if key in state:
                one.load_state_dict(state[key])
