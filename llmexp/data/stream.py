"""Hold token ids as one flat sequence (`TokenStream`), and all data of a run (`Corpus`)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llmexp.config.kinds import Kind
from llmexp.config.values import ConfigError
from llmexp.data.files import cut_text
from llmexp.system.fileio import file_state, sampled

if TYPE_CHECKING:
    from llmexp.data.mixture import Mixture

OTHER_IDS = "Another tokenizer, a larger model.vocab_size or the right data.dtype may help"


class DataChanged(OSError, ValueError):
    """A data file is not any more what it was when it was opened."""

    kind: Kind = "bad_data"


@dataclass(frozen=True)
class Shard:
    """One array of a stream, as it was opened, and what the stream has of it."""

    name: str  # the path of its file; of an array in memory, that it is one
    array: np.ndarray  # the whole one
    ids: np.ndarray  # a slice of it
    mapped: Any = None  # the open map of its file
    size: int = 0  # of its file, in bytes
    state: tuple[int, int, int, int] | None = None  # `file_state`; None: it has no path
    sample: str = ""  # of its content

    def check_size(self) -> None:
        """Raise DataChanged if the file became shorter.

        Reading past its end would kill the process with SIGBUS.
        """
        if self.mapped is not None and (now := self.mapped.size()) < self.size:
            text = cut_text(self.name, self.size, now)
            raise DataChanged(f"{text}; restore it and resume")

    def check_content(self) -> str:
        """Return what happened to a file whose old ids are still read; empty where nothing did.

        Raises DataChanged where other ids may be read now.
        """
        try:
            self.check_size()
            if self.state is None or (now := file_state(self.name)) == self.state:
                return ""
            if now[:3] == self.state[:3] and sampled(self.name) == self.sample:
                return ""  # other rights, or a new link to it
        except DataChanged:
            raise
        except FileNotFoundError:
            return f"{self.name}: this token file was deleted while it was in use"
        except (OSError, ValueError):  # such as a file server that is away
            return ""
        if now[0] != self.state[0]:  # another file: the open map still reads the old one
            return f"{self.name}: this token file was replaced while it was in use"
        grown = "" if now[1] == self.size else f", and has {now[1]:,} bytes, not {self.size:,}"
        raise DataChanged(f"{self.name}: this token file was written to while it was in use{grown}")


def _opened(array: np.ndarray) -> Shard:
    ids = np.asarray(array)  # a memmap slices slowly
    mapped, name = (getattr(array, key, None) for key in ("_mmap", "filename"))
    if mapped is None or name is None:
        return Shard("an array in memory", array, ids)
    return _of_file(array, ids, mapped, str(name))


def _of_file(array: np.ndarray, ids: np.ndarray, mapped: Any, name: str) -> Shard:
    size, state, sample = mapped.size(), None, ""
    with contextlib.suppress(OSError):  # else a temporary file without a name any more
        inode, _, written, changed = file_state(name)
        state, sample = (inode, size, written, changed), sampled(name)
    return Shard(name, array, ids, mapped, size, state, sample)


class TokenStream:
    """One flat sequence of token ids over 1-d integer arrays, which may be memory-mapped files.

    Nothing is loaded but what is asked for. A file that became shorter since it was opened is
    reported by name (DataChanged): reading past its new end would kill the process with SIGBUS.
    """

    def __init__(self, arrays: Iterable[np.ndarray | Shard]) -> None:
        """Hold the arrays one after the other."""
        shards = (a if isinstance(a, Shard) else _opened(a) for a in arrays)
        self.shards = [shard for shard in shards if len(shard.ids)]
        self._ends = np.cumsum([0, *(len(s.ids) for s in self.shards)], dtype=np.int64)
        # Of the same length: below 0 where an id is no target; None: all are.
        self.labels: TokenStream | None = None

    @classmethod
    def joined(cls, streams: Sequence[TokenStream]) -> TokenStream:
        """Return the tokens of several streams, one after the other; shares their files."""
        return cls(shard for stream in streams for shard in stream.shards)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def n_sequences(self, sequence_length: int) -> int:
        """Return how many sequences of `sequence_length` inputs and as many targets there are.

        Targets are the inputs shifted by one.
        """
        return max(0, len(self) - 1) // sequence_length

    def part(self, start: int, stop: int) -> TokenStream:
        """Return the tokens [start, stop) as a stream of their own; shares the files."""
        stream = TokenStream(
            replace(shard, ids=shard.ids[max(0, start - first) : max(0, stop - first)])
            for first, shard in self._placed()
        )
        stream.labels = None if self.labels is None else self.labels.part(start, stop)
        return stream

    def starts_its_shards(self) -> bool:
        """Return whether the tokens are all of the shards, or all but some at their end."""
        whole = all(len(s.ids) == len(s.array) for s in self.shards[:-1])
        return whole and all(s.ids.ctypes.data == s.array.ctypes.data for s in self.shards)

    def _placed(self) -> Iterator[tuple[int, Shard]]:
        """Yield each shard behind the position of its first token."""
        return zip(self._ends.tolist(), self.shards, strict=False)

    def blocks(self, most: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield all tokens in order, uncopied: (position of the first, at most `most` ids)."""
        for first, shard in self._placed():
            for start in range(0, len(shard.ids), most):
                shard.check_size()
                yield first + start, shard.ids[start : start + most]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return int64 [count]: the tokens [start, start + count). Raises IndexError."""
        return self.gather(np.array([start], dtype=np.int64), count)[0]

    def hidden(self, starts: np.ndarray, count: int) -> np.ndarray | None:
        """Return bool [n, count]: which ids from `starts` on are no targets; None: all are."""
        return None if self.labels is None else self.labels.gather(starts, count) < 0

    def samples(self, piece_tokens: int) -> Iterator[np.ndarray]:
        """Yield 16 pieces of the stream, spread evenly, first and last tokens among them."""
        count = min(piece_tokens, len(self))
        starts = np.linspace(0, len(self) - count, 16).astype(np.int64)
        for start in np.unique(starts).tolist():
            yield self.read(start, count)

    def holds(self, token: int | None) -> bool:
        """Return whether the id is there.

        Of a stream of more than a million tokens evenly spread pieces are looked at.
        """
        return token is not None and any(bool((p == token).any()) for p in self.samples(1 << 16))

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """int64 [n, count]: for each of `starts` (int64 [n]) the tokens [start, start + count).

        Raises IndexError outside the stream.
        """
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size and (starts.min() < 0 or starts.max() + count > len(self)):
            text = f"tokens up to {starts.max() + count} asked of a stream of {len(self)}"
            raise IndexError(text)
        rows = np.empty((len(starts), count), dtype=np.int64)
        first = np.searchsorted(self._ends, starts, side="right") - 1
        begins, checked = (starts - self._ends[first]).tolist(), set[int]()
        for row, i, begin in zip(rows, first.tolist(), begins, strict=True):
            while len(row):  # once more where it goes on in the next array
                shard = self.shards[i]
                if i not in checked:
                    shard.check_size()
                    checked.add(i)
                piece = shard.ids[begin : begin + len(row)]
                row[: len(piece)] = piece
                row, i, begin = row[len(piece) :], i + 1, 0
        return rows


@dataclass(frozen=True)
class Corpus:
    """The data of a run, as a source returns them.

    `description` says in a few plain words what it is. `fingerprint` (plain values) identifies the
    content and the settings: a run is not resumed on another one.
    """

    train: TokenStream
    val: TokenStream | None
    description: str
    fingerprint: dict[str, Any] = field(default_factory=dict)
    is_text: bool = False  # whether the tokenizer gives the ids a meaning in bytes
    has_documents: bool = True  # which a document mask could keep apart
    mixed: Mixture | None = None  # of several sources; None: one stream in one order
    val_sets: dict[str, TokenStream] = field(default_factory=dict)  # named ones, `val` among them
    # documents without the tokenizer's end-of-text id at their end, by the index of their file
    unmarked: int = 0
    # By set, what identifies its text, whatever the tokenizer.
    val_texts: dict[str, dict[str, str]] = field(default_factory=dict)
    table: list[dict[str, Any]] = field(default_factory=list)  # a row for each source, to print
    warnings: tuple[str, ...] = ()

    def train_sequences(self, sequence_length: int) -> int:
        """Return how many sequences one epoch has."""
        if self.mixed is not None:
            return sum(self.mixed.sequences(sequence_length).values())
        return self.train.n_sequences(sequence_length)

    def shards(self, labels: bool = False) -> list[Shard]:
        """Return the arrays of all streams, each once; with `labels` those of labels too."""
        streams = [s for s in (self.train, self.val, *self.val_sets.values()) if s is not None]
        if labels:
            streams += [stream.labels for stream in streams if stream.labels is not None]
        return list({id(s.array): s for stream in streams for s in stream.shards}.values())

    def check_content(self) -> list[str]:
        """Return what happened to files whose old ids are still read; microseconds per file.

        Raises DataChanged where other ids may be read now.
        """
        opened = [s for s in self.shards(labels=True) if s.mapped is not None]
        return [text for s in opened if (text := s.check_content())]

    def states(self) -> dict[str, int]:
        """Path -> bytes of the files when they were opened, for `cut_files`."""
        return {s.name: s.state[1] for s in self.shards(labels=True) if s.state is not None}


def as_corpus(found: Any, vocab_size: int | None = None) -> Corpus:
    """Return a `Corpus` of what is a tuple (train, val) of 1-d integer arrays.

    `val` may be None. With `vocab_size` the ids of such arrays are checked. Raises ValueError for
    anything else.
    """
    what = "data._target_: the function must return a Corpus or a tuple (train, val) of 1-d "
    what += "integer numpy arrays"
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise ValueError(f"{what}, not {_short(found)}")
    streams = {}
    for name, array in zip(("train", "val"), found, strict=True):
        if array is None and name == "val":
            continue
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{what}; {name} is {_short(array)}")
        if vocab_size is not None:
            check_ids(array, vocab_size, f"data._target_: {name}")
        streams[name] = TokenStream([array])
    train = streams["train"]
    if not len(train):
        raise ValueError(f"{what}; train is empty")
    content = {name: sample_digest(stream) for name, stream in streams.items()}
    description = f"{len(train):,} training tokens from your own function"
    return Corpus(train, streams.get("val") or None, description, {"content": content})


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.ndim} dimensions and type {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def check_ids(array: np.ndarray, vocab_size: int, name: str) -> None:
    """Raise ValueError, with the position, for an id of `array` that is not in [0, vocab_size)."""
    limits = np.iinfo(array.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return
    # ids that stay in the cache: the scan runs at the speed of memory
    for start, ids in TokenStream([array]).blocks(1 << 20):
        if int(ids.max()) >= vocab_size or (limits.min < 0 and int(ids.min()) < 0):
            at = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
            way = "labels with -100 are files of their own: data.train_labels"
            way = way if ids[at] == -100 else OTHER_IDS
            place = f"{int(ids[at])} at position {start + at:,} (of {len(array):,})"
            raise ConfigError(
                "bad_data",
                f"{name}: token id {place} is not in the vocabulary of {vocab_size} ids; valid are "
                f"0 to {vocab_size - 1}. {way}",
            )


def sample_digest(stream: TokenStream) -> str:
    """Return a sha256 over the length and evenly spread pieces, first and last tokens among them.

    It is quick for any size.
    """
    digest = hashlib.sha256(str(len(stream)).encode())
    for piece in stream.samples(16384):
        digest.update(piece.tobytes())
    return digest.hexdigest()
