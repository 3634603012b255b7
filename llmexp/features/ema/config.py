from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from llmexp.config.values import optional

SECTION = "train"
WEIGHTS = {"ema": ("the average that train.ema keeps", "train.ema=0.999")}


@dataclass(frozen=True, kw_only=True)
class Knobs:
    ema: float | None = optional(
        "decay per update of an average of the weights, scored and saved beside them; null: none",
        0.999,
        above=0,
        at_most=0.99999,
    )


COPIES_OF_WEIGHTS = 1  # a rank holds its part of them once more
asked = attrgetter("train.ema")
