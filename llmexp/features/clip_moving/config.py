from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmexp.config.clipping import ClipRule
from llmexp.config.keys import Key
from llmexp.config.values import count, usual, where

SECTION = "clip"
CLIP_RULES = dict.fromkeys(("zscore", "quantile"), ClipRule(max_norm=True))


@dataclass(frozen=True, kw_only=True)
class Knobs:
    z: float = usual(
        "standard deviations above the mean of the norms from which zscore clips",
        2.5,
        above=0,
        acts=where("clip.kind", "zscore"),
    )
    decay: float = usual(
        "decay per update of mean and variance of the norms",
        0.97,
        above=0,
        below=1,
        acts=where("clip.kind", "zscore"),
    )
    quantile: float = usual(
        "quantile of the last norms that is the limit",
        0.9,
        above=0,
        below=1,
        acts=where("clip.kind", "quantile"),
    )
    window: int = count(
        "updates whose norms the quantile is of",
        128,
        acts=where("clip.kind", "quantile"),
        default=128,
    )
    warmup_steps: int = count(
        "updates before zscore and quantile give a limit",
        25,
        acts=where("clip.kind", *CLIP_RULES),
        default=25,
    )


KEYS = (
    Key("clip_limit", "limit of the gradient norm, where it moves",
        plot="Limit of the gradient norm"),
)  # fmt: skip


def asked(config: Any) -> bool:
    return config.clip.kind in CLIP_RULES
