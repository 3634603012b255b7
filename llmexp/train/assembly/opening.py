"""Open the checkpoint of a run for use without training: `llmexp sample`, `evaluate`, `export`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmexp.checkpoint import loading
from llmexp.data.tokenizers import Tokenizer
from llmexp.exchange.export import DTYPES, Exported, Stored, export
from llmexp.exchange.families import TRANSFORMERS
from llmexp.exchange.reading import begin_with, open_checkpoint
from llmexp.exchange.sizes import sizes_of
from llmexp.models.common import give_memory
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from llmexp.runs import rundir
from llmexp.settings.config import Config
from llmexp.settings.values import ConfigError
from llmexp.train.assembly.inputs import (
    build_tokenizer,
    document_end,
    filled,
    padded,
    uses_tokenizer,
)
from llmexp.train.assembly.parts import initial_weights, keep_inside_documents, model_maker
from llmexp.update import precision


@dataclass(frozen=True)
class Opened:
    """Hold a trained model and what belongs to it. `config` is filled; the model is on the CPU, in
    the run's type of parameters, with the checkpoint's weights."""

    path: Path
    step: int
    config: Config
    tokenizer: Tokenizer
    model: nn.Module


def open_run(
    path: Path, step: int | None, warn: Callable[[str], None], weights: str = "model"
) -> Opened:
    """Open a run's checkpoint as `open_checkpoint` does. `naming.named_checkpoint` reads RUN@STEP.
    Nothing is written. Raises ConfigError."""
    config = filled(rundir.built_config(path))
    try:
        loaded = open_checkpoint(path, step, warn, weights)
        tokenizer, section = build_tokenizer(config)
        model = _build(section)
        model.to(precision.parameter_dtype(config.precision.kind))
        keep_inside_documents(model, section["_target_"], document_end(config, tokenizer))
        loading.restore_model(loaded, model)
    except loading.CheckpointError as error:
        raise ConfigError(str(error)) from None
    return Opened(path, loaded.step, config, tokenizer, model)


def open_folder(folder: Path, config: Config) -> Opened:
    """Open a Hugging Face folder with the model section of `config`, which `folder_model` makes;
    the step is 0. Raises ConfigError."""
    config = filled(config)
    tokenizer, section = build_tokenizer(config)
    model = _build(section)
    model.to(precision.parameter_dtype(config.precision.kind))
    keep_inside_documents(model, section["_target_"], document_end(config, tokenizer))
    if (initial := initial_weights(section, model, True)) is not None:
        begin_with(model, initial[0])
    return Opened(folder, 0, config, tokenizer, model)


def folder_model(folder: Path) -> dict[str, Any]:
    """Return the model section for the weights of a Hugging Face folder: of a model of ours where
    it computes the same, else that of `model=hf`."""
    if (sizes := sizes_of(str(folder))) is None:
        return {"_target_": TRANSFORMERS, "path": str(folder), "pretrained": True}
    target, knobs = sizes
    return {"_target_": target, **knobs, "init_from": str(folder)}


def export_run(
    checkpoint: tuple[Path, int | None, str],
    folder: Path,
    dtype: str | None,
    warn: Callable[[str], None],
    *,
    keep_padding: bool = False,
    check: bool = False,
) -> Exported:
    """Write a checkpoint, (run, step, weights) as for `open_checkpoint`, as a folder of Hugging
    Face; `dtype`: a key of DTYPES, None: as trained; `check` as in `export`. Raises ConfigError."""
    path, step, weights = checkpoint
    config = filled(rundir.built_config(path))
    try:
        tokenizer, section = build_tokenizer(config)
        loaded = open_checkpoint(path, step, warn, weights)
        vocabulary = None if keep_padding else _vocabulary(config, tokenizer, section)
        form = Stored(None if dtype is None else DTYPES[dtype], vocabulary)
        return export(loaded, section, tokenizer, folder, form, path, weights=weights, check=check)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None


def _vocabulary(config: Config, tokenizer: Tokenizer, section: dict[str, Any]) -> int | None:
    """Return the ids of the tokenizer where the model of ours has rows for more; None where it has
    no more, or where the data may hold ids beyond the tokenizer's."""
    size = section.get("vocab_size")
    if section["_target_"] == TRANSFORMERS or not isinstance(size, int):
        return None
    known = size == padded(tokenizer) or uses_tokenizer(config.data)
    return tokenizer.n_vocab if known and size > tokenizer.n_vocab else None


def _build(section: dict[str, Any]) -> nn.Module:
    """Return the model of the section, whose weights follow. Raise ConfigError where there is no
    room for it: the config may be somebody else's."""
    make = model_maker(section)
    try:
        with torch.device("meta"):
            model: nn.Module = make()
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"model: cannot be built: {str(error).splitlines()[0]}") from None
    if type(model) in (GPT2, Llama):  # a subclass may have buffers or tied parameters
        give_memory(model, torch.device("cpu"))
    else:
        model = make()
    return model
