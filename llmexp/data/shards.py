"""Write documents as token shards: in order, by all cores, in constant memory.

The files of a source are dealt out to units. A unit is written in chunks; a chunk holds a shard for
each split: NAME.bin (ids, little-endian), NAME.ends (uint64: where each document ends, in ids from
the start of the shard), NAME.digests (16 bytes a document) and NAME.bytes (uint64: the bytes of
each document's text). A chunk counts once its .json is there, so what a killed process left is
written again, and nothing else is. docs/corpus.md describes the format.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import uuid
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmexp.config.kinds import kind_of_error
from llmexp.config.values import ConfigError
from llmexp.data.beside import SHARD_MANIFEST
from llmexp.data.cache import building, id_type
from llmexp.data.documents import Counts, Document
from llmexp.data.encode import ahead, pieces_of
from llmexp.data.progress import ProgressBar
from llmexp.data.remote import RemoteCache, is_remote
from llmexp.data.stored import SourceShards, open_shards, stream_of
from llmexp.data.stream import DataChanged, sample_digest
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.data.work import SHARD_FORMAT, Part, Work, work_of
from llmexp.system.fileio import flush_to_disk, write_whole
from llmexp.system.text import size_text

CHUNK_BYTES = 1 << 26  # text in a chunk: what a kill may cost
JOB_BYTES = 1 << 18  # text that a thread encodes at a time
TEMPORARY = ".tmp"  # what files end in that nobody has finished


def write_source(work: Work, cache: Path) -> SourceShards:
    """Write and join what is missing of a source; the caller holds the lock."""
    source, folder = work.source, work.folder
    for path in folder.glob(f"*{TEMPORARY}"):  # of processes that were killed
        path.unlink(missing_ok=True)
    try:
        _write_part(work, Part(), 0, sum(work.unit_bytes()))
        if any(map(is_remote, source.files)):
            now = work_of(source, work.tokenizer, RemoteCache(cache, anew=True))
            if now.digest != work.digest:
                text = "a file changed while it was prepared; start again"
                raise DataChanged(f"{source.key}: {text}")
        _join(work)
    except ValueError as error:  # the documents are refused, or a file changed meanwhile
        if kind_of_error(error) != "too_large":  # else the files are whole, and too many to open
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if (found := open_shards(work)) is None:
        text = f"what was written to {folder} reads back damaged"
        raise ConfigError("damaged_file", f"data.cache_dir={cache}: {text}")
    return found


def prepare_part(
    works: Sequence[Work], part: Part, cache: Path, threads: int | None = None
) -> None:
    """Write what is missing of one part of the shards of several sources.

    Other processes may write other parts meanwhile; `prepare_sources` joins them. Raises
    ConfigError.
    """
    start, total = 0, sum(sum(work.unit_bytes()) for work in works)
    for work in works:
        if open_shards(work) is None:
            # shards that are damaged are begun anew, by one process alone
            damaged = (work.folder / SHARD_MANIFEST).exists()
            with building(work.folder, cache, alone=damaged):
                if open_shards(work) is None:
                    _write_part(work, part, start, total, threads)
        start += sum(work.unit_bytes())


def _write_part(work: Work, part: Part, start: int, total: int, threads: int | None = None) -> None:
    """Write what is missing of a part; the caller holds the lock.

    The units of the source begin at `start` of `total` bytes of all sources. Shards that were whole
    once and are damaged are begun anew.
    """
    if (work.folder / SHARD_MANIFEST).exists():
        shutil.rmtree(work.folder)
    work.folder.mkdir(exist_ok=True)
    sizes = work.unit_bytes()
    starts = list(itertools.accumulate(sizes, initial=start))
    mine = [n for n, size in enumerate(sizes) if part.meets(starts[n], size, total)]
    size_of = {name: one.size for name, one in work.inputs.items()}
    files = [name for n in mine for name in work.units[n]]
    # the bytes to read before each file, to say how far the reading is
    before = dict(
        zip(files, itertools.accumulate(map(size_of.__getitem__, files), initial=0), strict=False)
    )
    size, what = sum(size_of.values()), work.source.key
    what += f", {size_text(size)} in files" if size else ""
    progress = ProgressBar(what, sum(sizes[n] for n in mine))

    def say(n_bytes: int, read: tuple[str, int]) -> None:
        place, position = read
        progress.add(n_bytes, before.get(place, 0) + min(position, size_of.get(place, 0)))

    try:
        for number in mine:
            has = functools.partial(part.has, starts[number], sizes[number], total)
            write_unit(work, number, has, say, threads)
    finally:  # an error begins a line of its own
        progress.end()


def chunk_name(unit: int, chunk: int) -> str:
    return f"{unit:05d}-{chunk:05d}"


def chunks_of(folder: Path, unit: int) -> list[dict[str, Any]]:
    """Return the committed chunks of a unit, in order.

    Each has "counts" from the unit's start to the end of the chunk, "last" of the unit or not, and
    "shards" by split.
    """
    found: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError):
        while True:
            found.append(json.loads((folder / f"{chunk_name(unit, len(found))}.json").read_text()))
    return found


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
    if (there := chunks_of(work.folder, number)) and there[-1]["last"]:
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
                pairs = list(zip(job.pieces, np.split(ids, stops[:-1]), strict=False))
                for split, shard in shards.items():
                    shard.add([pair for pair in pairs if pair[0].document.split == split])
                progress(job.n_bytes, job.read)
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


class TextPiece(NamedTuple):
    """A piece of a document's text; `ends` the document or not."""

    text: str
    n_bytes: int
    document: Document
    ends: bool


@dataclass
class Job:
    """The text that a thread encodes at a time.

    The last piece alone may not end its document. At the end of a chunk it has the counts so far.
    """

    chunk: int
    pieces: list[TextPiece] = field(default_factory=list)
    n_bytes: int = 0
    counts: dict[str, Any] | None = None
    last: bool = False
    read: tuple[str, int] = ("", 0)  # the file that ends it, and how far that was read for it


def encoded(
    documents: Iterator[Document],
    counts: Counts,
    tokenizer: Tokenizer,
    wanted: Callable[[int], bool] = lambda chunk: True,
    threads: int | None = None,
) -> Generator[tuple[Job, tuple[np.ndarray, np.ndarray]], None, None]:
    """Yield the jobs of the wanted chunks in order, encoded by so many threads.

    The cut into jobs, and the number of threads, never show in the ids. Raises ConfigError for text
    that the tokenizer gives up on.
    """

    def encode(job: Job) -> tuple[np.ndarray, np.ndarray]:
        try:
            texts = [piece.text for piece in job.pieces]
            return tokenizer.encode_documents(texts, not texts or job.pieces[-1].ends)
        except ValueError as error:
            text = f"the tokenizer {tokenizer.name} gave up on a text: {error}"
            raise ConfigError(kind_of_error(error, "wrong_tokenizer"), text) from None

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
    job, in_chunk, write = Job(0), 0, wanted(0)
    for document in documents:
        if not write:
            in_chunk += sum(map(_size, document.pieces))
        texts = cut(document.pieces) if write else iter(())
        for text, after in itertools.pairwise(itertools.chain(texts, (None,))):
            assert text is not None
            job.pieces.append(TextPiece(text, _size(text), document, after is None))
            job.n_bytes += job.pieces[-1].n_bytes
            in_chunk += job.pieces[-1].n_bytes
            if after is not None:
                yield job
                job = Job(job.chunk)
        if in_chunk >= CHUNK_BYTES:
            job.counts = counts.record() if write else None
            yield job  # an empty one where nothing is written, to say how far the reading is
            job, in_chunk = Job(job.chunk + 1), 0
            write = wanted(job.chunk)
        elif job.n_bytes >= JOB_BYTES:
            yield job
            job = Job(job.chunk)
    if write:
        job.counts, job.last = counts.record(), True
        yield job


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


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

    def add(self, pairs: list[tuple[TextPiece, np.ndarray]]) -> None:
        """Write pieces of text as their ids."""
        for piece, ids in pairs:
            self._tokens += len(ids)
            self._bytes += piece.n_bytes
            if piece.ends:
                self._ends.append(self._tokens)
                self._digests += piece.document.digest
                self._sizes.append(self._bytes - self._before)
                self._before = self._bytes
        if pairs:
            written = np.concatenate([ids for _, ids in pairs]).astype(self._dtype).data
            self._file.write(written)
            self._sha.update(written)

    def close(self) -> dict[str, Any]:
        """Write what is left to the disk. Return what the chunk records of this shard."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        beside = {"ends": self._ends, "digests": self._digests, "bytes": self._sizes}
        for kind, values in beside.items():
            write_whole(Path(f"{self._stem}.{kind}"), bytes(values))
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


def _join(work: Work) -> None:
    """Write the manifest of a source whose units are all there. Raises ConfigError."""
    source, folder = work.source, work.folder
    chunks, total = [], Counts()
    for unit in range(len(work.units)):
        there = chunks_of(folder, unit)
        for number, chunk in enumerate(there):
            chunks.append({"name": chunk_name(unit, number), **chunk["shards"]})
        total = total.plus(Counts(**there[-1]["counts"]))
    if not total.documents:
        verb = "is" if total.empty == 1 else "are"
        text = f"; {total.empty:,} {verb} empty" if total.empty else ""
        text += f"; {total.bad:,} cannot be read, such as {total.first_bad}" if total.bad else ""
        places = [source.hf] if source.hf else source.files
        where = f"{source.key}={places[0]}" if len(places) == 1 else source.key
        raise ConfigError("too_little_data", f"{where}: there are no documents{text}")
    found = {
        "format": SHARD_FORMAT,
        "dtype": id_type(work.tokenizer).str,
        "tokenizer": {"name": work.tokenizer.name, "sha256": work.tokenizer.identity},
        "counts": total.record(),
        "samples": {},
        "chunks": chunks,
    }
    streams = {split: stream_of(folder, found, split) for split in source.splits}
    found["samples"] = {split: sample_digest(stream) for split, stream in streams.items()}
    commit_json(folder / SHARD_MANIFEST, found)
