from __future__ import annotations

from llmexp.features.qk_limit.settings import Knobs
from llmexp.settings.config import Config, knobs_of
from llmexp.settings.values import refuse


def prepared(config: Config, steps: int) -> Config:
    """Return the config, where the reference follows it. Raises ConfigError."""
    if (limit := knobs_of(config, Knobs).qk_limit) is not None:
        text = "the reference of verify computes no attention logits, which it follows"
        raise refuse("unsupported", "clip.qk_limit", limit, text, "null")
    return config
