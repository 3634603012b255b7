"""Values of a form of their own, by the knobs that have it: a batch ramp, hooks, open sections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmexp.config.values import (
    MAX_DEPTH,
    MAX_VALUES,
    ConfigError,
    nested,
    override_value,
    refuse,
)


def ramp(value: Any) -> str | None:
    """Return a batch ramp as its text; None: there is none. Raises ConfigError."""
    return None if value is None else override_value(ramp_sizes(value))


def ramp_sizes(value: Any) -> dict[int, int]:
    """Return the sequences a step of a batch ramp by the tokens from which on they hold, in order.

    `value`: such a mapping, or its text. Raises ConfigError.
    """
    example = {0: 32, 1_000_000: 64}
    try:
        pairs = value
        if isinstance(value, str):
            pairs = dict(pair.split(":") for pair in value.strip(" {}").split(","))
        sizes = {_whole(tokens): _whole(size) for tokens, size in pairs.items()}
        if not sizes or len(sizes) < len(pairs):
            raise ValueError
    except (AttributeError, TypeError, ValueError, OverflowError):
        text = "whole numbers of sequences by whole numbers of tokens are needed"
        raise refuse("wrong_type", "batch.ramp", value, text, example) from None
    if min(sizes) != 0:
        raise refuse("out_of_range", "batch.ramp", value, "must begin at token 0", example)
    if min(sizes.values()) < 1:
        raise refuse(
            "out_of_range", "batch.ramp", value, "a step needs at least one sequence", example
        )
    return dict(sorted(sizes.items()))


def _whole(value: Any) -> int:
    """Return a whole number, also one such as 1e6 or its text. Raises ValueError."""
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError
    return int(float(value))


def hooks(value: Any) -> list[Any]:
    """Return the entries of `hooks`: names, and sections as plain mappings. Raises ConfigError."""
    several = isinstance(value, (list, tuple))
    if not several or not all(isinstance(entry, (str, Mapping)) for entry in value):
        text = "a list of names of functions, or of sections with their arguments, is needed"
        raise refuse(
            "wrong_type", "hooks", value, text, "[mymodel.watch,{_target_:mymodel.count,every:10}]"
        )
    look_through(value, "hooks")
    return [dict(entry) if isinstance(entry, Mapping) else entry for entry in value]


def look_through(tree: Any, name: str) -> None:
    """Raise ConfigError for values without an end, and for numbers that no JSON file holds."""
    waiting: list[tuple[Any, int, str]] = [(tree, 1, name)]
    seen = 0
    while waiting:
        node, depth, key = waiting.pop()
        seen += 1
        if seen > MAX_VALUES or depth > MAX_DEPTH:
            text = f"has more than {MAX_VALUES:,} values, or nests deeper than {MAX_DEPTH} sections"
            raise ConfigError("too_large", f"this config {text} ({name})")
        if isinstance(node, float) and not math.isfinite(node):
            raise refuse("wrong_type", key, node, "a finite number is needed")
        for child_name, child in nested(node):
            waiting.append((child, depth + 1, f"{key}.{child_name}"))
