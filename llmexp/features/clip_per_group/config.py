from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmexp.config.clipping import ClipRule
from llmexp.config.values import knob, where

SECTION = "clip"
CLIP_RULES = {"per_group": ClipRule()}


@dataclass(frozen=True, kw_only=True)
class GroupLimit:
    """The limit of the parameters whose names a pattern matches."""

    match: str = knob("pattern of names, as in a shell; the first that matches", "*.attention.*")
    max_norm: float | None = knob("limit of their gradient's norm; null: none", 1.0, above=0)


EXAMPLE = [{"match": "*.attention.*", "max_norm": 0.5}, {"match": "*", "max_norm": 1.0}]


@dataclass(frozen=True, kw_only=True)
class Knobs:
    limits: list[GroupLimit] = knob(
        "limits of the norm by pattern of parameter names; the first that matches counts",
        EXAMPLE,
        acts=where("clip.kind", "per_group"),
        default=[],
    )


def asked(config: Any) -> bool:
    return config.clip.kind in CLIP_RULES
