"""Compose values that nobody gave: sizes of the weights to begin with, and what a rule decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from llmexp.compose.overrides import COMMAND_LINE, Layer, key_of, layers
from llmexp.config.rules import ONE_NUMBER, SHAPE_KEYS
from llmexp.config.values import Plain
from llmexp.config.variables import fill
from llmexp.run.batch import CUT_KEYS
from llmexp.run.rules import BATCH_KEYS, keys_set

SHAPE = (*SHAPE_KEYS, "head_dim")


def adopt(tree: Plain, cfg: DictConfig, typed: Sequence[str], saved: bool) -> None:
    """Put what follows from given values into the plain config, where nobody has given it.

    `typed`: the overrides that it is composed with. `saved`: it is composed over the config of a
    run, where this was decided, unless what it follows from is given anew."""
    given = set(map(key_of, typed))
    if "batch.ramp" in given:
        _follow_ramp(tree.get("batch"), given)
    model, optimizer = tree.get("model"), tree.get("optimizer")
    if isinstance(model, dict):
        if not saved:
            if any("d_model" in word or "experiment" in word for word in typed):
                _follow_width(model, layers(cfg), given)
            if isinstance(model.get("init_from"), str):
                _take_sizes(model, cfg)
        if (model.get("size") or model.get("depth")) is not None:
            beside = _beside(cfg, ONE_NUMBER, saved)
            if beside and "model.d_expert" not in beside:
                _leave_experts_open(model)
            model |= {
                k: None for k in SHAPE if beside and k in model and f"model.{k}" not in beside
            }
    if isinstance(optimizer, dict) and optimizer.get("rule", "none") != "none":
        _leave_rule_open(tree, cfg, saved)


def _follow_ramp(batch: Any, given: set[str]) -> None:
    """Leave the sizes open that follow from a batch ramp of the command line, but those given."""
    if isinstance(batch, dict) and batch.get("ramp") is not None:
        for name in ("real_batch_size", "tokens_per_step", "gradient_accumulation_steps"):
            if f"batch.{name}" not in given:
                batch[name] = None


def _take_sizes(model: Plain, cfg: DictConfig) -> None:
    """Put the sizes and switches of model.init_from into the plain config.

    Those that the command line or an experiment gives stay: where they differ, the run is refused
    when its parts are checked."""
    from llmexp.hf.families import USUAL
    from llmexp.hf.sizes import sizes_of

    found = sizes_of(str(fill(model["init_from"], "model.init_from")))
    if found is None or found[0] != model.get("_target_"):
        return
    given = {key for _, keys in _given(cfg) for key in keys}
    for key, theirs in found[1].items():
        grows = key == "vocab_size" and model.get("init_grow") and model.get(key) is None
        if model.get(key, USUAL.get(key)) != theirs and f"model.{key}" not in given and not grows:
            model[key] = theirs


def _follow_width(model: Plain, there: Sequence[Layer], given: set[str]) -> None:
    """Keep the ratio of MLP and experts to the width of the model where that alone is given."""
    for name in ("d_ff", "d_expert"):
        width: Any = None
        beside: Any = None  # the width where the one inside is listed
        for layer in there:
            width = layer.values.get("model.d_model", width)
            beside = width if f"model.{name}" in layer.values else beside
        inner, free = model.get(name), width != beside and f"model.{name}" not in given
        if free and all(type(n) is int and n > 0 for n in (inner, beside, width)):
            model[name] = round(inner / beside * width)


def _leave_experts_open(model: Plain) -> None:
    """Leave the width of experts to the rule of the shape, at the ratio of the option."""
    width, expert, rule = (model.get(k) for k in ("d_model", "d_expert", "shape_rule"))
    if type(width) is type(expert) is int and width > 0 and isinstance(rule or {}, dict):
        model["shape_rule"] = {"expert_factor": expert / width, **(rule or {})}
        model["d_expert"] = None


def _leave_rule_open(tree: Plain, cfg: DictConfig, saved: bool) -> None:
    """Set what optimizer.rule decides to null, unless it is given beside the rule.

    The rate by linear and sqrt also follows the batch of a fork."""
    keys, beside = keys_set(tree["optimizer"]), _beside(cfg, ("optimizer.rule",), saved)
    anew = bool(beside)
    beside = beside or _given(cfg)[-1][1]
    sized = any(key.startswith(BATCH_KEYS) for key in beside)
    if sized or beside.issuperset(CUT_KEYS):
        keys["batch"] = ()
    if not (anew or (saved and sized and tree["optimizer"]["rule"] in ("linear", "sqrt"))):
        return
    for section, names in keys.items():
        below = tree[section]
        for name in (key.partition(".")[2] for key in names if key not in beside):
            if name in below:
                below[name] = None


def _beside(cfg: DictConfig, chosen: Sequence[str], saved: bool) -> set[str]:
    """Return the keys that are given beside one of `chosen`, or later; none where none is given."""
    found: set[str] = set()
    for source, keys in _given(cfg):
        if source == COMMAND_LINE or not saved:
            found = keys if keys.intersection(chosen) else found | keys
    return found if found.intersection(chosen) else set()


def _given(cfg: DictConfig) -> list[tuple[str, set[str]]]:
    """Return the keys of values that are not those of the chosen option of a group.

    Those of each file of an experiment are together, and at the end those of the command line."""
    found = layers(cfg)
    files = [layer for layer in found if "experiment/" in layer.source]
    typed = {key for layer in found if layer.source == COMMAND_LINE for key in layer.values}
    return [*((layer.source, set(layer.values)) for layer in files), (COMMAND_LINE, typed)]
