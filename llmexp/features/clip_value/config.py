from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmexp.config.clipping import ClipRule
from llmexp.config.keys import Key
from llmexp.config.values import optional, where

SECTION = "clip"
CLIP_RULES = {"value": ClipRule("max_value", by_steps=False)}


@dataclass(frozen=True, kw_only=True)
class Knobs:
    max_value: float | None = optional(
        "limit of each gradient entry; null: no limit",
        0.5,
        above=0,
        acts=where("clip.kind", "value"),
    )


KEYS = (Key("grad_entry_max", "largest entry of the gradient, before clipping by value"),)


def asked(config: Any) -> bool:
    return config.clip.kind in CLIP_RULES
