"""A checkpoint -> a folder that transformers loads: weights, config, tokenizer, a page about it."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.checkpoint.loading import Loaded
from llmexp.data.tokenizers import Tokenizer, end_of_text
from llmexp.exchange.card import card
from llmexp.exchange.families import family_of, to_config
from llmexp.exchange.tokenizer import tokenizer_files
from llmexp.exchange.writing import DTYPES, write_weights
from llmexp.fileio import write_json, write_whole


@dataclass(frozen=True)
class Exported:
    """What was written. `size`: bytes of the weights."""

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
) -> Exported:
    """Write a checkpoint's model into a new folder, whole or not at all.

    `section`: the model's knobs; `dtype`: a key of writing.DTYPES, None: as trained; `run`: the
    folder of the run, for the page. Raises ValueError for a model that transformers does not have.
    """
    family, end = family_of(section), end_of_text(tokenizer)
    kind = None if dtype is None else DTYPES[dtype]
    stored = kind or loaded.model["token_embedding.weight"][0].dtype
    described = to_config(section, end) | {"dtype": str(stored).removeprefix("torch.")}
    files = tokenizer_files(tokenizer, section["max_position_embeddings"])
    notes = []
    if not files:
        notes.append(f"the tokenizer {tokenizer.name} is one of your own and is not written")
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    draft.mkdir(parents=True)
    try:
        size = write_weights(draft, loaded, list(family.tensors(section)), kind)
        write_json(draft / "config.json", described)
        write_json(draft / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        for name, content in files.items():
            write_whole(draft / name, content)
        write_whole(draft / "README.md", card(run, loaded.step, family.architecture))
        if folder.is_dir():
            folder.rmdir()  # an empty one
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    parameters = sum(math.prod(pieces[0].shape) for pieces in loaded.model.values())
    return Exported(family.architecture, parameters, loaded.step, size, notes)
