"""Name the tensors of a model and its optimizers, and find the box of each that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.mesh.split import is_split
from llmexp.optim.updating import held_by

# The format's names of types, in the order in which its library writes tensors.
TYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32",
    torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

Shape = tuple[int, ...]
Box = list[tuple[int, int]]  # the first and the end of each dimension


@dataclass(frozen=True)
class Piece:
    """The box `local` at `offset` of a full tensor of `shape`."""

    local: Tensor
    shape: Shape
    offset: Shape

    @property
    def dtype(self) -> str:
        return str(self.local.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class StoredPiece:
    """A piece in a file: the box of `size` at `offset` of a full tensor of `shape`."""

    file: Path
    shape: Shape
    offset: Shape
    size: Shape
    dtype: torch.dtype
    at: int  # the byte in the file where its values begin
    value: bytes | None = None  # of a tensor of a few bytes, which the index holds too


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the distinct tensors of the state dict by clean name.

    Buffers of a type that files cannot hold are left out; a model has no such parameter. A tied
    parameter appears once, under its first name. Not by named_parameters: after an evaluation
    FSDP's root shows it gathered parameters, the state dict never.
    """
    distinct: dict[int, str] = {}
    return {
        name: t
        for name, t in model.state_dict(keep_vars=True).items()
        if (t.dtype in TYPES or isinstance(t, nn.Parameter))
        and distinct.setdefault(id(t), name) == name
    }


def names_by_id(model: nn.Module, optimizers: list[Optimizer]) -> dict[int, str]:
    """Return the clean name of each tensor by its id().

    Raises ValueError for optimizers of other tensors."""
    names = {id(t): name for name, t in named_tensors(model).items()}
    for number, optimizer in enumerate(optimizers):
        if not all(id(p) in names for p in held_by(optimizer)):
            raise ValueError(
                f"optimizer {number} holds parameters that are not in the model's state dict"
            )
    return names


def piece_of(tensor: Tensor) -> Piece:
    """Return this rank's part of a tensor, sharing its memory."""
    if is_split(tensor):
        return _piece_of_split(tensor)
    return Piece(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)


def _piece_of_split(tensor: Tensor) -> Piece:
    """Return this rank's part of a DTensor.

    Raises ValueError where it is not the box that its placements say."""
    shape = tuple(tensor.shape)
    offset, size = [0] * tensor.ndim, list(shape)
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


def writes_split(tensor: Any) -> bool:
    """Return whether this rank, of those that hold the same piece, is the one that writes it.

    Of a tensor that tensor parallelism leaves whole, each tensor-parallel rank has a copy, sharded
    by FSDP: the one that rank 0 has a part of is written.
    """
    mesh = tensor.device_mesh
    axes = zip(tensor.placements, mesh.get_coordinate(), strict=True)
    return all(at == 0 for placement, at in axes if placement.is_replicate()) and bool(
        (mesh.mesh == 0).any()
    )


def room_for(parameter: Tensor, key: str, piece: StoredPiece, group: dict[str, Any]) -> Tensor:
    """Return room for an optimizer's tensor.

    It is laid out as the parameter if it has its shape, else whole on every rank."""
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        # torch's other kernels want the count on the host
        return torch.empty(piece.shape, dtype=piece.dtype)
    if piece.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=piece.dtype)
    return torch.empty(piece.shape, dtype=piece.dtype, device=parameter.device)
