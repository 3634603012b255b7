"""Read layers.jsonl: the figures of chosen steps layer by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmexp.runs.rows import walk_rows
from llmexp.runs.rundir import LAYERS

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")  # the first in a module's name is its layer's


def read_layers(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a record for each module or block of each measured step of a run.

    `name` is the module's in the model ("" is the whole model), `layer` its number, `part` the name
    without that. Shares are worked out here: `update_ratio` is the norm of the update over that of
    the weights, `grad_share` the module's part of the squared gradient norm, absent where a norm is
    not finite. Raises ConfigError for damage.
    """
    for row, _ in walk_rows(path / LAYERS):
        place = {key: row.pop(key) for key in ("step", "tokens_seen") if key in row}
        by_name: dict[str, dict[str, float]] = {}
        for key, values in row.items():
            named = values if isinstance(values, dict) else {"": values}
            for name, value in named.items():
                by_name.setdefault(name, {})[key] = value
        norms = row.get("grad_norm", {})
        square = sum_of_squares(norms) if len(norms) == len(row.get("weight_norm", {})) else 0.0
        for name, figures in by_name.items():
            if figures.get("weight_norm") and "update_norm" in figures:
                figures["update_ratio"] = figures["update_norm"] / figures["weight_norm"]
            if 0 < square < math.inf and "grad_norm" in figures:
                figures["grad_share"] = figures["grad_norm"] ** 2 / square
            yield place | {"name": name} | _split(name) | figures


def by_layer(row: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a line of layers.jsonl: a list over the layers, or one of the model.

    A norm is that of all tensors of a layer, and the shares are of these. A figure that lacks a
    value, as one that is not finite, is absent.
    """
    named = {key: values for key, values in row.items() if isinstance(values, dict)}
    found = {key: value for key, value in row.items() if key not in named}
    number = {name: _split(name)["layer"] for values in named.values() for name in values}
    count = max((layer for layer in number.values() if layer is not None), default=-1) + 1
    count = count if count <= len(number) else 0  # damage
    norms = {key for key in named if key.endswith("_norm")}
    modules = {name for key in norms for name in named[key]}
    for key, values in named.items():
        if key in norms and values.keys() != modules:
            continue
        layers: list[list[float]] = [[] for _ in range(count)]
        for name, value in values.items():
            if (layer := number[name]) is not None and layer < count:
                layers[layer].append(value)
        if layers and all(layers):
            found[key] = [math.hypot(*layer) if key in norms else layer[0] for layer in layers]
    weights, square = found.get("weight_norm", [0.0]), sum_of_squares(named.get("grad_norm", {}))
    if "update_norm" in found and all(weights):
        found["update_ratio"] = [u / w for u, w in zip(found["update_norm"], weights, strict=True)]
    if "grad_norm" in found and 0 < square < math.inf:
        found["grad_share"] = [norm**2 / square for norm in found["grad_norm"]]
    return found


def sum_of_squares(norms: dict[str, float]) -> float:
    return sum(norm**2 for norm in norms.values())


def _split(name: str) -> dict[str, Any]:
    """Return the number of the layer that a module is in, None outside, and its name there."""
    found = _NUMBER.search(name)
    if found is None:
        return {"layer": None, "part": name}
    return {"layer": int(found[1]), "part": name[found.end() :]}
