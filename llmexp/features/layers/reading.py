"""Read layers.jsonl: the figures of chosen steps layer by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmexp.folders.rows import walk_rows

FILE = "layers.jsonl"
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")  # the first in a module's name is its layer's


def read_layers(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a record for each module or block of each measured step of a run.

    `name` is the module's in the model ("" is the whole model), `layer` its number, `part` the name
    without that. Shares are worked out here: `update_ratio` is the norm of the update over that of
    the weights, `grad_share` the module's part of the squared gradient norm, absent where a norm is
    not finite. Raises ConfigError for damage.
    """
    for row, _ in walk_rows(path / FILE):
        place = {key: row.pop(key) for key in ("step", "tokens_seen") if key in row}
        by_name: dict[str, dict[str, float]] = {}
        for key, values in row.items():
            named = values if isinstance(values, dict) else {"": values}
            for name, value in named.items():
                by_name.setdefault(name, {})[key] = value
        norms = row.get("grad_norm", {})
        whole = norms if len(norms) == len(row.get("weight_norm", {})) else {}
        for name, figures in by_name.items():
            yield place | {"name": name} | _split(name) | _with_shares(figures, whole)


def by_layer(row: dict[str, Any], lacking: float | None = None) -> dict[str, Any]:
    """Return the figures of a line of layers.jsonl: a list over the layers, or one of the model.

    A norm is that of all tensors of a layer, and the shares are of these. A figure that lacks a
    value, as one that is not finite or that not all layers have, is absent; where `lacking` is
    given, it has that in the places of such layers.
    """
    named = {key: values for key, values in row.items() if isinstance(values, dict)}
    number = {name: _split(name)["layer"] for values in named.values() for name in values}
    count = max((layer for layer in number.values() if layer is not None), default=-1) + 1
    count = count if count <= len(number) else 0  # damage
    norms = {key for key in named if key.endswith("_norm")}
    modules = {name for key in norms for name in named[key]}
    figures: list[dict[str, float]] = [{} for _ in range(count)]  # of each layer
    for key, values in named.items():
        if key in norms and values.keys() != modules:
            continue
        layers: list[list[float]] = [[] for _ in range(count)]
        for name, value in values.items():
            if (layer := number[name]) is not None and layer < count:
                layers[layer].append(value)
        if lacking is not None and any(layers):
            layers = [several or [lacking] for several in layers]
        for own, several in zip(figures, layers, strict=True):
            if all(layers):
                own[key] = math.hypot(*several) if key in norms else several[0]
    whole = named.get("grad_norm", {})
    figures = [_with_shares(own, whole) for own in figures]
    keys = [key for key in next(iter(figures), {}) if all(key in own for own in figures)]
    found = {key: value for key, value in row.items() if key not in named}
    return found | {key: [own[key] for own in figures] for key in keys}


def _with_shares(figures: dict[str, float], gradients: dict[str, float]) -> dict[str, float]:
    """Return figures of a module or a layer with its shares, as far as they are known.

    `gradients`: the norms of all modules, none where that of one is not finite.
    """
    found, square = dict(figures), sum(norm * norm for norm in gradients.values())
    if found.get("weight_norm") and "update_norm" in found:
        found["update_ratio"] = found["update_norm"] / found["weight_norm"]
    if 0 < square < math.inf and "grad_norm" in found:
        found["grad_share"] = found["grad_norm"] ** 2 / square
    return found


def _split(name: str) -> dict[str, Any]:
    """Return the number of the layer that a module is in, None outside, and its name there."""
    found = _NUMBER.search(name)
    if found is None:
        return {"layer": None, "part": name}
    return {"layer": int(found[1]), "part": name[found.end() :]}
