"""Write documents as token shards: in order, by all cores, in constant memory.

The files of a source are dealt out to units. A unit is written in chunks; a chunk holds a shard for
each split: NAME.bin (ids, little-endian), NAME.ends (uint64: where each document ends, in ids from
the start of the shard), NAME.digests (16 bytes a document) and NAME.bytes (uint64: the bytes of
each document's text). A chunk counts once its .json is there, so what a killed process left is
written again, and nothing else is. docs/corpus.md describes the format.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import uuid
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.data.cache import id_type
from llmexp.data.encode import ahead, pieces_of
from llmexp.data.records import Counts, Document
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.data.work import Work
from llmexp.settings.values import ConfigError
from llmexp.system.fileio import flush_to_disk, write_whole

CHUNK_BYTES = 1 << 26  # text in a chunk: what a kill may cost
JOB_BYTES = 1 << 18  # text that a thread encodes at a time
TEMPORARY = ".tmp"  # what files end in that nobody has finished


def chunk_name(unit: int, chunk: int) -> str:
    return f"{unit:05d}-{chunk:05d}"


def chunks_of(folder: Path, unit: int) -> list[dict[str, Any]]:
    """Return the committed chunks of a unit, in order.

    Each has "counts" from the unit's start to the end of the chunk, "last" of the unit or not, and
    "shards" by split.
    """
    found: list[dict[str, Any]] = []
    while True:
        try:
            found.append(json.loads((folder / f"{chunk_name(unit, len(found))}.json").read_text()))
        except FileNotFoundError:
            return found


def is_whole(chunks: Sequence[dict[str, Any]]) -> bool:
    """Return whether these chunks are all of their unit."""
    return bool(chunks) and bool(chunks[-1]["last"])


def write_unit(
    work: Work,
    number: int,
    mine: Callable[[int], bool],
    progress: Callable[[int, tuple[str, int]], None],
    threads: int | None = None,
) -> None:
    """Write those chunks of a unit that are `mine`, by their numbers, and are not there yet.

    `progress` gets the bytes of text that were done, and how far was read for them. Another process
    may write the same chunk meanwhile: it writes the same.
    """
    if is_whole(chunks_of(work.folder, number)):
        return

    def path_of(chunk: int) -> Path:
        return work.folder / f"{chunk_name(number, chunk)}.json"

    def wanted(chunk: int) -> bool:
        return mine(chunk) and not path_of(chunk).exists()

    counts, files, dtype = Counts(), work.units[number], id_type(work.tokenizer)
    shards: dict[str, _Shard] = {}  # of the chunk that is being written, by split
    documents = work.source.read(counts, files)
    with contextlib.closing(encoded(documents, counts, work.tokenizer, wanted, threads)) as jobs:
        try:
            for job, (ids, stops) in jobs:
                path = path_of(job.chunk)
                if not shards and (job.pieces or job.counts):
                    stem = path.with_suffix("")
                    shards = {
                        split: _Shard(f"{stem}.{split}", dtype) for split in work.source.splits
                    }
                _add(shards, job.pieces, ids, stops.tolist())
                progress(sum(piece.n_bytes for piece in job.pieces), job.read)
                if job.counts is not None:
                    work.refuse_changed(files)
                    done = {split: shard.close() for split, shard in shards.items()}
                    shards = {}
                    # the shards are on the disk before the .json is, which makes the chunk count
                    flush_to_disk(work.folder)
                    commit_json(path, {"counts": job.counts, "last": job.last, "shards": done})
        finally:
            for shard in shards.values():
                shard.remove()


Encoded = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class TextPiece:
    """A piece of a document's text; `ends` the document or not."""

    text: str
    digest: bytes
    ends: bool
    n_bytes: int
    split: str = ""


@dataclass
class Job:
    """The text that a thread encodes at a time.

    The last piece alone may not end its document. At the end of a chunk it has the counts so far.
    """

    chunk: int
    pieces: list[TextPiece] = field(default_factory=list)
    counts: dict[str, Any] | None = None
    last: bool = False
    read: tuple[str, int] = ("", 0)  # the file that ends it, and how far that was read for it


def encoded(
    documents: Iterator[Document],
    counts: Counts,
    tokenizer: Tokenizer,
    wanted: Callable[[int], bool] = lambda chunk: True,
    threads: int | None = None,
) -> Generator[tuple[Job, Encoded], None, None]:
    """Yield the jobs of the wanted chunks in order, encoded by so many threads.

    The cut into jobs, and the number of threads, never show in the ids. Raises ConfigError for text
    that the tokenizer gives up on.
    """

    def encode(job: Job) -> Encoded:
        try:
            texts = [piece.text for piece in job.pieces]
            return tokenizer.encode_documents(texts, not texts or job.pieces[-1].ends)
        except ValueError as error:
            raise ConfigError(
                f"the tokenizer {tokenizer.name} gave up on a text: {error}"
            ) from None

    def noted() -> Iterator[Job]:  # the reading is ahead of what is encoded
        for job in _jobs(documents, counts, tokenizer, wanted):
            job.read = counts.place, counts.position()
            yield job

    return ahead(encode, noted(), threads)


def _jobs(
    documents: Iterator[Document],
    counts: Counts,
    tokenizer: Tokenizer,
    wanted: Callable[[int], bool],
) -> Iterator[Job]:
    """Yield the documents of the wanted chunks as jobs of about JOB_BYTES.

    A chunk ends with the document that fills it. The other chunks are read, to find where they end.
    """
    cut = pieces_of(tokenizer)
    job, size, in_chunk, write = Job(0), 0, 0, wanted(0)
    for document in documents:
        if not write:
            in_chunk += sum(map(_size, document.pieces))
        texts = cut(document.pieces) if write else iter(())
        for text, after in itertools.pairwise(itertools.chain(texts, (None,))):
            assert text is not None
            ends = after is None
            job.pieces.append(TextPiece(text, document.digest, ends, _size(text), document.split))
            size += job.pieces[-1].n_bytes
            in_chunk += job.pieces[-1].n_bytes
            if not ends:
                yield job
                job, size = Job(job.chunk), 0
        if in_chunk >= CHUNK_BYTES:
            job.counts = counts.record() if write else None
            yield job  # an empty one where nothing is written, to say how far the reading is
            job, size, in_chunk = Job(job.chunk + 1), 0, 0
            write = wanted(job.chunk)
        elif size >= JOB_BYTES:
            yield job
            job, size = Job(job.chunk), 0
    if write:
        job.counts, job.last = counts.record(), True
        yield job


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _add(
    shards: dict[str, _Shard], pieces: list[TextPiece], ids: np.ndarray, stops: list[int]
) -> None:
    """Write the ids of each piece to the shard of its split, as many at a time as follow."""
    first = 0
    pairs = zip(pieces, stops, strict=True)
    for split, some in itertools.groupby(pairs, lambda pair: pair[0].split):
        for piece, stop in some:
            shards[split].note(piece, stop - first)
        shards[split].write(ids[first:stop])
        first = stop


class _Shard:
    """The files of one split in one chunk.

    They get their names when they are whole, so that several processes may write the same ones.
    """

    def __init__(self, stem: str, dtype: np.dtype) -> None:
        self._stem, self._dtype = stem, dtype
        self._temporary = Path(f"{stem}.bin.{uuid.uuid4().hex}{TEMPORARY}")
        self._file = open(self._temporary, "wb")  # noqa: SIM115
        self._sha = hashlib.sha256()
        self._ends, self._sizes = array("Q"), array("Q")
        self._digests = bytearray()
        self._tokens = self._bytes = self._before = 0  # bytes: of all documents; of those before

    def note(self, piece: TextPiece, count: int) -> None:
        """Note a piece that ends `count` ids after those that are written."""
        self._bytes += piece.n_bytes
        if piece.ends:
            self._ends.append(self._tokens + count)
            self._digests += piece.digest
            self._sizes.append(self._bytes - self._before)
            self._before = self._bytes

    def write(self, ids: np.ndarray) -> None:
        written = ids.astype(self._dtype).data
        self._file.write(written)
        self._sha.update(written)
        self._tokens += len(ids)

    def close(self) -> dict[str, Any]:
        """Write what is left to the disk. Return what the chunk records of this shard."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_whole(Path(f"{self._stem}.ends"), np.array(self._ends, "<u8").tobytes())
        write_whole(Path(f"{self._stem}.digests"), bytes(self._digests))
        write_whole(Path(f"{self._stem}.bytes"), np.array(self._sizes, "<u8").tobytes())
        self._temporary.replace(f"{self._stem}.bin")
        return {
            "tokens": self._tokens,
            "documents": len(self._ends),
            "text_bytes": self._bytes,
            "sha256": self._sha.hexdigest(),
        }

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, once more
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def commit_json(path: Path, value: Any) -> None:
    """Write a file that is there whole or not at all, whatever happens."""
    write_whole(path, json.dumps(value))
    flush_to_disk(path.parent)
