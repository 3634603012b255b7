"""`TokenStream`: token ids on disk or in memory as one flat sequence; `Corpus`: what a data source returns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class TokenStream:
    """One flat sequence of token ids over one or more 1-d integer arrays, which may be memory-mapped files.

    Nothing is loaded but what is asked for. A file that became shorter since it was opened is reported by name
    (ValueError): reading past its new end would kill the process with SIGBUS.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = [np.asarray(a) for a in arrays if len(a)]  # asarray: a memmap slices slowly
        self._ends = np.cumsum([0, *(len(a) for a in self._arrays)], dtype=np.int64)
        self._files = [_mapped_file(a) for a in arrays if len(a)]
        self._sizes = [f[1].size() if f else 0 for f in self._files]
        self._unprepared_length: int | None = None

    @classmethod
    def unprepared(cls, length: int) -> TokenStream:
        """A stream whose length is known but whose tokens are not there; reading it raises ValueError."""
        stream = cls([])
        stream._unprepared_length = length
        return stream

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._unprepared_length is None else self._unprepared_length

    def n_sequences(self, sequence_length: int) -> int:
        """Sequences of `sequence_length` inputs and as many targets, which are the inputs shifted by one."""
        return max(0, len(self) - 1) // sequence_length

    def part(self, start: int, stop: int) -> TokenStream:
        """The tokens [start, stop) as a stream of their own; shares the files."""
        if self._unprepared_length is not None:
            return TokenStream.unprepared(max(0, min(stop, len(self)) - start))
        cuts = [
            self._raw(i)[max(0, start - first) : max(0, stop - first)]
            for i, first in enumerate(self._ends[:-1].tolist())
        ]
        return TokenStream(cuts)

    def read(self, start: int, count: int) -> np.ndarray:
        """int64 [count]: the tokens [start, start + count). Raises IndexError outside the stream."""
        return self.gather(np.array([start], dtype=np.int64), count)[0]

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """int64 [n, count]: for each of `starts` (int64 [n]) the tokens [start, start + count).

        Raises IndexError outside the stream.
        """
        if self._unprepared_length is not None:
            raise ValueError("these tokens have been counted only; prepare the data first: llmexp prepare")
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size and (starts.min() < 0 or starts.max() + count > len(self)):
            raise IndexError(f"tokens up to {starts.max() + count} asked of a stream of {len(self)}")
        rows = np.empty((len(starts), count), dtype=np.int64)
        if not rows.size:
            return rows
        first = np.searchsorted(self._ends, starts, side="right") - 1
        inside = starts + count <= self._ends[first + 1]
        for i in np.unique(first[inside]).tolist():
            self._check_size(i)
            mine = np.flatnonzero(inside & (first == i))
            windows = np.lib.stride_tricks.sliding_window_view(self._arrays[i], count)
            rows[mine] = windows[starts[mine] - self._ends[i]]
        for row in np.flatnonzero(~inside).tolist():
            done, i = 0, int(first[row])
            while done < count:
                self._check_size(i)
                offset = int(starts[row]) + done - int(self._ends[i])
                piece = self._arrays[i][offset : offset + count - done]
                rows[row, done : done + len(piece)] = piece
                done += len(piece)
                i += 1
        return rows

    def _raw(self, i: int) -> np.ndarray:
        """Array i as it was given: a memmap keeps its file through slicing, a plain view does not."""
        found = self._files[i]
        return self._arrays[i] if found is None else found[2]

    def _check_size(self, i: int) -> None:
        found = self._files[i]
        if found is not None and found[1].size() < self._sizes[i]:
            raise ValueError(
                f"{found[0]}: this token file was cut from {self._sizes[i]:,} to {found[1].size():,} bytes while it "
                "was in use; restore it and resume"
            )


def _mapped_file(array: np.ndarray) -> tuple[str, Any, np.ndarray] | None:
    """(path, open map, the memmap) of an array over a file, else None."""
    mapped = getattr(array, "_mmap", None)
    return None if mapped is None else (str(array.filename), mapped, array)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Corpus:
    """What a data source returns.

    `description` says in a few plain words what it is. `fingerprint` (plain values) identifies the content and the
    settings: a run is not resumed on another one.
    """

    train: TokenStream
    val: TokenStream | None
    description: str
    fingerprint: dict[str, Any] = field(default_factory=dict)
    is_text: bool = False  # whether the tokenizer gives the ids a meaning in bytes


def as_corpus(found: Any, vocab_size: int | None = None) -> Corpus:
    """`found` as a `Corpus`: it is one, or a tuple (train, val) of 1-d integer arrays, of which val may be None.

    With `vocab_size` the ids of such arrays are checked. Raises ValueError for anything else.
    """
    if isinstance(found, Corpus):
        return found
    what = "data._target_: the function must return a Corpus or a tuple (train, val) of 1-d integer numpy arrays"
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise ValueError(f"{what}, not {_short(found)}")
    streams: list[TokenStream | None] = []
    for name, array in zip(("train", "val"), found, strict=True):
        if array is None and name == "val":
            streams.append(None)
            continue
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{what}; {name} is {_short(array)}")
        if vocab_size is not None:
            check_ids(array, vocab_size, f"data._target_: {name}")
        streams.append(TokenStream([array]))
    train, val = streams
    if train is None or not len(train):
        raise ValueError(f"{what}; train is empty")
    content = {name: sample_digest(s) for name, s in (("train", train), ("val", val)) if s is not None}
    description = f"{len(train):,} training tokens from your own function"
    return Corpus(train, val if val is not None and len(val) else None, description, {"content": content})


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.ndim} dimensions and type {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def check_ids(array: np.ndarray, vocab_size: int, name: str) -> None:
    """Raises ValueError, with the position, for an id of `array` that is not in [0, vocab_size)."""
    limits = np.iinfo(array.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return
    block = 1 << 20  # ids; small enough to stay in the cache, so that the scan runs at the speed of memory
    for start in range(0, len(array), block):
        ids = np.asarray(array[start : start + block])
        if int(ids.max()) >= vocab_size or (limits.min < 0 and int(ids.min()) < 0):
            at = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
            raise ValueError(
                f"{name}: token id {int(ids[at])} at position {start + at:,} (of {len(array):,}) is not in the "
                f"vocabulary of {vocab_size} ids; valid are 0 to {vocab_size - 1}. Another tokenizer, a larger "
                "model.vocab_size or the right data.dtype may be what is missing"
            )


def sample_digest(stream: TokenStream, pieces: int = 16, piece_tokens: int = 16384) -> str:
    """sha256 over the length and evenly spread pieces, first and last tokens among them: quick for any size."""
    digest = hashlib.sha256(str(len(stream)).encode())
    count = min(piece_tokens, len(stream))
    for start in np.unique(np.linspace(0, len(stream) - count, pieces).astype(np.int64)).tolist():
        digest.update(stream.read(start, count).tobytes())
    return digest.hexdigest()
