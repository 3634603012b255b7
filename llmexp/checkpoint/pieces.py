"""Pieces of tensors: which tensors a model and its optimizers have, which box of each this rank
holds, and a digest of them all that does not depend on the cut."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The box `local` at `offset` of a full tensor of `shape`."""

    local: Tensor
    shape: Shape
    offset: Shape

    @property
    def dtype(self) -> str:
        return str(self.local.dtype).removeprefix("torch.")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Distinct tensors of the state dict by clean name: a tied parameter appears once, under its
    first name.

    Not by named_parameters: after an evaluation FSDP's root shows it gathered parameters, the state
    dict never.
    """
    distinct: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: t for name, t in state.items() if distinct.setdefault(id(t), name) == name}


def names_by_id(model: nn.Module, optimizers: list[Optimizer]) -> dict[int, str]:
    """Return the clean name of each tensor by its id(). Raises ValueError for optimizers of other
    tensors."""
    names = {id(t): name for name, t in named_tensors(model).items()}
    for number, optimizer in enumerate(optimizers):
        if not all(id(p) in names for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"optimizer {number} holds parameters that are not in the model's state dict"
            )
    return names


def is_dtensor(tensor: Tensor) -> bool:
    """Told by an attribute: importing the class costs the start of every run half a second or
    more."""
    return hasattr(tensor, "device_mesh")


def piece_of(tensor: Tensor) -> Piece:
    """Return this rank's part of a tensor, sharing its memory.

    Raises ValueError for a DTensor whose part is not the box that its placements say.
    """
    shape = tuple(tensor.shape)
    offset, size = [0] * tensor.ndim, list(shape)
    if not is_dtensor(tensor):
        return Piece(tensor.detach(), shape, tuple(offset))
    sharded: Any = tensor.detach()
    mesh = sharded.device_mesh
    cuts = zip(sharded.placements, mesh.shape, mesh.get_coordinate(), strict=True)
    # torch cuts a dimension mesh axis by mesh axis, from left to right; but FSDP, whose axis comes
    # first, cuts what tensor parallelism has left. Its placement then has a split factor, and the
    # cut is in truth the last one.
    in_order = sorted(cuts, key=lambda cut: hasattr(cut[0], "split_factor"))
    for placement, ranks, coordinate in in_order:
        if placement.is_replicate():
            continue
        length = size[placement.dim]
        chunk = -(-length // ranks)  # as torch.chunk: the last parts may be smaller or empty
        start = min(chunk * coordinate, length)
        offset[placement.dim] += start
        size[placement.dim] = min(chunk, length - start)
    local = sharded.to_local()
    if tuple(local.shape) != tuple(size):
        raise ValueError(
            f"a part of shape {tuple(local.shape)} where {sharded.placements} gives {tuple(size)}"
        )
    return Piece(local, shape, tuple(offset))


def is_writer(tensor: Tensor, rank: int) -> bool:
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


def weighted_sum(pieces: dict[str, Piece]) -> int:
    """Return the pieces' part of the digest of a state: the sum of all parts modulo 2**64 is the
    digest.

    Every 4-byte word of a tensor (the whole element where it is smaller) is multiplied by an odd
    weight of its place in the full tensor; the sum over a tensor by one of its name, dtype and
    shape. So the digest is the same however the tensors are cut over ranks, and one changed word
    always changes it. It finds accidents, not forgeries.
    """
    total = 0
    for name, piece in pieces.items():
        words, offset = piece.local.detach().contiguous(), piece.offset
        if not words.numel():
            continue
        if words.ndim == 0:
            words, offset = words[None], (0,)
        size = words.element_size()
        words = words.view(torch.int32 if size >= 4 else torch.int16 if size == 2 else torch.uint8)
        start = (*offset[:-1], offset[-1] * max(1, size // 4))
        # words at a time: a CPU's cache, or 64 MiB of a GPU
        most = 2**15 if words.device.type == "cpu" else 2**22
        rows = max(1, most // math.prod(words.shape[1:]))
        found = 0
        for first in range(0, len(words), rows):
            found += _box_sum(words[first : first + rows], (start[0] + first, *start[1:]))
        key = f"{name} {piece.dtype} {piece.shape}"
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
