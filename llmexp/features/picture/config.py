from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from llmexp.config.values import knob

SECTION = "metrics"
OFF = {"picture": False}


@dataclass(frozen=True, kw_only=True)
class Knobs:
    picture: bool = knob(
        "draw the curves into loss.png at the end of the run", False, affects="nothing"
    )


asked = attrgetter("metrics.picture")
