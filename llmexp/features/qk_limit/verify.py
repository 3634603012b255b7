from __future__ import annotations

from llmexp.config.sections import Config, knobs_of
from llmexp.config.values import refuse
from llmexp.features.qk_limit.config import Knobs


def prepared(config: Config, steps: int) -> Config:
    """Return the config, where the reference follows it. Raises ConfigError."""
    if (limit := knobs_of(config, Knobs).qk_limit) is not None:
        text = "the reference of verify computes no attention logits, which it follows"
        raise refuse("unsupported", "clip.qk_limit", limit, text, "null")
    return config
