"""Megatron's pairs of files: NAME.bin holds ids and nothing else, NAME.idx says of which type they
are, and where sequences and documents begin."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the type, sequences, documents + 1
# megatron/core/datasets/indexed_dataset.py, `DType`; 6 and 7 are floats.
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
BLOCK = 1 << 20  # sequences that are looked at together


@dataclass(frozen=True)
class Index:
    """The account that an index gives of the ids beside it."""

    dtype: np.dtype
    tokens: int
    ends: np.ndarray  # int64: where each document ends, in ids


def index_of(path: Path) -> Path:
    """Return where the index of a .bin file would be."""
    return path.with_suffix(".idx")


def read_index(path: Path) -> Index:
    """Return what an index says. Raises ValueError for one that does not fit together."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if not head.startswith(MAGIC):
        text = f"{path.name} is no index of Megatron: it begins with {head[:9]!r}, not {MAGIC!r}"
        raise ValueError(f"{text}; to read the .bin file as flat ids move {path.name} away")
    if len(head) < HEADER.size:
        raise ValueError(f"{path.name} is cut short: {size:,} bytes; get the file again")
    _, version, code, sequences, marks = HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(f"{path.name} has version {version}; known is version {VERSION}")
    if code not in TYPES:
        known = ", ".join(f"{code} ({np.dtype(kind).name})" for code, kind in TYPES.items())
        raise ValueError(f"{path.name} has type code {code}; codes of whole numbers are {known}")
    expected = HEADER.size + 12 * sequences + 8 * marks
    if size not in (expected, expected + sequences):  # a byte of mode a sequence, in some
        text = f"{sequences:,} sequences and {marks:,} document marks = {expected:,} bytes"
        raise ValueError(f"{path.name} says {text}, the file has {size:,}; get the file again")
    if not sequences or not marks:
        raise ValueError(f"{path.name} says {sequences:,} sequences, {marks:,} document marks")
    dtype = np.dtype(TYPES[code])
    lengths = np.memmap(path, "<i4", "r", HEADER.size, (sequences,))
    starts = np.memmap(path, "<i8", "r", HEADER.size + 4 * sequences, (sequences,))
    ends = np.memmap(path, "<i8", "r", HEADER.size + 12 * sequences, (marks,))
    tokens = _tokens(path, lengths, starts, dtype.itemsize)
    if ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any():
        raise ValueError(f"{path.name}: its documents do not begin at 0, rise, and end with all")
    return Index(dtype, tokens, np.append(starts // dtype.itemsize, tokens)[ends[1:]])


def _tokens(path: Path, lengths: np.ndarray, starts: np.ndarray, width: int) -> int:
    """Return the tokens of all sequences, which have to lie one after the other. Raises
    ValueError."""
    at = 0
    for first in range(0, len(lengths), BLOCK):
        block = lengths[first : first + BLOCK].astype(np.int64)
        expected = at + width * (np.cumsum(block) - block)
        wrong = np.flatnonzero((starts[first : first + BLOCK] != expected) | (block < 0))
        if len(wrong):
            number = first + int(wrong[0])
            text = f"sequence {number:,} does not begin where the one before it ends"
            raise ValueError(f"{path.name}: {text}; get the file again")
        at += width * int(block.sum())
    return at // width
