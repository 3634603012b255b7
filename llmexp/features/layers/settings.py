from __future__ import annotations

from dataclasses import dataclass

from llmexp.settings.values import count

SECTION = "metrics"


@dataclass(frozen=True, kw_only=True)
class Knobs:
    layers_every: int | None = count(
        "optimizer steps between figures layer by layer, in layers.jsonl; null: never",
        100,
        affects="nothing",
        default=None,
    )
