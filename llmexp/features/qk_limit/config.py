from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from llmexp.config.keys import Key
from llmexp.config.values import optional

SECTION = "clip"


@dataclass(frozen=True, kw_only=True)
class Knobs:
    qk_limit: float | None = optional(
        "beside any rule: queries and keys of a head are scaled down after a step whose largest "
        "attention logit was above it (QK-Clip: 100); null: never",
        100.0,
        above=0,
    )


KEYS = (
    Key("attention_logit_max", "largest attention logit of this step"),
    Key("clipped_heads", "share of heads that this step scaled"),
)

asked = attrgetter("clip.qk_limit")
