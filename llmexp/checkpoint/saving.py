"""Save a checkpoint: every rank writes a snapshot of its part, then rank 0 commits them as one.

The format is in loading.py. Nothing here waits for another rank: `commit_checkpoint` is called once
all have written.
"""

from __future__ import annotations

import contextlib
import copy as copying
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.checkpoint.folders import MANIFEST, checkpoint_folder, checkpoint_folders, step_of
from llmexp.checkpoint.hashes import fingerprint
from llmexp.checkpoint.loading import CHECKPOINT_FORMAT, NOT_RESTORED, STATE
from llmexp.checkpoint.slices import Piece, named_tensors, names_by_id, piece_of, writes_split
from llmexp.checkpoint.stored import entry_of
from llmexp.checkpoint.tensor_files import write_tensors
from llmexp.config.values import Plain
from llmexp.mesh.split import is_split
from llmexp.models.common import all_finite
from llmexp.optim.eval_weights import TRAINED
from llmexp.optim.states import apart, traits_of
from llmexp.system.fileio import flush_to_disk, text_sha256, write_json


@dataclass(frozen=True)
class Pieces:
    """Hold the part of a checkpoint that one rank writes: its pieces by file and tensor name."""

    rank: int
    world: int
    files: dict[str, dict[str, Piece]]
    # for state.pt: parameter groups and states that are no tensors; buffers beside the model's file
    optimizers: list[Plain]
    buffers: dict[str, Tensor]
    # tensors of this rank with values that a resumed run could not go on from
    bad: list[str] = field(default_factory=list)


def snapshot(
    model: nn.Module,
    optimizers: list[Optimizer],
    rank: int,
    world: int,
    copy: bool,
    more: Mapping[str, Mapping[str, Tensor]] | None = None,
    trained: Mapping[int, Tensor] | None = None,
) -> Pieces:
    """Return this rank's pieces of the model, the optimizers and of `more`, by names of files.

    With `copy` they are cloned to host memory, with one wait for the device, and training may go
    on; without it they are the live tensors. `trained`: of schedule-free optimizers, by the ids of
    parameters: the weights that training goes on from, while the parameter holds their average.
    All values are looked at once, on their device. Raises ValueError for an optimizer of parameters
    that the model does not have.
    """
    names = names_by_id(model, optimizers)
    states: dict[str, Tensor] = {}
    described: list[Plain] = []
    for number, optimizer in enumerate(optimizers):
        groups = []
        for group in optimizer.param_groups:
            kept = {k: copying.deepcopy(v) for k, v in group.items() if k not in NOT_RESTORED}
            groups.append(kept | {"params": [names[id(p)] for p in group["params"]]})
        plain: dict[str, Plain] = {}
        for parameter, state in optimizer.state.items():
            name = names[id(parameter)]
            plain[name], held = apart(state)
            if trained and id(parameter) in trained:
                held[TRAINED] = trained[id(parameter)]
            states |= {f"{number}/{name}/{key}": value for key, value in held.items()}
        described.append({"groups": groups, "state": plain})

    tensors = {"model": named_tensors(model), "optimizer": states}
    tensors |= {kind: dict(named) for kind, named in (more or {}).items()}
    spread = world > 1 and any(is_split(t) for named in tensors.values() for t in named.values())
    suffix = f"-{rank:05d}-of-{world:05d}" if spread else ""
    files: dict[str, dict[str, Piece]] = {}
    looked: dict[str, Tensor] = {}  # by kind and name
    for kind, named in tensors.items():
        own: dict[str, Piece] = {}
        for name, t in named.items():
            p = piece_of(t)
            # of an uneven cut some ranks hold nothing
            holds = p.local.numel() or 0 in p.shape
            if holds and (writes_split(t) if is_split(t) else rank == 0):
                looked[f"{kind} {name}"] = p.local
                own[name] = replace(p, local=_to_host(p.local)) if copy else p
        if own or rank == 0:
            files[f"{kind}{suffix}.safetensors"] = own
    others = other_buffers(model)
    if rank == 0:  # the one that writes them
        looked |= {f"model {name}": buffer.detach() for name, buffer in others.items()}
    on_host = {id(b): _to_host(b.detach()) for b in others.values()}
    buffers = {name: on_host[id(b)] for name, b in others.items()}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    bad = _not_finite(looked, tensors["model"], optimizers)
    return Pieces(rank, world, files, described, buffers, bad)


def _not_finite(
    looked: Mapping[str, Tensor], model: Mapping[str, Tensor], optimizers: list[Optimizer]
) -> list[str]:
    """Return the names of tensors with values that are not finite, found by norms on the device.

    NaN is never in its place. Infinities are in a buffer, as in a mask of attention, and in a state
    of an optimizer that is none of ours, as in a smallest value so far; not in weights, of which
    such a state may hold a copy. The norm of finite values may overflow.
    """
    real = dict[str, Tensor]()
    for place, t in looked.items():
        t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        # types of one byte are codes, whose scales are tensors of their own
        if t.is_floating_point() and t.itemsize > 1:
            real[place] = t
    norms = [torch.linalg.vector_norm(t) for t in real.values()]  # the host waits for all of them
    found = []
    for norm, (place, t) in zip(map(float, norms), real.items(), strict=True):
        kind, _, name = place.partition(" ")
        with_inf = kind == "model" and not isinstance(model.get(name), nn.Parameter)
        if kind == "optimizer" and not name.endswith(f"/{TRAINED}"):
            with_inf = traits_of(optimizers[int(name.partition("/")[0])]) is not None
        if not math.isfinite(norm) and (t.isnan().any() if with_inf else not all_finite(t)):
            found.append(place)
    return found


def other_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `named_tensors` leaves out: the state dict does, or their type is.

    A buffer that has several names is there under each.
    """
    named, found = named_tensors(model), model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in found if name not in named}


def _to_host(local: Tensor) -> Tensor:
    return local.to("cpu", non_blocking=True, copy=True, memory_format=torch.contiguous_format)


def write_pieces(root: Path, step: int, pieces: Pieces) -> None:
    """Write and flush this rank's files, then a note with their hashes.

    Raises OSError; this rank's files are then gone again. The folder is left for
    `remove_leftovers`: other ranks may be at it.
    """
    temporary = _temporary(root, step)

    def undo() -> None:
        for name in (*pieces.files, _note(pieces.rank)):
            with contextlib.suppress(OSError):
                (temporary / name).unlink()

    with _undone_on_failure(f"{temporary} on rank {pieces.rank}", undo):
        root.mkdir(exist_ok=True)
        temporary.mkdir(exist_ok=True)
        files: Plain = {}
        index: dict[str, dict[str, list[Any]]] = {}
        for name, own in pieces.files.items():
            boxes = {
                key: {"shape": p.shape, "offset": p.offset, "dtype": p.dtype}
                for key, p in own.items()
            }
            metadata = {"format": "pt", "step": str(step), "pieces": json.dumps(boxes)}
            tensors = {key: p.local for key, p in own.items()}
            files[name], begins = write_tensors(temporary / name, tensors, metadata)
            kind = name.partition("-")[0].partition(".")[0]
            index[kind] = {key: entry_of(name, begins[key], p) for key, p in own.items()}
        write_json(temporary / _note(pieces.rank), {"files": files, "index": index})


def not_written(root: Path, step: int, world: int) -> list[int]:
    """Return the ranks besides 0 that have not written their part of a checkpoint on its way."""
    return [r for r in range(1, world) if not (_temporary(root, step) / _note(r)).exists()]


def commit_checkpoint(
    root: Path,
    step: int,
    pieces: Pieces,
    state: Plain,
    meta: Plain,
    keep: int | None,
    saved: Sequence[int] = (),
    keep_every: int | None = None,
) -> Path:
    """Make what all ranks have written checkpoint `step`, then remove older checkpoints.

    For rank 0, with its pieces, after `write_pieces` has returned on every rank. `state` (plain
    containers) becomes state.pt, with the pieces' `optimizers` and `buffers`; `meta` (JSON) goes
    into the manifest. The newest `keep` of `step` and `saved`, those that the processes of this run
    have loaded or committed, stay, and multiples of `keep_every`; all others that are older go.
    What else is there does not count towards `keep`: it may be damaged. Raises OSError; the files
    of this save are then removed and what was there before is untouched.
    """
    final, temporary = checkpoint_folder(root, step), _temporary(root, step)
    kept = sorted({*saved, step})[-(keep or 0) :]
    with _undone_on_failure(str(final), lambda: shutil.rmtree(temporary, ignore_errors=True)):
        files, index = _collect(temporary, pieces.world)
        beside = {"optimizers": pieces.optimizers, "buffers": pieces.buffers}
        torch.save(state | beside, temporary / STATE)
        # what cannot be read again must not look saved
        torch.load(temporary / STATE, weights_only=True)
        files[STATE] = fingerprint(temporary / STATE)
        flush_to_disk(temporary / STATE)
        manifest = {
            "format": CHECKPOINT_FORMAT,
            "step": step,
            "kept": kept,
            **meta,
            "files": files,
            "index_sha256": text_sha256(index),
            "index": index,
        }
        write_json(temporary / MANIFEST, manifest)
        flush_to_disk(temporary)
        old = root / f".{final.name}.old.tmp"
        if replaced := final.exists():  # such as a damaged one, which no resume took
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        try:
            os.rename(temporary, final)
        except OSError:
            if replaced:
                os.rename(old, final)
            raise
        flush_to_disk(root)
    shutil.rmtree(old, ignore_errors=True)
    for older in checkpoint_folders(root) if len(kept) == keep else ():
        number = step_of(older)
        stays = keep_every is not None and number > 0 and number % keep_every == 0
        if number < kept[0] and not stays:
            with contextlib.suppress(OSError):
                (older / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(older)
    return final


def _collect(temporary: Path, world: int) -> tuple[Plain, str]:
    """Return the fingerprints of the files that all ranks have written, and the index of pieces.

    The ranks' notes have them. The index is JSON: kind -> name -> an entry for each piece."""
    files: Plain = {}
    index: dict[str, dict[str, list[Any]]] = {}
    for rank in range(world):
        note = temporary / _note(rank)
        written = json.loads(note.read_text(encoding="utf-8"))
        files |= written["files"]
        for kind, entries in written["index"].items():
            for name, entry in entries.items():
                index.setdefault(kind, {}).setdefault(name, []).append(entry)
        note.unlink()
    for name, expected in files.items():
        if (temporary / name).stat().st_size != expected["size"]:
            raise OSError(f"{temporary / name} does not have the size that its rank has written")
    return files, json.dumps(index, separators=(",", ":"))


def remove_leftovers(root: Path) -> None:
    """Remove what killed or failed saves have left.

    For rank 0, under the run's lock, while no rank saves."""
    for leftover in root.glob(".step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _undone_on_failure(what: str, undo: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        undo()
        if isinstance(error, Exception) and not isinstance(error, OSError):
            # torch and safetensors hide the errno
            raise OSError(f"saving {what} failed: {error}") from error
        raise


def _temporary(root: Path, step: int) -> Path:
    return root / f".step_{step:08d}.tmp"


def _note(rank: int) -> str:
    return f"written-{rank:05d}.json"
