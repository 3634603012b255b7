"""A checkpoint -> a folder that transformers loads: weights, config, tokenizer, a page about it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.checkpoint.loading import Loaded
from llmexp.data.tokenizers import Tokenizer, end_of_text
from llmexp.exchange.card import card
from llmexp.exchange.families import Rule, family_of, to_config
from llmexp.exchange.tokenizer import doubts, tokenizer_files
from llmexp.exchange.writing import DTYPES, write_weights
from llmexp.fileio import new_folder, write_json, write_whole

TRANSFORMERS = "llmexp.models.hf.HuggingFace"  # its tensors have their names already


@dataclass(frozen=True)
class Exported:
    """The account of an export. `size`: bytes of the weights."""

    architecture: str
    parameters: int
    step: int
    size: int
    notes: list[str]


def export(
    loaded: Loaded,
    section: Mapping[str, Any],
    tokenizer: Tokenizer,
    folder: Path,
    dtype: str | None,
    run: Path,
    weights: str = "model",
) -> Exported:
    """Write a checkpoint's model into a new folder, whole or not at all.

    `section`: the model's knobs; `dtype`: a key of writing.DTYPES, None: as trained. For the page:
    `run`, its folder, and `weights`, of naming.WEIGHTS. Raises ValueError for a model that
    transformers does not have.
    """
    end, kind = end_of_text(tokenizer), None if dtype is None else DTYPES[dtype]
    described, rules = _described(loaded, section, end)
    stored = kind or loaded.model[rules[0].ours[0]][0].dtype
    described["dtype"] = str(stored).removeprefix("torch.")
    architecture = (described.get("architectures") or [described["model_type"]])[0]
    length = described.get("n_positions") or described.get("max_position_embeddings")
    files = tokenizer_files(tokenizer, length)
    with new_folder(folder) as draft:
        size = write_weights(draft, loaded, rules, kind)
        write_json(draft / "config.json", described)
        write_json(draft / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        for name, content in files.items():
            write_whole(draft / name, content)
        write_whole(draft / "README.md", card(run, loaded.step, architecture, weights))
    parameters = sum(math.prod(pieces[0].shape) for pieces in loaded.model.values())
    return Exported(architecture, parameters, loaded.step, size, doubts(tokenizer, files))


def _described(
    loaded: Loaded, section: Mapping[str, Any], end: int | None
) -> tuple[dict[str, Any], list[Rule]]:
    """Return the config.json of the model and the rules of its tensors. Raises ValueError."""
    if section["_target_"] != TRANSFORMERS:
        return to_config(section, end), list(family_of(section).tensors(section))
    config = json.loads((Path(section["path"]) / "config.json").read_text(encoding="utf-8"))
    config |= {"bos_token_id": end, "eos_token_id": end}
    return config, [Rule(name.removeprefix("model."), (name,)) for name in loaded.model]
