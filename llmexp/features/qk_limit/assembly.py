from __future__ import annotations

from torch import nn

from llmexp.config.sections import Config, knobs_of
from llmexp.config.values import ConfigError, refuse
from llmexp.features.qk_limit.config import Knobs
from llmexp.features.qk_limit.heads import attentions_of


def check_model(config: Config, model: nn.Module) -> None:
    check_heads(model, knobs_of(config, Knobs).qk_limit)


def check_heads(model: nn.Module, limit: float | None) -> None:
    """Raise ConfigError for a model whose heads cannot be scaled."""
    attentions = attentions_of(model)
    if not attentions:
        text = "the model has no heads of attention that llmexp knows, as GPT2 and Llama have"
        raise refuse("unsupported", "clip.qk_limit", limit, f"{text}; leave it out")
    if any(getattr(one, "qk_norm", "none") != "none" for one in attentions):
        raise ConfigError(
            "conflict",
            f"clip.qk_limit={limit}: model.qk_norm normalizes queries and keys, so that scaling "
            "their weights changes no logit; leave it out, or give model.qk_norm=none",
            "clip.qk_limit",
        )
