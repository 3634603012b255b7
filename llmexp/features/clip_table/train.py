from __future__ import annotations

import math
from collections.abc import Sequence

from llmexp.config.values import Plain
from llmexp.features.clip_table.norms import Norms, clip_line
from llmexp.system.text import Note
from llmexp.train.assembly.assemble import Parts
from llmexp.train.clipping import Rule
from llmexp.train.feature import Feature, starting
from llmexp.train.limiting import RUNGS, SIZE, Limiting, sums_of
from llmexp.train.step import Outcome, Setup


def make(parts: Parts, setup: Setup) -> ClipTable:
    return ClipTable(setup.clipping, [f for f in setup.features if isinstance(f, Limiting)])


class ClipTable(Feature):
    """Count the gradient norms of applied updates, and what else limits are of."""

    name = "clip"

    def __init__(self, rule: Rule, limiting: Sequence[Limiting]) -> None:
        self._rule, self.norms = rule, Norms(rule.max_norm, rule.moving)
        self._values = {k: Norms(limit) for one in limiting for k, limit in one.values.items()}
        self._limits = {key: limit for one in limiting for key, limit in one.units.items()}
        self._sums = {key: [0.0] * SIZE for key in self._limits}

    def finished(self, outcome: Outcome) -> None:
        if outcome.skipped:
            return
        factor = self._rule.factor(outcome)
        self.norms.add(outcome.grad_norm, outcome.clipped, 1.0 if factor is None else factor)
        for key, norms in self._values.items():
            value = outcome.more.get(key, math.inf)
            if math.isfinite(value):  # a limit may be none
                norms.add(max(value, 0.0), norms.limit is not None and value > norms.limit)
        for key, sums in self._sums.items():
            if found := sums_of(outcome.more, key):
                self._sums[key] = [a + b for a, b in zip(sums, found, strict=True)]

    def summary(self) -> Plain:
        norms = self.norms
        return {"clip_fraction": norms.clipped / norms.steps} if norms.steps else {}

    def status(self) -> Plain:
        measures = {}
        for key, norms in self._values.items():
            if summary := norms.summary():
                for row in summary["table"]:
                    del row["coefficient"]
                measures[key] = {"limit": norms.limit} | summary
        counted = [key for key, sums in self._sums.items() if sums[0]]
        measures |= {key: of_units(self._limits[key], self._sums[key]) for key in counted}
        clip = self.norms.summary()
        if clip and measures:
            clip["measures"] = measures
        return clip

    def words(self) -> list[Note]:
        if not (clip := self.status()):
            return []
        found = [("clipping", clip_line(clip, self.norms.limit))]
        for key, one in clip.get("measures", {}).items():
            what = "steps" if "steps" in one else key
            found.append((key, clip_line(one, one["limit"], what)))
        return found

    def begins_anew(self, changed: Sequence[str]) -> bool:
        """Shares at two limits cannot be added."""
        return bool(starting(changed, "clip."))

    def state_dict(self) -> Plain:
        measures = {key: norms.state_dict() for key, norms in self._values.items()}
        return {"norms": self.norms.state_dict(), "measures": measures | self._sums}

    def load_state_dict(self, state: Plain, anew: bool) -> None:
        if anew:
            return
        self.norms.load_state_dict(state["norms"])
        measures = state["measures"]
        for key in self._values.keys() & measures:  # features may have come since
            self._values[key].load_state_dict(measures[key])
        self._sums |= {key: measures[key] for key in self._sums.keys() & measures}


def of_units(limit: float, sums: Sequence[float]) -> Plain:
    """Return the share of units that were clipped, and a table of other limits, from their sums.

    The limits are the own one times powers of two (`limiting.on_ladder`).
    """
    count, *sums = sums
    pairs = zip(RUNGS, sums[: len(RUNGS)], sums[len(RUNGS) :], strict=True)
    table = [
        {"limit": limit * 2.0**k, "share": a / count, "coefficient": f / count} for k, a, f in pairs
    ]
    share = table[RUNGS.index(0)]["share"]
    return {"limit": limit, "share": share, "quantiles": {}, "table": table}
