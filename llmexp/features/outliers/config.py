from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from llmexp.config.keys import Key
from llmexp.config.values import knob, usual, where

SECTION = "metrics"
SKIPPING = where(
    "metrics.skip_outliers",
    words="with metrics.skip_outliers; else a figure in the rows",
)


@dataclass(frozen=True, kw_only=True)
class Knobs:
    outlier_sigma: float | None = knob(
        "an outlier's loss or norm is this many standard deviations above its trailing window; "
        "null: no check",
        6.0,
        above=0,
        decides=SKIPPING,
    )
    outlier_window: int = usual(
        "optimizer steps in the trailing window",
        128,
        at_least=8,
        acts=where("metrics.outlier_sigma"),
        decides=SKIPPING,
    )
    skip_outliers: bool = knob(
        "skip the update of an outlier step", acts=where("metrics.outlier_sigma"), default=False
    )


KEYS = (
    Key("outlier_steps", "steps so far whose loss or norm was far above its trailing window",
        "outlier steps", better="lower"),
)  # fmt: skip

asked = attrgetter("metrics.outlier_sigma")
