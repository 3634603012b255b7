"""Read boxes of tensors from the files of a checkpoint: no more than a rank keeps.

A file is read, not mapped: mapped pages would count as this process's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llmexp.checkpoint.slices import TYPES, Piece, StoredPiece
from llmexp.checkpoint.tensor_files import bytes_of
from llmexp.config.values import Plain

READ_BYTES = 2**24  # that are read at a time where they cannot be read into their place
_SMALL = 16  # bytes of a tensor that the index holds: counts of steps, which all ranks need

DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in TYPES}
Read = Callable[[memoryview, int], None]  # fills bytes from a file, from a byte of it on


def entry_of(file: str, at: int, piece: Piece) -> list[Any]:
    """Return the entry of a piece in the index, as plain values."""
    entry: list[Any] = [file, at, piece.shape, piece.offset, tuple(piece.local.shape), piece.dtype]
    if piece.local.nbytes <= _SMALL:
        entry.append(bytes_of(piece.local).hex())
    return entry


def read_index_entry(folder: Path, entry: list[Any], files: Plain) -> StoredPiece:
    """Return the piece that an entry of the index describes. Raises ValueError and the like."""
    file, at, shape, offset, size, dtype, *value = entry
    if file not in files:
        raise ValueError(f"the index names {file!r}, which the manifest does not")
    held = bytes.fromhex(value[0]) if value else None
    boxes = tuple(shape), tuple(offset), tuple(size)
    return StoredPiece(folder / file, *boxes, DTYPES_BY_NAME[dtype], int(at), held)


def copy_overlap(own: Piece, piece: StoredPiece, read: Read) -> bool:
    """Copy what a stored piece has of our box; return whether `read` was needed for it.

    It takes some whole rows of the piece at a time."""
    low = [max(a, b) for a, b in zip(own.offset, piece.offset, strict=True)]
    ends = zip(own.offset, own.local.shape, piece.offset, piece.size, strict=True)
    high = [min(a + n, b + m) for a, n, b, m in ends]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return False
    here, there = (
        tuple(slice(a - o, b - o) for a, b, o in zip(low, high, start, strict=True))
        for start in (own.offset, piece.offset)
    )
    target = own.local[here]
    if piece.value is not None:
        stored = torch.frombuffer(bytearray(piece.value), dtype=piece.dtype)
        target.copy_(stored.view(piece.size)[there])
        return False
    if not piece.size:
        target, there = target.view(1), (slice(0, 1),)
    size = piece.size or (1,)
    width = math.prod(size[1:]) * piece.dtype.itemsize  # bytes of a row
    direct = target.device.type == "cpu" and target.dtype == piece.dtype
    direct = direct and target.is_contiguous() and target.shape[1:] == size[1:]
    rows = max(1, READ_BYTES // width)
    for first in range(0, target.shape[0], rows):
        part = target[first : first + rows]
        room = part if direct else torch.empty((part.shape[0], *size[1:]), dtype=piece.dtype)
        data = room.view(-1).view(torch.uint8).numpy().data
        read(data, piece.at + (there[0].start + first) * width)
        if not direct:
            part.copy_(room[(slice(None), *there[1:])])
    return True
