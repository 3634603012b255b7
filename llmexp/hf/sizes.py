"""The sizes of the model whose weights a run begins with, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmexp.folders import rundir
from llmexp.folders.naming import named_checkpoint
from llmexp.hf.families import from_config

# Knobs that two models with the same weights may have otherwise.
FREE = {
    "_target_", "dropout", "residual", "init_from", "init_grow", "path", "pretrained",
    "balance", "balance_rate", "balance_loss", "router_z_loss",
}  # fmt: skip
CONVERTED = {"parametrization", "base_width"}  # by factors on weights: `multipliers`


def sizes_of(given: str) -> tuple[str, dict[str, Any]] | None:
    """Return the `_target_` and the knobs of our model for the weights of a folder or RUN[@STEP].

    The folder is one of Hugging Face. None where `reading.open_source` refuses them.
    """
    folder = Path(given).expanduser()
    try:
        if (folder / "config.json").is_file() and not rundir.is_run(folder):
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            family, knobs = from_config(config, given)
            return family.target, knobs
        section = rundir.built_config(named_checkpoint(str(folder))[0]).model
        return str(section["_target_"]), deciding_knobs(section)
    except (OSError, ValueError, KeyError, AttributeError, RecursionError):
        return None


def deciding_knobs(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs of a model section that decide its weights or what it computes."""
    return {key: section[key] for key in section if key not in FREE | CONVERTED}
