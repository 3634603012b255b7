"""The shape of a model from one number: its depth, or about how many parameters it has."""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from llmexp.config.convert import checked_knob
from llmexp.config.rules import ONE_NUMBER, SHAPE_KEYS, ShapeRule
from llmexp.config.values import refuse

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
MOST_LAYERS = 1024


def solve_shape(
    section: dict[str, Any], count: Callable[[dict[str, Any]], int], mlp_factor: float
) -> tuple[dict[str, Any], str | None]:
    """Return the model section with the sizes that a rule gives, and the rule in words.

    Sizes that are not null stay, and others follow from a width that is given. `count` returns the
    parameters of a model section; `mlp_factor`: that of the model, where the rule has none. Without
    model.size and model.depth nothing is done. Raises ConfigError.
    """
    size, depth = section.get("size"), checked_knob("model.depth", section.get("depth"))
    rule = checked_knob("model.shape_rule", section.get("shape_rule"))
    if size is None and depth is None:
        if rule is not None:
            text = "does nothing without model.size and model.depth; leave it out, or give one"
            raise refuse("idle_knob", "model.shape_rule", dataclasses.asdict(rule), text)
        return section, None
    key, value = (ONE_NUMBER[1], depth) if size is None else (ONE_NUMBER[0], size)
    if missing := [name for name in ("n_layers", "d_model", "d_ff") if name not in section]:
        text = f"{section['_target_']} has no {missing[0]} that a rule could choose; leave it out"
        raise refuse("unsupported", key, value, text)
    rule = rule or ShapeRule()
    if rule.mlp_factor is None:
        rule = dataclasses.replace(rule, mlp_factor=mlp_factor)
    by = {k: v for k, v in dataclasses.asdict(rule).items() if v is not None}
    section = section | {"shape_rule": by}
    given = {name: section[name] for name in SHAPE_KEYS if section.get(name) is not None}
    words = f"{key}={value}"
    if depth is None:
        parameters = parameters_in(size)
        depth, near = _nearest(parameters, lambda n: count(_shaped(section, {}, n, rule)))
        words = f"{words}: {near}"
    by_rule, found = _shaped(section, {}, depth, rule), _shaped(section, given, depth, rule)
    sizes = [
        f"{k} {found[k]:,}" + f" ({by_rule[k]:,} by the rule)" * (found[k] != by_rule[k])
        for k in (*SHAPE_KEYS, "d_expert")
        if found.get(k) is not None
    ]
    rule_words = ", ".join(f"{k} {v:.4g}" for k, v in by.items())
    return found, f"{words}; {', '.join(sizes)} (model.shape_rule: {rule_words})"


def parameters_in(size: Any) -> int:
    """Return the number that 38M, 1.5B, 50k or 38e6 is. Raises ConfigError."""
    found = re.fullmatch(r"([\d._]+(?:e\d+)?)([kmb]?)", str(size).strip().lower().replace(",", ""))
    try:
        number = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    except ValueError:
        number = 0
    if number < 1 or isinstance(size, bool):
        text = "a number of parameters is needed, in thousands (k), millions (M) or billions (B)"
        raise refuse("wrong_type", "model.size", size, text, "38M")
    return number


def _shaped(
    section: dict[str, Any], given: Mapping[str, Any], depth: int, rule: ShapeRule
) -> dict[str, Any]:
    """Return the section with the sizes of a depth; those that are given stay."""
    head = rule.head_width
    width = given.get("d_model") or _rounded(rule.aspect * depth, head)
    heads = given.get("n_heads") or max(1, width // head)
    sizes = {
        "n_layers": depth,
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": heads // math.gcd(heads, rule.queries_per_kv),
        "d_ff": _rounded((rule.mlp_factor or 1) * width, rule.multiple),
    }
    if rule.expert_factor is not None and section.get("d_expert") is None:
        sizes["d_expert"] = _rounded(rule.expert_factor * width, rule.multiple)
    return section | {k: v for k, v in (sizes | dict(given)).items() if k in section}


def _rounded(number: float, multiple: int) -> int:
    """Return the nearest multiple, the larger one of two; at least one."""
    return max(1, math.floor(number / multiple + 0.5)) * multiple


def _nearest(parameters: int, count: Callable[[int], int]) -> tuple[int, str]:
    """Return the depth whose parameters are nearest, as a ratio, and what lies beside it.

    Raises ConfigError where more than MOST_LAYERS layers would be needed.
    """
    above = 1
    while (most := count(above)) < parameters and above < MOST_LAYERS:
        above *= 2
    if most < parameters:
        text = f"{MOST_LAYERS} layers have {most:,} parameters; raise model.shape_rule.aspect"
        raise refuse("out_of_range", "model.size", parameters, text)
    above = bisect.bisect_left(range(above), parameters, lo=above // 2 + 1, key=count)
    below = above - 1
    larger = f"depth {above} has {count(above):,} parameters"
    if count(above) == parameters:
        return above, larger
    if not below:
        return above, f"{larger}, the least that there is"
    smaller = f"depth {below} has {count(below):,}"
    nearer = below if parameters / count(below) <= count(above) / parameters else above
    return nearer, f"{smaller} and {larger}; depth {nearer} is nearest"
