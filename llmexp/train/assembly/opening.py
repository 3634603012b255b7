"""Open the checkpoint of a run for use without training: `llmexp sample`, `evaluate`, `export`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmexp import mesh
from llmexp.checkpoint import loading
from llmexp.config.kinds import kind_of_error
from llmexp.config.rules import TRANSFORMERS
from llmexp.config.sections import Config
from llmexp.config.values import ConfigError
from llmexp.config.variables import fill
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.folders import rundir
from llmexp.hf.export import EXPORT_DTYPES, Exported, Stored, export_model
from llmexp.hf.reading import open_checkpoint
from llmexp.hf.sizes import sizes_of
from llmexp.models.common import give_memory
from llmexp.models.loss import SummedLoss
from llmexp.run.layout import solve_layout
from llmexp.train.assembly.building import build_model, initial_weights
from llmexp.train.assembly.inputs import document_end, inputs_of, padded_vocabulary, uses_tokenizer


@dataclass(frozen=True)
class Opened:
    """Hold a trained model and what belongs to it.

    The model is on the CPU, in the run's type of parameters, with the checkpoint's weights. Where
    ranks share it, each has its parts on its device, and `loss` is what computes with them."""

    path: Path
    step: int
    config: Config
    tokenizer: Tokenizer
    model: nn.Module
    loss: SummedLoss | None = None


def open_run(
    path: Path, step: int | None, weights: str = "model", joined: mesh.Mesh | None = None
) -> Opened:
    """Open a run's checkpoint as `open_checkpoint` does; nothing is written.

    `naming.named_checkpoint` reads RUN@STEP. With `joined` ranks share the model. Raises
    ConfigError.
    """
    config = rundir.built_config(path)
    loaded = open_checkpoint(path, step, weights, joined)
    tokenizer, model = _build(config, late=joined is not None)
    loss = None if joined is None else _shared(model, joined)
    loading.restore_model(loaded, model)
    return Opened(path, loaded.step, config, tokenizer, model, loss)


def _shared(model: nn.Module, joined: mesh.Mesh) -> SummedLoss:
    """Share a model among ranks; return its loss, through which all of it is called."""
    loss = SummedLoss(model)
    mesh.wrap(joined, loss, activation_checkpointing="none", compiled=False)
    give_memory(model, joined.device)
    model.to(joined.device)
    return loss


@contextmanager
def joined_to(config: Config, several: bool) -> Iterator[mesh.Mesh | None]:
    """Join the ranks that share a model, if there are `several`. Raises ConfigError.

    The caller gives up the model before the end, or gloo may abort at exit.
    """
    if not several:
        yield None
        return
    p = config.parallelism
    layout = solve_layout(p, p.nproc_per_node or 1)
    try:
        joined = mesh.join(device_of(config), p.kind, *layout.sizes, backend=p.backend)
    except ValueError as error:
        raise ConfigError(kind_of_error(error, "wrong_ranks"), f"parallelism: {error}") from None
    yield joined
    gc.collect()
    mesh.leave(joined)


def device_of(config: Config) -> str:
    """Return the kind of device to compute on: that of the run, where it is there."""
    there = "cuda" if torch.cuda.is_available() else "cpu"
    return there if config.train.device in ("auto", "cuda") else config.train.device


def open_weights(folder: Path, config: Config) -> Opened:
    """Open a Hugging Face folder, as step 0, with the model section that `folder_model` makes.

    Raises ConfigError.
    """
    tokenizer, model = _build(config)
    initial_weights(config.model, model, True)
    return Opened(folder, 0, config, tokenizer, model)


def folder_model(folder: Path) -> dict[str, Any]:
    """Return the model section for the weights of a Hugging Face folder.

    It is of a model of ours where that computes the same, else of `model=hf`.
    """
    if (sizes := sizes_of(str(folder))) is None:
        return {"_target_": TRANSFORMERS, "path": str(folder), "pretrained": True}
    target, knobs = sizes
    return {"_target_": target, **knobs, "init_from": str(folder)}


def export_run(
    checkpoint: tuple[Path, int | None, str],
    folder: Path,
    dtype: str | None,
    *,
    keep_padding: bool = False,
    check: bool = False,
) -> Exported:
    """Write a checkpoint as a folder of Hugging Face.

    `checkpoint`: run, step and weights, as for `open_checkpoint`; `dtype`: a key of EXPORT_DTYPES,
    None: as trained; `check` as in `export`. Raises ConfigError.
    """
    path, step, weights = checkpoint
    config = rundir.built_config(path)
    try:
        tokenizer, section = inputs_of(config)
        section = fill(section, "model")
        loaded = open_checkpoint(path, step, weights)
        vocabulary = None if keep_padding else _vocabulary(config, tokenizer, section)
        form = Stored(None if dtype is None else EXPORT_DTYPES[dtype], vocabulary)
        return export_model(
            loaded, section, tokenizer, folder, form, path, weights=weights, check=check
        )
    except OSError as error:
        raise ConfigError("disk", f"{folder}: cannot be written: {error.strerror}") from None


def _vocabulary(config: Config, tokenizer: Tokenizer, section: dict[str, Any]) -> int | None:
    """Return the tokenizer's ids where the model of ours has rows for more of them.

    None where it has no more, or where the data may hold ids beyond the tokenizer's.
    """
    size = section.get("vocab_size")
    if section["_target_"] == TRANSFORMERS or not isinstance(size, int):
        return None
    known = size == padded_vocabulary(tokenizer) or uses_tokenizer(config.data)
    return tokenizer.n_vocab if known and size > tokenizer.n_vocab else None


def _build(config: Config, late: bool = False) -> tuple[Tokenizer, nn.Module]:
    """Build the tokenizer and the model of a config, whose weights follow.

    `late`: so does the memory of a model of ours. Raises ConfigError where there is no room for it:
    the config may be somebody else's."""
    tokenizer, section = inputs_of(config)
    end = document_end(tokenizer, config.batch.document_mask)
    try:
        model = build_model(section, config.precision.kind, end)
        if not late:
            give_memory(model, torch.device("cpu"))
    except (RuntimeError, MemoryError) as error:
        why = (str(error).splitlines() or ["it needs more memory than there is"])[0]
        raise ConfigError("failed", f"model: cannot be built: {why}") from None
    return tokenizer, model
