"""Files of token ids, memory-mapped: .npy (1-d integers, or flat as OLMo's), .bin of llm.c (has a
header) or of Megatron (has an index beside it), other .bin (flat)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llmexp.data.files import remembered
from llmexp.data.megatron import index_of, read_index
from llmexp.data.tokenizers import Tokenizer, end_of_text

NUMPY = b"\x93NUMPY"
# 256 int32: magic, version, number of tokens (llm.c, dev/data/data_common.py)
LLM_C_HEADER_BYTES = 1024
LLM_C_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


def open_tokens(key: str, path: Path, dtype: str) -> np.ndarray:
    """Return the ids of a token file as a 1-d memory map; `dtype` is that of a flat one.

    Raises ValueError, naming `key`, with the sizes for a file that is not whole.
    """
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{key}={path}: the file is empty (0 bytes)")
    try:
        if path.suffix == ".npy":
            return _open_npy(path, size, dtype)
        if path.suffix == ".bin":
            return _open_bin(path, size, dtype)
    except ValueError as error:
        raise ValueError(f"{key}={path}: {error}") from None
    if path.suffix == ".idx":
        pair = f"is the index of {path.stem}.bin; name the .bin file, and the index is found"
        raise ValueError(f"{key}={path}: {pair}; for example {key}={path.with_suffix('.bin')}")
    raise ValueError(f"{key}={path}: a token file ends in .npy or .bin; for text use data=text")


def _open_npy(path: Path, size: int, dtype: str) -> np.ndarray:
    with open(path, "rb") as file:
        head = file.read(len(NUMPY))
    if not NUMPY.startswith(head):  # OLMo's: ids without a header
        return _open_flat(path, size, dtype)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header raises what its parser raises
        raise ValueError(f"no readable .npy file of {size:,} bytes: {error}") from None
    if not isinstance(array, np.ndarray):
        found = type(array).__name__
        raise ValueError(f"a 1-d array of integers is needed, the file holds {found}")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.ndim}-d {array.dtype}"
        raise ValueError(f"a 1-d array of integers is needed, the file holds {found}")
    if not len(array):
        raise ValueError("the array is empty")
    return array


def documents_of(
    arrays: Mapping[Path, np.ndarray], tokenizer: Tokenizer | None, cache: Path, write: bool
) -> tuple[int, int]:
    """Return how many documents the indexes beside token files know, and how many of those do not
    end with the tokenizer's end-of-text id."""
    end = None if tokenizer is None else end_of_text(tokenizer)

    def count() -> list[int]:
        there = unmarked = 0
        for path, ids in arrays.items():
            if path.suffix == ".bin" and index_of(path).exists():
                ends = read_index(index_of(path)).ends
                there += len(ends)
                # an empty document ends where the one before it does
                last = ids[np.unique(ends[ends > 0]) - 1]
                unmarked += int((last != end).sum()) if end is not None else 0
        return [there, unmarked]

    there, unmarked = remembered(cache, "documents", end, list(arrays), count, write)
    return there, unmarked


def _open_bin(path: Path, size: int, dtype: str) -> np.ndarray:
    if index_of(path).exists():
        return _open_megatron(path, size)
    header = np.zeros(3, "<i4")
    if size >= LLM_C_HEADER_BYTES:
        header = np.fromfile(path, "<i4", 3)
    magic, version, count = header.tolist()
    if magic in {known for known, _ in LLM_C_TYPES}:
        return _open_llm_c(path, size, (magic, version), count)
    return _open_flat(path, size, dtype)


def _open_megatron(path: Path, size: int) -> np.ndarray:
    index = read_index(index_of(path))
    expected = index.tokens * index.dtype.itemsize
    if size != expected:
        text = f"{index.tokens:,} {index.dtype.name} tokens = {expected:,} bytes"
        raise ValueError(
            f"{index_of(path).name} says {text}, the file has {size:,}; they are no pair"
        )
    return np.memmap(path, index.dtype, "r", shape=(index.tokens,))


def _open_flat(path: Path, size: int, dtype: str) -> np.ndarray:
    kind = np.dtype(dtype).newbyteorder("<")
    if size % kind.itemsize:
        raise ValueError(
            f"{size:,} bytes are no whole number of {dtype} tokens (data.dtype={dtype})"
        )
    array = np.memmap(path, kind, "r", shape=(size // kind.itemsize,))
    # Wide ids read as narrow ones are all valid: the high halves give them away.
    head = np.asarray(array[: 1 << 16])
    pairs = dtype == "uint16" and len(head) >= 256 and len(array) % 2 == 0
    if pairs and head[1::2].max() <= 3 < head[::2].max():
        raise ValueError(
            "data.dtype=uint16, but every other value is almost 0: these are uint32 tokens"
        )
    return array


def _open_llm_c(path: Path, size: int, form: tuple[int, int], count: int) -> np.ndarray:
    if form not in LLM_C_TYPES:
        raise ValueError(
            f"llm.c format {form[0]} version {form[1]} is unknown; known (magic, version): "
            f"{', '.join(map(str, LLM_C_TYPES))}"
        )
    kind = np.dtype(LLM_C_TYPES[form])
    expected = LLM_C_HEADER_BYTES + count * kind.itemsize
    if count < 1 or size != expected:
        raise ValueError(
            f"the header says {count:,} {kind.name} tokens = {expected:,} bytes, the file has "
            f"{size:,}"
        )
    return np.memmap(path, kind, "r", LLM_C_HEADER_BYTES, shape=(count,))
