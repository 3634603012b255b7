from __future__ import annotations

from typing import Any

from llmexp.config.keys import Key

SECTION = "model"

# by layer too, in layers.jsonl; those that are not the mean over layers in a row, by how they are
BY_LAYER = {"load_max": "max", "load_cv": "mean", "entropy": "mean", "balance_loss": "mean"}
BY_LAYER |= {"z_loss": "mean", "dead": "sum"}
KEYS = (
    Key(
        "moe/load_max", "largest load of an expert over the mean", plot="Largest load of an expert"
    ),
    Key("moe/load_cv", "standard deviation of the experts' load over the mean"),
    Key("moe/entropy", "entropy of a token's scores, nats"),
    Key("moe/balance_loss", "balance loss of a sequence; 1: evenly loaded"),
    Key("moe/z_loss", "mean squared log-sum-exp of the router's logits"),
    Key("moe/dead", "experts that this step sent no token to"),
)


def asked(config: Any) -> bool:
    return bool(config.model.get("n_experts"))
