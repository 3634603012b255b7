from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TypedDict

from llmexp.config.values import knob, where

FOLDER = "spikes"  # of a run
SECTION = "metrics"


@dataclass(frozen=True, kw_only=True)
class Knobs:
    spikes: bool = knob(
        "record each spike, and the ten steps before it layer by layer, in spikes/STEP.json",
        affects="nothing",
        acts=where("metrics.outlier_sigma"),
        default=False,
    )


class Spikes(TypedDict, total=False):
    spikes: int
    spike_tokens: int
    rose_first: dict[str, str | int]  # a module, and how often


class Status(TypedDict, total=False):
    spikes: Spikes


asked = attrgetter("metrics.spikes")


needs_layers = asked  # of each step
