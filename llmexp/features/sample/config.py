from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from llmexp.config.values import count, knob, where

SECTION = "train"
OFF = {"sample_every": None, "sample_tokens": 0}
SOMETIMES = ("sample_every",)


@dataclass(frozen=True, kw_only=True)
class Knobs:
    sample_every: int | None = count(
        "optimizer steps between text samples; null: only at the end",
        100,
        affects="nothing",
        acts=where("train.sample_tokens"),
        default=None,
    )
    sample_tokens: int = knob(
        "tokens per text sample; 0: no sample", 120, at_least=0, affects="nothing"
    )


asked = attrgetter("train.sample_tokens")
