"""The mean of the weights of several checkpoints, as a folder that is used as a run's is."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmexp.checkpoint import saving
from llmexp.checkpoint.loading import Loaded, read_tensor
from llmexp.checkpoint.slices import Piece
from llmexp.config.commands import command
from llmexp.config.values import ConfigError, flatten
from llmexp.folders import rundir
from llmexp.hf.sizes import FREE
from llmexp.system.fileio import new_folder, read_json, write_json, write_whole
from llmexp.system.text import first_of

ELEMENTS = 2**22  # of a sum in float64
PART_BYTES = 2**30  # of a file, all of which is in memory while it is written
RECORD = rundir.AVERAGE


def write_average(checkpoints: Sequence[Loaded], weights: str, folder: Path) -> None:
    """Write the mean of checkpoints into a new folder: a config, a checkpoint and RECORD.

    Config and checkpoint are of the last one's run and step. `weights`: those of naming.WEIGHTS
    that were opened. Raises ConfigError where they are of different models.
    """
    runs = [one.path.parent.parent for one in checkpoints]
    refuse_others(checkpoints, runs)
    last, parts = checkpoints[-1], in_parts(checkpoints[0])
    record = {
        "mean_of": ", ".join(f"{r.name}@{c.step}" for r, c in zip(runs, checkpoints, strict=True)),
        "weights": weights,
        "checkpoints": [
            {"run": os.path.abspath(run), "step": one.step, "digest": one.digest}
            for run, one in zip(runs, checkpoints, strict=True)
        ],
    }
    root = Path(rundir.CHECKPOINTS)
    with new_folder(folder) as draft:
        write_whole(draft / rundir.CONFIG, (runs[-1] / rundir.CONFIG).read_bytes())
        write_json(draft / RECORD, record | {"run": rundir.read_run(runs[-1])})
        for number, names in enumerate(parts):  # as ranks write theirs: one part is in memory
            suffix = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
            means = {name: mean(checkpoints, name) for name in names}
            pieces = {n: Piece(t, tuple(t.shape), (0,) * t.ndim) for n, t in means.items()}
            files = {f"model{suffix}.safetensors": pieces}
            held = saving.Pieces(number, len(parts), files, [], checkpoints[-1].state["buffers"])
            saving.write_pieces(draft / root, last.step, held)
        saving.commit_checkpoint(draft / root, last.step, held, {}, {"average": record}, keep=None)


def in_parts(loaded: Loaded) -> list[list[str]]:
    """Return the names of the tensors of each file: PART_BYTES, or one tensor that has more."""
    parts: list[list[str]] = []
    room = 0
    for name, pieces in loaded.model.items():
        size = math.prod(pieces[0].shape) * pieces[0].dtype.itemsize
        if not parts or size > room:
            parts.append([])
            room = PART_BYTES
        parts[-1].append(name)
        room -= size
    return parts


def mean(checkpoints: Sequence[Loaded], name: str) -> Tensor:
    """Return the mean of a tensor, summed in float64 and rounded once.

    A tensor of whole numbers is that of the last checkpoint, as all buffers are that state.pt has.
    """
    found = read_tensor(checkpoints[-1], name)
    exact = torch.promote_types(found.dtype, torch.float64)
    if not (exact.is_complex or found.is_floating_point()):
        return found
    rows, first = max(1, ELEMENTS // max(1, math.prod(found.shape[1:]))), 0
    for part in found.split(rows) if found.ndim else [found]:
        box = [(0, size) for size in part.shape]
        box[:1] = [(first, first + size) for _, size in box[:1]]
        total = torch.zeros(part.shape, dtype=exact)
        for one in checkpoints:
            total += read_tensor(one, name, box).to(exact)
        part.copy_(total / len(checkpoints))
        first += rows
    return found


def refuse_others(checkpoints: Sequence[Loaded], runs: Sequence[Path]) -> None:
    """Raise ConfigError where a checkpoint is an average, or of another model than the first.

    The error names the knobs or tensors that differ.
    """
    if own := next((run for run in runs if (run / RECORD).exists()), None):
        mean_of = re.sub(r"^the \w+ of ", "", facts_of(own)["mean_of"])  # other weights
        raise ConfigError(
            "unsupported", f"{own}: is an average; name the checkpoints themselves: {mean_of}"
        )
    first, *others = map(what_it_is, runs)
    for run, here in zip(runs[1:], others, strict=True):
        if keys := sorted(k for k in first.keys() | here if first.get(k) != here.get(k)):
            texts = [f"{key} ({first.get(key)} and {here.get(key)})" for key in keys]
            raise ConfigError(
                "wrong_weights", f"{runs[0]} and {run}: have other models: {', '.join(texts)}"
            )
    first_shapes, *shapes = [{n: p[0].shape for n, p in one.model.items()} for one in checkpoints]
    for run, there in zip(runs[1:], shapes, strict=True):
        if there != first_shapes:
            names = sorted(dict(there.items() ^ first_shapes.items()))
            raise ConfigError(
                "wrong_weights", f"{runs[0]} and {run}: have other tensors: {first_of(names, 8)}"
            )


def what_it_is(run: Path) -> dict[str, Any]:
    """Return the knobs of a run that tell its model and its tokenizer."""
    config = rundir.built_config(run)
    flat = flatten({"model": config.model, "tokenizer": config.tokenizer})
    free = {f"model.{key}" for key in FREE if key != "_target_"}
    return {key: value for key, value in flat.items() if key not in free}


def refuse_average(folder: Path) -> None:
    """Raise ConfigError for the folder of an average, where a run to go on from is needed."""
    if (folder / RECORD).exists():
        raise ConfigError(
            "unsupported",
            f"{folder}: is an average of checkpoints and cannot be resumed; start a run with "
            f"its weights: {command('train', '...', ('model.init_from', folder))}",
        )


def facts_of(folder: Path) -> dict[str, Any]:
    """Return run.json of a run; of an average, that of its last run, and what it is the mean of."""
    if not (folder / RECORD).is_file():
        return rundir.read_run(folder)
    record = read_json(folder / RECORD)
    try:
        weights = record.get("weights", "model")
        of = f"the {weights} of " if weights != "model" else ""
        return record["run"] | {"mean_of": f"{of}{record['mean_of']}"}
    except (KeyError, TypeError):
        raise ConfigError(
            "damaged_file", f"{folder / RECORD}: is damaged; make the average again"
        ) from None
