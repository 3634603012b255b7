"""Short names for what a sweep varies, as tables and pages show them: `accum=1 clip=0.5`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llmexp.config.values import as_yaml

ALIASES = {
    "batch.gradient_accumulation_steps": "accum",
    "batch.micro_batch_size": "micro",
    "batch.real_batch_size": "batch",
    "batch.sequence_length": "length",
    "batch.tokens_per_step": "batch_tokens",
    "clip.max_norm": "clip",
    "clip.max_value": "clip_value",
    "clip.kind": "clip",
    "fork.run": "parent",
    "fork.step": "from",
    "optimizer.reference.B": "B_ref",
    "optimizer.reference.lr": "lr_ref",
    "optimizer.weight_decay": "wd",
    "parallelism.kind": "parallelism",
    "parallelism.nproc_per_node": "ranks",
    "precision.kind": "precision",
    "schedule.warmup_ratio": "warmup",
    "schedule.warmup_steps": "warmup",
    "train.max_epochs": "epochs",
    "train.max_flops": "FLOPs",
    "train.max_steps": "steps",
    "train.max_tokens": "tokens",
    "train.tokens_per_parameter": "tokens/N",
}


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Map each key to its alias or its last part.

    Keys that would share a short name keep their full one. A section's `_target_` has the name of
    the section: `optimizer=muon`.
    """
    keys = list(keys)
    short = {
        key: ALIASES.get(key, key.removesuffix("._target_").rpartition(".")[2]) for key in keys
    }
    taken = list(short.values())
    return {key: name if taken.count(name) == 1 and name else key for key, name in short.items()}


def short_value(value: Any) -> str:
    """Return a value as YAML has it, numbers with at most six digits, our functions by name."""
    text = str(as_yaml(value))
    if text.startswith("llmexp."):
        return text.rpartition(".")[2]
    return f"{value:.6g}" if isinstance(value, float) and len(text) > 10 else text


def parse_value(text: str) -> Any:
    """Return the value that the text of an override stands for: true, a number, the text, ..."""
    words: dict[str, Any] = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return unquoted(text)


def unquoted(text: str) -> str:
    """Return the text that the value of an override stands for, without its quotes or escapes."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return re.sub(r"\\(.)", r"\1", text)  # Hydra's escapes, as of a space


def short_label(values: Mapping[str, Any]) -> str:
    """Return `clip=0.5 lr=0.1` for {"clip.max_norm": 0.5, "optimizer.lr": 0.1}."""
    names = short_keys(values)
    return " ".join(f"{names[key]}={short_value(value)}" for key, value in values.items())


def plural(number: int, what: str) -> str:
    """Return `1 point` or `2 points`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
