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
    the weights, `grad_share` the module's part of the squared gradient norm. Raises ConfigError for
    damage.
    """
    for row, _ in walk_rows(path / LAYERS):
        place = {key: row.pop(key) for key in ("step", "tokens_seen") if key in row}
        by_name: dict[str, dict[str, float]] = {}
        for key, values in row.items():
            named = values if isinstance(values, dict) else {"": values}
            for name, value in named.items():
                by_name.setdefault(name, {})[key] = value
        square = sum(figures.get("grad_norm", 0.0) ** 2 for figures in by_name.values())
        for name, figures in by_name.items():
            if figures.get("weight_norm") and "update_norm" in figures:
                figures["update_ratio"] = figures["update_norm"] / figures["weight_norm"]
            if 0 < square < math.inf and "grad_norm" in figures:
                figures["grad_share"] = figures["grad_norm"] ** 2 / square
            yield place | {"name": name} | _split(name) | figures


def _split(name: str) -> dict[str, Any]:
    """Return the number of the layer that a module is in, None outside, and its name there."""
    found = _NUMBER.search(name)
    if found is None:
        return {"layer": None, "part": name}
    return {"layer": int(found[1]), "part": name[found.end() :]}
