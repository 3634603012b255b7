"""Compose a run that begins with given weights: sizes that nobody gave are those of the weights."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from llmexp.compose.origin import COMMAND_LINE, layers
from llmexp.exchange.families import USUAL
from llmexp.exchange.sizes import sizes_of
from llmexp.settings.variables import fill


def take_sizes(tree: dict[str, Any], cfg: DictConfig) -> None:
    """Put the sizes and switches of model.init_from into the plain config.

    Those that the command line or an experiment gives stay: where they differ, the run is refused
    when its parts are checked."""
    model = tree.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("init_from"), str):
        return
    found = sizes_of(str(fill(model["init_from"], "model.init_from")))
    if found is None or found[0] != model.get("_target_"):
        return
    given = _given(cfg)
    for key, theirs in found[1].items():
        grows = key == "vocab_size" and model.get("init_grow") and model.get(key) is None
        if model.get(key, USUAL.get(key)) != theirs and f"model.{key}" not in given and not grows:
            model[key] = theirs


def _given(cfg: DictConfig) -> set[str]:
    """Return the keys of values that are not those of the chosen option of a group."""
    overrides = [str(o) for o in (*cfg.hydra.overrides.hydra, *cfg.hydra.overrides.task)]
    found: set[str] = set()
    for layer in layers(overrides):
        if layer.source == COMMAND_LINE or "experiment/" in layer.source:
            found |= layer.values.keys()
    return found
