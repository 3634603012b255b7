"""The token shards of a source in the cache: found, written, joined, or counted only."""

from __future__ import annotations

import functools
import json
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.data import shards
from llmexp.data.cache import building, id_type
from llmexp.data.files import allow_open_files
from llmexp.data.places import Answers, is_remote
from llmexp.data.progress import Progress
from llmexp.data.records import Counts
from llmexp.data.source import Source
from llmexp.data.stream import DataChanged, Shard, TokenStream, sample_digest
from llmexp.data.tokenizers import identified
from llmexp.data.work import FORMAT, Key, Part, Work, work_of

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Prepared:
    """The shards of a source, or their counts where nothing was written."""

    source: Source
    streams: dict[str, TokenStream]
    counts: Counts
    documents: dict[str, int]  # by split
    text_bytes: dict[str, int]
    key: Key
    # By split, where there are no shards that have them.
    digests: dict[str, bytearray] = field(default_factory=dict)

    @property
    def content(self) -> str:
        """Return what identifies the documents: records that were left out are none of them."""
        bad = self.counts.bad
        return f"{self.key.shards} without {bad} records" if bad else self.key.shards


class Forgotten(Exception):
    """Answers of a bucket or the hub that are remembered count only while their shards are
    there, and these are not."""


def prepare(work: Work, answers: Answers) -> Prepared:
    """Return the shards of a source, from the cache where they are there. Without `answers.write`
    what is not there is counted. Raises ValueError, Forgotten."""
    cache, source = answers.cache, work.source
    if (found := _open(work)) is not None:
        return found
    if {f"{source.key}.files", f"{source.key}.hf"} & answers.remembered.keys():
        raise Forgotten
    if not answers.write:
        return _counted(work)
    with building(work.folder, cache):
        if (found := _open(work)) is None:  # else another process was faster
            _begin(work)
            for path in work.folder.glob(f"*{shards.UNFINISHED}"):  # of processes that were killed
                path.unlink(missing_ok=True)
            write_part(work, Part(), 0, sum(work.unit_bytes()))
            _refuse_changed(work, cache)
            _finish(work)
            found = _open(work)
    if found is None:
        raise ValueError(
            f"data.cache_dir={cache}: what was written to {work.folder} reads back damaged"
        )
    return found


def prepare_part(
    works: Sequence[Work], part: Part, cache: Path, threads: int | None = None
) -> None:
    """Write what is missing of one part of the shards of several sources; other processes may write
    other parts meanwhile. `prepare` joins them. Raises ValueError."""
    start, total = 0, sum(sum(work.unit_bytes()) for work in works)
    for work in works:
        if _open(work) is None:
            # shards that are damaged are begun anew, by one process alone
            damaged = (work.folder / MANIFEST).exists()
            with building(work.folder, cache, alone=damaged):
                if _open(work) is None:
                    _begin(work)
                    write_part(work, part, start, total, threads)
        start += sum(work.unit_bytes())


def _begin(work: Work) -> None:
    if (work.folder / MANIFEST).exists():
        shutil.rmtree(work.folder)  # it was whole once, and is damaged
    work.folder.mkdir(exist_ok=True)


def write_part(work: Work, part: Part, start: int, total: int, threads: int | None = None) -> None:
    """Write what is missing of a part. The units of the source begin at `start` of `total` bytes of
    all sources. The caller holds the lock."""
    sizes = work.unit_bytes()
    starts = list(accumulate(sizes, initial=start))
    mine = [n for n, size in enumerate(sizes) if part.meets(starts[n], size, total)]
    progress = Progress(work.text, True, sum(sizes[n] for n in mine))
    done = 0
    for number in mine:
        files = work.units[number]
        ends = accumulate((work.sizes[name] for name in files), initial=done)
        say = functools.partial(_say, progress, dict(zip(files, ends, strict=False)))
        has = functools.partial(part.has, starts[number], sizes[number], total)
        shards.write_unit(work, number, has, say, threads)
        done += sizes[number]
    progress.end()


def _say(progress: Progress, starts: Mapping[str, int], n_bytes: int, counts: Counts) -> None:
    """Say that so much text is done. `starts`: of each file, the bytes to read before it."""
    progress.add(n_bytes, starts.get(counts.place, 0) + counts.position())


def _counted(work: Work) -> Prepared:
    """Return what preparing would give, with streams that know their lengths only."""
    source = work.source
    progress = Progress(work.text, False)
    tokens, number, size = (dict.fromkeys(source.splits, 0) for _ in range(3))
    counts, digests = Counts(), {split: bytearray() for split in source.splits}
    for unit in work.units:
        read = source.read(counts, work.skip_bad, unit)
        for job, (_, stops) in shards.encoded(read, counts, work.tokenizer):
            lengths = np.diff(stops, prepend=0).tolist()
            for part, length in zip(job.parts, lengths, strict=True):
                split = source.split_of(part.digest)
                tokens[split] += length
                number[split] += part.ends
                size[split] += part.n_bytes
                digests[split] += part.digest * part.ends
                progress.add(part.n_bytes)
    progress.end()
    _refuse_empty(source, counts)
    streams = {name: TokenStream.unprepared(count) for name, count in tokens.items()}
    return Prepared(source, streams, counts, number, size, work.key, digests)


def _refuse_empty(source: Source, counts: Counts) -> None:
    if not counts.documents:
        verb = "is" if counts.empty == 1 else "are"
        text = f"; {counts.empty:,} {verb} empty" if counts.empty else ""
        text += f"; {counts.bad:,} cannot be read, such as {counts.first_bad}" if counts.bad else ""
        raise ValueError(f"{source.key}: there are no documents{text}")


def _refuse_changed(work: Work, cache: Path) -> None:
    """Ask buckets again: where a file changed while it was read remove the shards and raise
    DataChanged."""
    source = work.source
    if any(map(is_remote, source.files)):
        now = work_of(source, work.skip_bad, work.tokenizer, Answers(cache, False, True))
        if now.key != work.key:
            shutil.rmtree(work.folder)
            raise DataChanged(f"{source.key}: a file changed while it was prepared; start again")


def _finish(work: Work) -> None:
    """Write the manifest of a source whose units are all there. Raises ValueError."""
    source, folder = work.source, work.folder
    chunks, total = [], Counts()
    for unit in range(len(work.units)):
        there = shards.chunks_of(folder, unit)
        if not shards.is_whole(there):
            return
        chunks += [
            {"name": shards.chunk_name(unit, number), **chunk["shards"]}
            for number, chunk in enumerate(there)
        ]
        total = total.plus(Counts(**there[-1]["counts"]))
    _refuse_empty(source, total)
    found = {
        "format": FORMAT,
        "dtype": id_type(work.tokenizer).str,
        "tokenizer": identified(work.tokenizer),
        "counts": total.record(),
        "samples": {},
        "chunks": chunks,
    }
    streams = {split: _stream(folder, found, split) for split in source.splits}
    found["samples"] = {split: sample_digest(stream) for split, stream in streams.items()}
    shards.write_json(folder / MANIFEST, found)


def _stream(folder: Path, manifest: Mapping[str, Any], split: str) -> TokenStream:
    """Return the ids of a split. Raises ValueError for a shard that is not whole, OSError."""
    dtype, chunks = np.dtype(manifest["dtype"]), manifest["chunks"]
    paths = {f"{folder}/{chunk['name']}.{split}.bin": chunk[split]["tokens"] for chunk in chunks}
    return TokenStream([_mapped(path, dtype, count) for path, count in paths.items()])


def _mapped(path: str, dtype: np.dtype, count: int) -> Shard:
    """Map a file of so many ids. np.memmap asks the system many times as often, which counts for
    thousands of shards. Raises ValueError for a file that is not whole, OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        found = os.fstat(handle)
        if found.st_size != count * dtype.itemsize:
            raise ValueError(f"{path}: is not whole")
        if not count:
            return Shard(path, np.empty(0, dtype))
        mapped = mmap.mmap(handle, found.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)
    state = found.st_ino, found.st_size, found.st_mtime_ns
    return Shard(path, np.frombuffer(mapped, dtype), mapped, found.st_size, state)


def _open(work: Work) -> Prepared | None:
    """Return a source from its shards, or None where they are missing, torn or damaged."""
    source, folder = work.source, work.folder
    try:
        found = json.loads((folder / MANIFEST).read_text())
        allow_open_files(len(found["chunks"]) * len(source.splits))  # a map keeps its file open
        streams = {}
        for split in source.splits:
            streams[split] = _stream(folder, found, split)
            if sample_digest(streams[split]) != found["samples"][split]:
                return None
        documents, text_bytes = (
            {split: sum(chunk[split][what] for chunk in found["chunks"]) for split in source.splits}
            for what in ("documents", "text_bytes")
        )
        counts = Counts(**found["counts"])
        return Prepared(source, streams, counts, documents, text_bytes, work.key)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
