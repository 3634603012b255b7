"""Count what limits are of besides the norm, and what other limits would have done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmexp.features.clip_table.norms import Norms
from llmexp.train.limiting import RUNGS, SIZE, Limiting, sums_of


class Measures:
    """Count the figures of each applied update that features have measured, by their keys."""

    def __init__(self, measured: Sequence[Limiting]) -> None:
        self._values = {k: Norms(limit) for one in measured for k, limit in one.values.items()}
        self._limits = {key: limit for one in measured for key, limit in one.units.items()}
        self._sums = {key: [0.0] * SIZE for key in self._limits}

    def add(self, figures: Mapping[str, float]) -> None:
        """Take the figures of an applied update."""
        for key, norms in self._values.items():
            value = figures.get(key, math.inf)
            if math.isfinite(value):  # a limit may be none
                above = norms.limit is not None and value > norms.limit
                norms.add(max(value, 0.0), above)
        for key, sums in self._sums.items():
            if found := sums_of(figures, key):
                self._sums[key] = [a + b for a, b in zip(sums, found, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Return for each value and kind of unit what status.json holds, where it was measured."""
        found = {}
        for key, norms in self._values.items():
            if summary := norms.summary():
                table = [
                    {k: v for k, v in row.items() if k != "coefficient"} for row in summary["table"]
                ]
                found[key] = {"limit": norms.limit} | summary | {"table": table}
        return found | {
            key: self._of_units(key) for key, (count, *_) in self._sums.items() if count
        }

    def _of_units(self, key: str) -> dict[str, Any]:
        """Return the share of units clipped, and a table of other limits (`limiting.on_ladder`)."""
        limit, (count, *sums) = self._limits[key], self._sums[key]
        pairs = zip(RUNGS, sums[: len(RUNGS)], sums[len(RUNGS) :], strict=True)
        table = [
            {"limit": limit * 2.0**k, "share": a / count, "coefficient": f / count}
            for k, a, f in pairs
        ]
        share = table[RUNGS.index(0)]["share"]
        return {"limit": limit, "share": share, "quantiles": {}, "table": table}

    def state_dict(self) -> dict[str, Any]:
        return {key: one.state_dict() for key, one in self._values.items()} | self._sums

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, norms in self._values.items():
            norms.load_state_dict(state[key])
        self._sums = {key: state[key] for key in self._sums}
