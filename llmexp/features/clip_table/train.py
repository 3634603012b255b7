from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmexp.features.clip_table.measures import Measures
from llmexp.features.clip_table.norms import Norms, clip_line
from llmexp.train.assembly.assemble import Parts
from llmexp.train.clipping import Rule
from llmexp.train.feature import Feature, starting
from llmexp.train.limiting import Limiting
from llmexp.train.step import Outcome, Setup


def make(parts: Parts, setup: Setup) -> ClipTable:
    return ClipTable(setup.clipping, [f for f in setup.features if isinstance(f, Limiting)])


class ClipTable(Feature):
    """Count the gradient norms of applied updates, and what else was measured of them."""

    name = "clip"

    def __init__(self, rule: Rule, measured: Sequence[Limiting]) -> None:
        self._rule = rule
        self.norms, self.measures = Norms(rule.max_norm, rule.moving), Measures(measured)

    def finished(self, seen: Outcome) -> None:
        if not seen.skipped:
            factor = self._rule.factor(seen)
            self.norms.add(seen.grad_norm, seen.clipped, 1.0 if factor is None else factor)
            self.measures.add(seen.more)

    def summary(self) -> dict[str, Any]:
        norms = self.norms
        return {"clipped_share": norms.clipped / norms.steps} if norms.steps else {}

    def status(self) -> dict[str, Any]:
        clip, measures = self.norms.summary(), self.measures.summary()
        return clip | ({"measures": measures} if clip and measures else {})

    def words(self) -> list[tuple[str, str]]:
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

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self.norms.state_dict(), "measures": self.measures.state_dict()}

    def load_state_dict(self, state: dict[str, Any], anew: bool) -> None:
        if not anew:
            self.norms.load_state_dict(state["norms"])
            self.measures.load_state_dict(state["measures"])
