from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmexp.config.clipping import ClipRule
from llmexp.config.keys import Key
from llmexp.config.values import usual, where

SECTION = "clip"
CLIP_RULES = {"update": ClipRule("threshold", "tensors", by_steps=False)}


@dataclass(frozen=True, kw_only=True)
class Knobs:
    threshold: float = usual(
        "largest RMS of AdamW's update of a tensor, before the rate (StableAdamW: 1)",
        1.0,
        above=0,
        acts=where("clip.kind", "update"),
    )


KEYS = (Key("clipped_tensors", "share of tensors whose update this step limited"),)


def asked(config: Any) -> bool:
    return config.clip.kind in CLIP_RULES
