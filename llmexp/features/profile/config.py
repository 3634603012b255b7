from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from llmexp.config.values import count, where

SECTION = "train"
OFF = {"profile_start": None}
NO_WORK = ("profile_start", "profile_steps")


@dataclass(frozen=True, kw_only=True)
class Knobs:
    profile_start: int | None = count(
        "first optimizer step of a torch.profiler trace; null: no trace",
        10,
        affects="nothing",
        a_step=True,
    )
    profile_steps: int = count(
        "optimizer steps in the trace",
        3,
        affects="nothing",
        acts=where("train.profile_start"),
        default=3,
    )


asked = attrgetter("train.profile_start")
