from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmexp import features
from llmexp.config.values import count

SECTION = "metrics"


@dataclass(frozen=True, kw_only=True)
class Knobs:
    layers_every: int | None = count(
        "optimizer steps between figures layer by layer, in layers.jsonl; null: never",
        100,
        affects="nothing",
        default=None,
    )


def asked(config: Any) -> bool:
    return config.metrics.layers_every is not None or of_each_step(config)


def of_each_step(config: Any) -> bool:
    """Return whether another feature needs the figures of each step."""
    return any(needs(config) for needs in features.offered("config", "needs_layers"))
