"""Open files of token ids, memory-mapped.

These are .npy (1-d integers, or flat as OLMo's), .bin of llm.c (has a header) or of Megatron (has
an index beside it), and other .bin (flat).

Labels beside them are as Hugging Face's: the id itself, or -100 where it is no target.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.config.kinds import kind_of_error
from llmexp.config.labels import plural
from llmexp.config.values import refuse
from llmexp.data.cache import cached
from llmexp.data.files import allow_open_files, files_fingerprint
from llmexp.data.matching import match_files
from llmexp.data.stream import TokenStream, sample_digest
from llmexp.data.tokenizers.base import Tokenizer

NUMPY = b"\x93NUMPY"
# 256 int32: magic, version, number of tokens (llm.c, dev/data/data_common.py)
LLM_C_HEADER_BYTES = 1024
LLM_C_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
# NAME.bin of Megatron holds ids and nothing else; NAME.idx says of which type they are, and where
# sequences and documents begin.
MEGATRON = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the type, sequences, documents + 1
# megatron/core/datasets/indexed_dataset.py, `DType`; 6 and 7 are floats.
ID_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLAT = "uint16"  # type of flat ids where data.dtype is null
TRIED = 1 << 16  # flat ids, for another type
HIGH = 3  # high halves of ids below 2**18
FEWEST = 16  # low halves that have to be there
SEQUENCES = 1 << 20  # sequences that are looked at together
NO_TARGET = -100  # as Hugging Face's
BLOCK_LABELS = 1 << 20  # labels that are compared at a time


def index_of(path: Path) -> Path | None:
    """Return the index of Megatron beside a .bin file, or beside the file that it is a link to."""
    places = (path, path.resolve()) if path.suffix == ".bin" else ()
    beside = (place.with_suffix(".idx") for place in places)
    return next((index for index in beside if os.path.lexists(index)), None)


def open_all(given: Mapping[str, Iterable[Path]], dtype: str | None) -> dict[Path, np.ndarray]:
    """Return the open token files of some knobs; `dtype` is that of flat ones.

    Raises ValueError, also for a `dtype` where each file says its own.
    """
    arrays = {path: open_tokens(key, path, dtype) for key, some in given.items() for path in some}
    flat = (p for p, ids in arrays.items() if not getattr(ids, "offset", 1) and not index_of(p))
    if dtype is not None and next(flat, None) is None:
        text = f"does nothing: {next(iter(arrays))} says itself of which type its ids are"
        raise refuse("idle_knob", "data.dtype", dtype, f"{text}; leave it out")
    return arrays


def open_tokens(key: str, path: Path, dtype: str | None) -> np.ndarray:
    """Return the ids of a token file as a 1-d memory map; `dtype` is that of a flat one.

    Raises ValueError, naming `key`, with the sizes for a file that is not whole.
    """
    size = path.stat().st_size
    if size == 0:
        raise refuse("damaged_file", key, path, "the file is empty (0 bytes)")
    try:
        if path.suffix == ".npy":
            return _open_npy(path, size, dtype or FLAT)
        if path.suffix == ".bin":
            return _open_bin(path, size, dtype or FLAT)
    except (OSError, ValueError) as error:
        raise refuse(kind_of_error(error, "damaged_file"), key, path, str(error)) from None
    if path.suffix == ".idx":
        pair = f"is the index of {path.stem}.bin; name the .bin file, and the index is found"
        raise refuse("bad_data", key, path, pair, path.with_suffix(".bin"))
    raise refuse("bad_data", key, path, "a token file ends in .npy or .bin; for text use data=text")


def _open_npy(path: Path, size: int, dtype: str) -> np.ndarray:
    with open(path, "rb") as file:
        head = file.read(len(NUMPY))
    if not NUMPY.startswith(head):  # OLMo's: ids without a header
        return _open_flat(path, size, dtype)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header raises what its parser raises
        raise ValueError(f"no readable .npy file of {size:,} bytes: {error}") from None
    is_array = isinstance(array, np.ndarray)
    if not is_array or array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.ndim}-d {array.dtype}" if is_array else type(array).__name__
        raise ValueError(f"a 1-d array of integers is needed, the file holds {found}")
    if not len(array):
        raise ValueError("the array is empty")
    return array


def documents_of(
    arrays: Mapping[Path, np.ndarray], tokenizer: Tokenizer | None, cache: Path
) -> tuple[str, int]:
    """Return in words what indexes know of documents, and how many lack the end-of-text id."""
    end = None if tokenizer is None else tokenizer.eot_token
    indexes = {path: found for path in arrays if (found := index_of(path)) is not None}

    def count() -> list[int]:
        there = unmarked = 0
        for path, index in indexes.items():
            _, _, ends = read_index(index)
            there += len(ends)
            # an empty document ends where the one before it does
            last = arrays[path][np.unique(ends[ends > 0]) - 1]
            unmarked += int((last != end).sum()) if end is not None else 0
        return [there, unmarked]

    there, unmarked = cached(cache, "documents", end, [*indexes, *indexes.values()], count)
    text = f", {plural(there, 'document')} by their indexes" if there else ""
    text += f" ({unmarked:,} do not end with the end-of-text id)" if unmarked else ""
    return text, unmarked


def _open_bin(path: Path, size: int, dtype: str) -> np.ndarray:
    if (index := index_of(path)) is not None:
        kind, count, _ = read_index(index)
        if size != (expected := count * kind.itemsize):
            text = f"says {count:,} {kind.name} tokens = {expected:,} bytes"
            raise ValueError(
                f"{index.name} {text}, the file has {size:,}; they do not belong together"
            )
        return np.memmap(path, kind, "r", shape=(count,))
    header = np.zeros(3, "<i4")
    if size >= LLM_C_HEADER_BYTES:
        header = np.fromfile(path, "<i4", 3)
    magic, version, count = header.tolist()
    if magic not in {known for known, _ in LLM_C_TYPES}:
        return _open_flat(path, size, dtype)
    if (magic, version) not in LLM_C_TYPES:
        known = ", ".join(map(str, LLM_C_TYPES))
        text = f"llm.c format {magic} version {version} is unknown; known (magic, version)"
        raise ValueError(f"{text}: {known}")
    kind = np.dtype(LLM_C_TYPES[magic, version])
    expected = LLM_C_HEADER_BYTES + count * kind.itemsize
    if count < 1 or size != expected:
        text = f"the header says {count:,} {kind.name} tokens = {expected:,} bytes"
        raise ValueError(f"{text}, the file has {size:,}")
    return np.memmap(path, kind, "r", LLM_C_HEADER_BYTES, shape=(count,))


def _open_flat(path: Path, size: int, dtype: str) -> np.ndarray:
    kind = np.dtype(dtype).newbyteorder("<")
    if size % kind.itemsize:
        text = f"{size:,} bytes are not a whole number of {dtype} tokens (data.dtype={dtype})"
        raise ValueError(text)
    array = np.memmap(path, kind, "r")
    if (wider := wider_type(array)) is not None:
        text = f"data.dtype={dtype}, but at every other place is 0, or almost: these are {wider} "
        text += f"tokens; give data.dtype={wider} (if they are ids all the same, np.save them)"
        raise ValueError(text)
    return array


def wider_type(ids: np.ndarray) -> str | None:
    """Return the type of flat ids that were opened as a narrower one; None where nothing says so.

    Wide ids read as narrow ones are all valid, twice or four times as many. Their high halves give
    them away: 0 at every second place, or up to HIGH in 16 bits of an id of 32.
    """
    count = min(len(ids), TRIED) // 4 * 4
    first = (len(ids) - count) // 8 * 4  # a piece in the middle
    quads, narrow = ids[first : first + count].reshape(-1, 4), ids.itemsize == 2
    for most in (0, HIGH * narrow) if ids.itemsize < 8 and len(ids) % 2 == 0 else ():
        if (quads[:, 1::2] <= most).all() and (quads[:, ::2] > most).sum() >= FEWEST:
            return "uint32" if narrow and quads[:, 2:].any() else "int64"
    return None


def read_index(path: Path) -> tuple[np.dtype, int, np.ndarray]:
    """Return the type of the ids beside an index, how many, and where each document ends (int64).

    Raises ValueError for an index that does not fit together.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if not head.startswith(MEGATRON):
        text = f"{path.name} is not a Megatron index: it begins with {head[:9]!r}, not {MEGATRON!r}"
        raise ValueError(f"{text}; to read the .bin file as flat ids move {path.name} away")
    if len(head) < HEADER.size:
        raise ValueError(f"{path.name} is truncated: {size:,} bytes; get the file again")
    _, version, code, sequences, marks = HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(f"{path.name} has version {version}; known is version {VERSION}")
    if code not in ID_TYPES:
        known = ", ".join(f"{code} ({np.dtype(kind).name})" for code, kind in ID_TYPES.items())
        raise ValueError(f"{path.name} has type code {code}; codes of whole numbers are {known}")
    expected = HEADER.size + 12 * sequences + 8 * marks
    if size not in (expected, expected + sequences):  # a byte of mode a sequence, in some
        text = f"{sequences:,} sequences and {marks:,} document marks = {expected:,} bytes"
        raise ValueError(f"{path.name} says {text}, the file has {size:,}; get the file again")
    if not sequences or not marks:
        raise ValueError(f"{path.name} says {sequences:,} sequences, {marks:,} document marks")
    dtype = np.dtype(ID_TYPES[code])
    lengths = np.memmap(path, "<i4", "r", HEADER.size, (sequences,))
    starts = np.memmap(path, "<i8", "r", HEADER.size + 4 * sequences, (sequences,))
    ends = np.memmap(path, "<i8", "r", HEADER.size + 12 * sequences, (marks,))
    tokens = _tokens(path, lengths, starts, dtype.itemsize)
    if ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any():
        raise ValueError(f"{path.name}: its documents do not begin at 0, rise, and end with all")
    return dtype, tokens, np.append(starts // dtype.itemsize, tokens)[ends[1:]]


def _tokens(path: Path, lengths: np.ndarray, starts: np.ndarray, width: int) -> int:
    """Return the tokens of all sequences, which have to lie one after the other.

    Raises ValueError.
    """
    at = 0
    for first in range(0, len(lengths), SEQUENCES):
        block = lengths[first : first + SEQUENCES].astype(np.int64)
        expected = at + width * (np.cumsum(block) - block)
        wrong = np.flatnonzero((starts[first : first + SEQUENCES] != expected) | (block < 0))
        if len(wrong):
            number = first + int(wrong[0])
            text = f"sequence {number:,} does not begin where the one before it ends"
            raise ValueError(f"{path.name}: {text}; get the file again")
        at += width * int(block.sum())
    return at // width


def add_labels(
    given: Mapping[str, Any],
    streams: Sequence[TokenStream],
    paths: Mapping[str, Sequence[Path]],
    arrays: Mapping[Path, np.ndarray],
    cache: Path,
) -> dict[str, Any]:
    """Give each stream the labels of its knob, if any, and return what identifies them.

    They have a file of as many labels for each of ids, in the same order. Label i belongs to id i:
    nothing is shifted. Raises ValueError.
    """
    if given["data.val_labels"] is not None and len(streams) < 2:
        text = "there are no data.val_files; the labels of training cover what is held out of it"
        raise refuse("idle_knob", "data.val_labels", given["data.val_labels"], text, "null")
    found = {}
    for (key, patterns), stream, some in zip(given.items(), streams, paths.values(), strict=False):
        if patterns is None:
            continue
        files = match_files(key, patterns, [])
        if len(files) != len(some):
            text = f"{len(files)} files of labels do not fit {len(some)} token files"
            raise refuse(
                "conflict", key, patterns, f"{text}; one for each is needed, in the same order"
            )
        allow_open_files(len(files) + len(some))
        labels = {path: open_tokens(key, path, None) for path in files}
        _check(key, labels, {path: arrays[path] for path in some}, cache)
        stream.labels = TokenStream(labels.values())
        digests = {path: sample_digest(TokenStream([array])) for path, array in labels.items()}
        found[key.removeprefix("data.")] = files_fingerprint(digests)
    return found


def _check(
    key: str, labels: Mapping[Path, np.ndarray], ids: Mapping[Path, np.ndarray], cache: Path
) -> None:
    """Raise ValueError for a label that is neither the id at its place nor NO_TARGET."""
    pairs = list(zip(labels.items(), ids.items(), strict=True))
    for (path, array), (beside, there) in pairs:
        if array.dtype.kind != "i":
            text = f"labels are signed integers in .npy, so that -100 fits; these are {array.dtype}"
            raise refuse("bad_data", key, path, text)
        if len(array) != len(there):
            text = f"{len(array):,} labels do not fit the {len(there):,} ids of {beside}"
            raise refuse("bad_data", key, path, text)

    def scan() -> None:
        for (path, array), (beside, ids_there) in pairs:
            for start, some in TokenStream([array]).blocks(BLOCK_LABELS):
                there = ids_there[start : start + BLOCK_LABELS]
                if len(wrong := np.flatnonzero((some != there) & (some != NO_TARGET))):
                    at = int(wrong[0])
                    text = f"label {int(some[at])} at position {start + at:,} is neither -100 nor "
                    text += f"the id there, {int(there[at])} of {beside}; labels are not shifted: "
                    raise refuse("bad_data", key, path, f"{text}label i is id i")

    cached(cache, "labels", key, [*labels, *ids], scan)
