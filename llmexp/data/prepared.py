"""The token shards of a source in the cache: found, written, and joined."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.data import shards
from llmexp.data.cache import building, id_type
from llmexp.data.files import TooManyFiles, allow_open_files
from llmexp.data.progress import ProgressBar
from llmexp.data.records import Counts
from llmexp.data.remote import RemoteCache, is_remote
from llmexp.data.stream import DataChanged, TokenStream, sample_digest
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.data.work import SHARD_FORMAT, Part, Source, Work, work_of
from llmexp.settings.values import ConfigError
from llmexp.system.text import size_text

SHARD_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SourceShards:
    """The shards of a source."""

    work: Work
    streams: dict[str, TokenStream]  # by split, as the counts of documents and of bytes of text
    counts: Counts
    documents: dict[str, int]
    text_bytes: dict[str, int]

    @property
    def content(self) -> str:
        """Return what identifies the documents: records that were left out are none of them."""
        bad, digest = self.counts.bad, self.work.digest
        return f"{digest} without {bad} records" if bad else digest


class StaleCache(Exception):
    """Report that remembered answers of a bucket or the hub describe shards that are missing."""


def prepare_sources(
    works: Iterable[Work], remote: RemoteCache
) -> tuple[dict[str, SourceShards], dict[str, SourceShards]]:
    """Return the shards of sources by name: of those to train on, and of validation sets.

    Raises ConfigError, and StaleCache.
    """
    ready, held_out = dict[str, SourceShards](), dict[str, SourceShards]()
    for work in works:
        found = held_out if work.source.held_out else ready
        found[work.source.name] = prepare_source(work, remote)
    return ready, held_out


def prepare_source(work: Work, remote: RemoteCache) -> SourceShards:
    """Return the shards of a source, from the cache where they are there.

    Raises ConfigError, and StaleCache.
    """
    cache, source = remote.cache, work.source
    if (found := _open(work)) is not None:
        return found
    if source.key in remote.remembered:
        raise StaleCache
    with building(work.folder, cache):
        if (found := _open(work)) is None:  # else another process was faster
            for path in work.folder.glob(f"*{shards.TEMPORARY}"):  # of processes that were killed
                path.unlink(missing_ok=True)
            try:
                write_part(work, Part(), 0, sum(work.unit_bytes()))
                _refuse_changed(work, cache)
                _finish(work)
            except TooManyFiles:
                raise
            except ValueError:  # the documents are refused, or a file changed meanwhile
                shutil.rmtree(work.folder, ignore_errors=True)
                raise
            found = _open(work)
    if found is None:
        raise ConfigError(
            f"data.cache_dir={cache}: what was written to {work.folder} reads back damaged"
        )
    return found


def prepare_part(
    works: Sequence[Work], part: Part, cache: Path, threads: int | None = None
) -> None:
    """Write what is missing of one part of the shards of several sources.

    Other processes may write other parts meanwhile; `prepare_source` joins them. Raises
    ConfigError.
    """
    start, total = 0, sum(sum(work.unit_bytes()) for work in works)
    for work in works:
        if _open(work) is None:
            # shards that are damaged are begun anew, by one process alone
            damaged = (work.folder / SHARD_MANIFEST).exists()
            with building(work.folder, cache, alone=damaged):
                if _open(work) is None:
                    write_part(work, part, start, total, threads)
        start += sum(work.unit_bytes())


def write_part(work: Work, part: Part, start: int, total: int, threads: int | None = None) -> None:
    """Write what is missing of a part; the caller holds the lock.

    The units of the source begin at `start` of `total` bytes of all sources. Shards that were whole
    once and are damaged are begun anew.
    """
    if (work.folder / SHARD_MANIFEST).exists():
        shutil.rmtree(work.folder)
    work.folder.mkdir(exist_ok=True)
    sizes = work.unit_bytes()
    starts = list(accumulate(sizes, initial=start))
    mine = [n for n, size in enumerate(sizes) if part.meets(starts[n], size, total)]
    files = [name for n in mine for name in work.units[n]]
    # the bytes to read before each file, to say how far the reading is
    ends = accumulate((work.inputs[name].size for name in files), initial=0)
    before = dict(zip(files, ends, strict=False))
    size, what = sum(one.size for one in work.inputs.values()), work.source.key
    what += f", {size_text(size)} in files" if size else ""
    progress = ProgressBar(what, sum(sizes[n] for n in mine))

    def say(n_bytes: int, read: tuple[str, int]) -> None:
        place, position = read
        one = work.inputs.get(place)
        progress.add(n_bytes, before.get(place, 0) + min(position, one.size if one else 0))

    try:
        for number in mine:
            has = functools.partial(part.has, starts[number], sizes[number], total)
            shards.write_unit(work, number, has, say, threads)
    finally:  # an error begins a line of its own
        progress.end()


def _refuse_empty(source: Source, counts: Counts) -> None:
    if not counts.documents:
        verb = "is" if counts.empty == 1 else "are"
        text = f"; {counts.empty:,} {verb} empty" if counts.empty else ""
        text += f"; {counts.bad:,} cannot be read, such as {counts.first_bad}" if counts.bad else ""
        places = [source.hf] if source.hf else source.files
        where = f"{source.key}={places[0]}" if len(places) == 1 else source.key
        raise ConfigError(f"{where}: there are no documents{text}")


def _refuse_changed(work: Work, cache: Path) -> None:
    """Ask buckets again, and raise DataChanged if a file changed while it was read."""
    source = work.source
    if any(map(is_remote, source.files)):
        now = work_of(source, work.tokenizer, RemoteCache(cache, anew=True))
        if now.digest != work.digest:
            raise DataChanged(f"{source.key}: a file changed while it was prepared; start again")


def _finish(work: Work) -> None:
    """Write the manifest of a source whose units are all there. Raises ConfigError."""
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
        "format": SHARD_FORMAT,
        "dtype": id_type(work.tokenizer).str,
        "tokenizer": {"name": work.tokenizer.name, "sha256": work.tokenizer.identity},
        "counts": total.record(),
        "samples": {},
        "chunks": chunks,
    }
    streams = {split: _stream(folder, found, split) for split in source.splits}
    found["samples"] = {split: sample_digest(stream) for split, stream in streams.items()}
    shards.commit_json(folder / SHARD_MANIFEST, found)


def _stream(folder: Path, manifest: Mapping[str, Any], split: str) -> TokenStream:
    """Return the ids of a split. Raises ConfigError for a shard that is not whole, and OSError."""
    dtype, arrays = np.dtype(manifest["dtype"]), []
    allow_open_files(len(manifest["chunks"]))  # a map keeps its file open
    for chunk in manifest["chunks"]:
        path, count = f"{folder}/{chunk['name']}.{split}.bin", chunk[split]["tokens"]
        if os.path.getsize(path) != count * dtype.itemsize:
            raise ValueError(f"{path}: is not whole")
        if count:
            arrays.append(np.memmap(path, dtype, "r", shape=(count,)))
    return TokenStream(arrays)


def _open(work: Work) -> SourceShards | None:
    """Return a source from its shards, or None where they are missing, torn or damaged."""
    source, folder = work.source, work.folder
    try:
        found = json.loads((folder / SHARD_MANIFEST).read_text())
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
        return SourceShards(work, streams, counts, documents, text_bytes)
    except TooManyFiles:
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def refuse_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the shards in a folder of the cache were made by another tokenizer."""
    try:
        noted = json.loads((folder / SHARD_MANIFEST).read_text())["tokenizer"]
        other = noted["sha256"] != tokenizer.identity
    except (OSError, ValueError, KeyError, TypeError):
        return
    if other:
        raise ConfigError(
            f"{folder}: these shards were made by the tokenizer {noted.get('name')} "
            f"({noted['sha256'][:8]}), and {tokenizer.name} ({tokenizer.identity[:8]}) is another "
            "one; give the tokenizer that made them, for example tokenizer=gpt2"
        )
