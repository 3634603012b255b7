from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmexp.config.clipping import ClipRule
from llmexp.config.keys import Key
from llmexp.config.values import usual, where

SECTION = "clip"
CLIP_RULES = {"adaptive": ClipRule("ratio", "units", by_steps=False)}


@dataclass(frozen=True, kw_only=True)
class Knobs:
    ratio: float = usual(
        "largest norm of a unit's gradient, of the norm of its weights",
        0.01,
        above=0,
        acts=where("clip.kind", "adaptive"),
    )


KEYS = (Key("clipped_units", "share of units that this step clipped"),)


def asked(config: Any) -> bool:
    return config.clip.kind in CLIP_RULES
