"""Saving: every rank takes a snapshot and writes its files, then rank 0 commits them as one
checkpoint.

The format is in llmexp/checkpoint.py. Nothing here waits for another rank: that all have written
before `commit` is the caller's business.
"""

from __future__ import annotations

import contextlib
import copy as copying
import functools
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.checkpoint.loading import (
    FORMAT_VERSION,
    MANIFEST,
    NOT_RESTORED,
    STATE,
    Shape,
    box,
    fingerprint,
    is_dtensor,
    named_tensors,
    names_by_id,
    steps,
)


@dataclass(frozen=True)
class Pieces:
    """What one rank writes: by file and tensor name the local part, the full shape, the part's
    offset."""

    rank: int
    world: int
    files: dict[str, dict[str, tuple[Tensor, Shape, Shape]]]
    optimizers: list[
        dict[str, Any]
    ]  # parameter groups and states that are no tensors, for state.pt


def snapshot(
    model: nn.Module, optimizers: list[Optimizer], rank: int, world: int, copy: bool
) -> Pieces:
    """Return this rank's pieces of the model and the optimizers.

    With `copy` they are cloned to host memory, with one wait for the device, and training may go
    on; without it they are the live tensors. Raises ValueError for an optimizer of parameters that
    the model does not have.
    """
    tensors = {"model": named_tensors(model), "optimizer": dict[str, Tensor]()}
    names = names_by_id(model, optimizers)
    described: list[dict[str, Any]] = []
    for number, optimizer in enumerate(optimizers):
        groups = [
            {k: copying.deepcopy(v) for k, v in group.items() if k not in NOT_RESTORED}
            | {"params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        plain: dict[str, dict[str, Any]] = {}
        for parameter, states in optimizer.state.items():
            name = names[id(parameter)]
            plain[name] = {
                k: copying.deepcopy(v) for k, v in states.items() if not isinstance(v, Tensor)
            }
            tensors["optimizer"] |= {
                f"{number}/{name}/{k}": v for k, v in states.items() if isinstance(v, Tensor)
            }
        described.append({"groups": groups, "state": plain})

    spread = world > 1 and any(is_dtensor(t) for named in tensors.values() for t in named.values())
    suffix = f"-{rank:05d}-of-{world:05d}" if spread else ""
    files: dict[str, dict[str, tuple[Tensor, Shape, Shape]]] = {}
    for kind, named in tensors.items():
        own = files.setdefault(f"{kind}{suffix}.safetensors", {})
        for name, tensor in named.items():
            if _is_writer(tensor, rank):
                local, offset, _ = box(tensor)
                if local.numel() or not tensor.numel():  # of an uneven cut some ranks hold nothing
                    own[name] = (_to_host(local) if copy else local, tuple(tensor.shape), offset)
    if copy and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return Pieces(
        rank, world, {name: own for name, own in files.items() if own or rank == 0}, described
    )


def _to_host(local: Tensor) -> Tensor:
    return local.to("cpu", non_blocking=True, copy=True, memory_format=torch.contiguous_format)


def write(root: Path, step: int, pieces: Pieces) -> None:
    """Write and flushes this rank's files into the folder of the save, and a note with their
    fingerprints.

    Raises OSError; this rank's files are then gone again. The folder is left for `clean`: other
    ranks may be at it.
    """
    temporary = _temporary(root, step)

    def undo() -> None:
        for name in (*pieces.files, _note(pieces.rank)):
            with contextlib.suppress(OSError):
                (temporary / name).unlink()

    with (
        _undone_on_failure(f"{temporary} on rank {pieces.rank}", undo),
        ThreadPoolExecutor(1) as beside,  # the digests are computed while the disk is busy
    ):
        sums = {name: beside.submit(weighted_sum, own) for name, own in pieces.files.items()}
        root.mkdir(exist_ok=True)
        temporary.mkdir(exist_ok=True)
        written: dict[str, Any] = {}
        for name, own in pieces.files.items():
            boxes = {
                key: {
                    "shape": shape,
                    "offset": offset,
                    "dtype": str(local.dtype).removeprefix("torch."),
                }
                for key, (local, shape, offset) in own.items()
            }
            save_file(
                {key: local.contiguous() for key, (local, _, _) in own.items()},
                temporary / name,
                metadata={"format": "pt", "step": str(step), "pieces": json.dumps(boxes)},
            )
            _order_header(temporary / name)
            written[name] = fingerprint(temporary / name) | {"sum": sums[name].result()}
            _sync(temporary / name)
        _write_json(temporary / _note(pieces.rank), written)


def weighted_sum(pieces: dict[str, tuple[Tensor, Shape, Shape]]) -> int:
    """Return the pieces' part of the digest of a state: the sum of all parts modulo 2**64 is the
    digest.

    Every 4-byte word of a tensor (the whole element where it is smaller) is multiplied by an odd
    weight of its place in the full tensor; the sum over a tensor by one of its name, dtype and
    shape. So the digest is the same however the tensors are cut over ranks, and one changed word
    always changes it. It finds accidents, not forgeries.
    """
    total = 0
    for name, (local, shape, offset) in pieces.items():
        words = local.detach().contiguous()
        if not words.numel():
            continue
        if words.ndim == 0:
            words, offset = words[None], (0,)
        size = words.element_size()
        words = words.view(torch.int32 if size >= 4 else torch.int16 if size == 2 else torch.uint8)
        start = (*offset[:-1], offset[-1] * max(1, size // 4))
        found, most = (
            0,
            2**15 if words.device.type == "cpu" else 2**22,
        )  # words at a time: a CPU's cache, or 64 MiB of a GPU
        rows = max(1, most // math.prod(words.shape[1:]))
        for first in range(0, len(words), rows):
            found += _box_sum(words[first : first + rows], (start[0] + first, *start[1:]))
        key = f"{name} {str(local.dtype).removeprefix('torch.')} {tuple(shape)}"
        weight = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") | 1
        total += weight * (found + (not any(offset)))  # a tensor of zeros counts too
    return total % 2**64


def _box_sum(words: Tensor, offset: Shape) -> int:
    """Return the weighted sum of a box of integers that is at `offset` of its tensor, modulo
    2**64."""
    for dim in reversed(range(words.ndim)):
        words = (words * _weights(dim, offset[dim], words.shape[dim]).to(words.device)).sum(-1)
    return int(words) % 2**64


@functools.lru_cache(maxsize=4)
def _weights(dim: int, start: int, count: int) -> Tensor:
    """Return odd int64 weights of the places start, start + 1, ... of a dimension (splitmix64,
    Steele et al. 2014)."""
    x = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64((dim + 1) * 0xD1B54A32D192ED03 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64))


def _order_header(path: Path) -> None:
    """Put the metadata of a safetensors file, which are in a random order, into that of their
    names, in place."""
    with open(path, "r+b") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:  # the same entries in another order
            f.seek(8)
            f.write(text.ljust(length))


def commit(
    root: Path,
    step: int,
    pieces: Pieces,
    state: dict[str, Any],
    meta: dict[str, Any],
    keep: int | None,
    whole: Sequence[int] = (),
) -> Path:
    """Make what all ranks have written checkpoint `step`, then remove those older than the newest
    `keep` of it and `whole`: the steps of those that this process has loaded or committed. Another
    on the disk may be damaged.

    For rank 0, with its pieces, after `write` has returned on every rank. `state` (plain
    containers) becomes state.pt, with the pieces' optimizers under "optimizers"; `meta` (JSON) goes
    into the manifest. Raises OSError; the files of this save are then removed and what was there
    before is untouched.
    """
    final, temporary = root / f"step_{step:08d}", _temporary(root, step)
    with _undone_on_failure(str(final), lambda: shutil.rmtree(temporary, ignore_errors=True)):
        files: dict[str, Any] = {}
        for rank in range(pieces.world):
            note = temporary / _note(rank)
            files |= json.loads(note.read_text(encoding="utf-8"))
            note.unlink()
        digest = {"model": 0, "optimizer": 0}
        for name, expected in files.items():
            kind = "model" if name.startswith("model") else "optimizer"
            digest[kind] = (digest[kind] + expected.pop("sum")) % 2**64
            if (temporary / name).stat().st_size != expected["size"]:
                raise OSError(
                    f"{temporary / name} does not have the size that its rank has written"
                )
        torch.save({**state, "optimizers": pieces.optimizers}, temporary / STATE)
        # what cannot be read again must not look saved
        torch.load(temporary / STATE, weights_only=True)
        files[STATE] = fingerprint(temporary / STATE)
        _sync(temporary / STATE)
        digests = {kind: f"{total:016x}" for kind, total in digest.items()}
        about = {
            "format_version": FORMAT_VERSION,
            "step": step,
            **meta,
            "digest": digests,
            "files": files,
        }
        _write_json(temporary / MANIFEST, about)
        _sync(temporary)
        old = root / f".{final.name}.old.tmp"
        if final.exists():  # it was found damaged, or the run would not be here again
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(temporary, final)
        _sync(root)
    shutil.rmtree(old, ignore_errors=True)
    known = sorted({*whole, step})
    if keep is not None and len(known) >= keep:
        for found in [p for p in steps(root) if int(p.name[5:]) < known[-keep]]:
            with contextlib.suppress(OSError):
                (found / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(found)
    return final


def clean(root: Path) -> None:
    """Remove what killed or failed saves have left. For rank 0, under the run's lock, while no rank
    saves."""
    for leftover in root.glob(".step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


class Writer:
    """Does one saving after another in the background, never two at once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, function: Callable[[], object]) -> None:
        """Call the function in the background, after the one before; raise what that one raised."""
        self.wait()

        def work() -> None:
            try:
                function()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def busy(self) -> bool:
        """Return whether the function has not returned yet."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the function and raise, once, what it raised."""
        if self._thread is not None:
            self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error


def _is_writer(tensor: Tensor, rank: int) -> bool:
    """Return whether this rank, of those that hold the same piece, is the one that writes it.

    FSDP shards what tensor parallelism leaves whole over a part of the ranks, once in each such
    part: the part with rank 0 writes. Rank 0 also writes what is not sharded at all.
    """
    if not is_dtensor(tensor):
        return rank == 0
    sharded: Any = tensor
    mesh = sharded.device_mesh
    axes = zip(sharded.placements, mesh.get_coordinate(), strict=True)
    return all(at == 0 for placement, at in axes if placement.is_replicate()) and bool(
        (mesh.mesh == 0).any()
    )


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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2, allow_nan=False)
        f.flush()
        os.fsync(f.fileno())


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
