"""One source of documents: which split a document belongs to, and its token shards in the cache."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.data import shards
from llmexp.data.cache import building, id_type
from llmexp.data.files import allow_open_files, state_of
from llmexp.data.places import contents_of, is_remote
from llmexp.data.progress import Progress
from llmexp.data.readers import Counts, Document, documents, hub_documents, hub_identity
from llmexp.data.stream import DataChanged, TokenStream, sample_digest
from llmexp.data.tokenizers import Tokenizer, identity

FORMAT = 1  # of the shards; part of their key
UNIT_BYTES = 1 << 28  # files are put together to units of at least so many bytes
TRAIN = "train"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Source:
    """A place that documents come from, with the share of each validation set in them."""

    key: str  # data.sources.NAME or data.val.NAME
    text_key: str
    files: tuple[str, ...] = ()  # paths or addresses, in order
    hf: str | None = None
    split: str = "train"
    shares: tuple[tuple[str, float], ...] = ()  # of validation sets; the rest is for training

    @property
    def splits(self) -> list[str]:
        return [TRAIN, *(name for name, _ in self.shares)]

    def split_of(self, digest: bytes) -> str:
        """Return the split of a document: a matter of its content alone, so it never moves."""
        at = int.from_bytes(digest[:8], "little") / 2**64
        for name, end in zip(
            (name for name, _ in self.shares), accumulate(s for _, s in self.shares), strict=True
        ):
            if at < end:
                return name
        return TRAIN

    def read(
        self, counts: Counts, skip_bad: bool, files: Sequence[str] | None = None
    ) -> Iterator[Document]:
        """Yield the documents, of some files or of all. Raises ValueError."""
        if self.hf is not None:
            name, key = self.hf, f"{self.key}.hf"
            yield from hub_documents(key, name, self.split, self.text_key, skip_bad, counts)
        for place in self.files if files is None else files:
            yield from documents(f"{self.key}.files", place, self.text_key, skip_bad, counts)


@dataclass(frozen=True)
class Key:
    """The identity of a source."""

    text: str  # its documents, whatever the tokenizer
    shards: str  # and what is made of them


@dataclass(frozen=True)
class Prepared:
    """The shards of a source, or their counts where nothing was written."""

    source: Source
    streams: dict[str, TokenStream]
    counts: Counts
    documents: dict[str, int]  # by split
    text_bytes: dict[str, int]
    key: Key

    @property
    def content(self) -> str:
        """Return what identifies the documents: records that were left out are none of them."""
        bad = self.counts.bad
        return f"{self.key.shards} without {bad} records" if bad else self.key.shards


def prepare(
    source: Source, skip_bad: bool, tokenizer: Tokenizer, cache: Path, write: bool
) -> Prepared:
    """Return the shards of a source, from the cache where they are there. Without `write` what is
    not there is counted. Raises ValueError."""
    if source.hf is None:
        contents, sizes = contents_of(f"{source.key}.files", source.files, cache, write)
    else:
        contents, sizes = [hub_identity(f"{source.key}.hf", source.hf)], [0]
    text = _digest([contents, source.text_key, source.split if source.hf else None])
    key = Key(text, _digest([FORMAT, identity(tokenizer), text, source.shares]))
    folder = cache / "corpus" / (f"{key.shards}-skipped" if skip_bad else key.shards)
    if (found := _open(source, folder, key)) is not None:
        return found
    units = _units(source, sizes)
    progress = Progress(f"{source.key}, {sum(sizes) / 1e6:,.1f} MB in files", write)
    if not write:
        return _counted(source, units, skip_bad, tokenizer, key, progress)
    with building(folder, cache):
        if (found := _open(source, folder, key)) is None:  # else another process was faster
            _build(source, folder, units, skip_bad, tokenizer, progress)
            found = _open(source, folder, key)
    if found is None:
        raise ValueError(f"data.cache_dir={cache}: what was written to {folder} reads back damaged")
    return found


def _build(
    source: Source,
    folder: Path,
    units: Sequence[tuple[str, ...]],
    skip_bad: bool,
    tokenizer: Tokenizer,
    progress: Progress,
) -> None:
    """Write what is missing of a source's shards. The caller holds the lock."""
    if (folder / MANIFEST).exists():
        shutil.rmtree(folder)  # it was whole once, and is damaged
    folder.mkdir(exist_ok=True)
    states = {name: state_of(Path(name)) for name in source.files if not is_remote(name)}
    for number, files in enumerate(units):
        read = functools.partial(source.read, skip_bad=skip_bad, files=files)
        shards.write_unit(
            folder, number, read, tokenizer, source.split_of, source.splits, progress.add
        )
        for name in files:
            if name in states and state_of(Path(name)) != states[name]:
                shutil.rmtree(folder)  # else other text would be found under the old one's hash
                raise DataChanged(f"{name}: this file changed while it was prepared; start again")
    progress.end()
    _finish(source, folder, len(units), tokenizer)


def _digest(recipe: list[Any]) -> str:
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]


def _units(source: Source, sizes: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the files of each unit: as few as hold UNIT_BYTES."""
    if source.hf is not None:
        return [()]
    found: list[tuple[str, ...]] = []
    held: list[str] = []
    size = 0
    for name, more in zip(source.files, sizes, strict=True):
        held.append(name)
        size += more
        if size >= UNIT_BYTES:
            found.append(tuple(held))
            held, size = [], 0
    return [*found, tuple(held)] if held else found


def _counted(
    source: Source,
    units: Sequence[tuple[str, ...]],
    skip_bad: bool,
    tokenizer: Tokenizer,
    key: Key,
    progress: Progress,
) -> Prepared:
    """Return what preparing would give, with streams that know their lengths only."""
    tokens, number, size = (dict.fromkeys(source.splits, 0) for _ in range(3))
    counts = Counts()
    for unit in units:
        read = source.read(counts, skip_bad, unit)
        for job, arrays in shards.encoded(read, counts, tokenizer):
            for part, ids in zip(job.parts, arrays, strict=True):
                split = source.split_of(part.digest)
                tokens[split] += len(ids)
                number[split] += part.ends
                size[split] += part.n_bytes
                progress.add(part.n_bytes)
    progress.end()
    _refuse_empty(source, counts)
    streams = {name: TokenStream.unprepared(count) for name, count in tokens.items()}
    return Prepared(source, streams, counts, number, size, key)


def _refuse_empty(source: Source, counts: Counts) -> None:
    if not counts.documents:
        verb = "is" if counts.empty == 1 else "are"
        text = f"; {counts.empty:,} {verb} empty" if counts.empty else ""
        text += f"; {counts.bad:,} cannot be read, such as {counts.first_bad}" if counts.bad else ""
        raise ValueError(f"{source.key}: there are no documents{text}")


def _finish(source: Source, folder: Path, units: int, tokenizer: Tokenizer) -> None:
    """Write the manifest of a source whose units are all there. Raises ValueError."""
    chunks, total = [], Counts()
    for unit in range(units):
        there = shards.chunks_of(folder, unit)
        if not shards.is_whole(there):
            return
        chunks += [
            {"name": shards.chunk_name(unit, number), **chunk["shards"]}
            for number, chunk in enumerate(there)
        ]
        total = total.plus(Counts(**there[-1]["counts"]))
    _refuse_empty(source, total)
    dtype = id_type(tokenizer).str
    samples = {
        split: sample_digest(_stream(folder, chunks, split, dtype)) for split in source.splits
    }
    shards.write_json(
        folder / MANIFEST,
        {
            "format": FORMAT,
            "dtype": dtype,
            "counts": vars(total),
            "samples": samples,
            "chunks": chunks,
        },
    )


def _stream(
    folder: Path, chunks: Sequence[Mapping[str, Any]], split: str, dtype: str
) -> TokenStream:
    """Return the ids of a split. Raises ValueError for a shard that is not whole, OSError."""
    arrays = []
    for chunk in chunks:
        path, count = folder / f"{chunk['name']}.{split}.bin", chunk[split]["tokens"]
        if path.stat().st_size != count * np.dtype(dtype).itemsize:
            raise ValueError(f"{path}: is not whole")
        if count:
            arrays.append(np.memmap(path, dtype, "r", shape=(count,)))
    return TokenStream(arrays)


def _open(source: Source, folder: Path, key: Key) -> Prepared | None:
    """Return a source from its shards, or None where they are missing, torn or damaged."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
        allow_open_files(len(found["chunks"]) * len(source.splits))  # a map keeps its file open
        streams = {}
        for split in source.splits:
            streams[split] = _stream(folder, found["chunks"], split, found["dtype"])
            if sample_digest(streams[split]) != found["samples"][split]:
                return None
        counts = Counts(**found["counts"])
        documents_of = {split: _sum(found, split, "documents") for split in source.splits}
        bytes_of = {split: _sum(found, split, "text_bytes") for split in source.splits}
        return Prepared(source, streams, counts, documents_of, bytes_of, key)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _sum(manifest: Mapping[str, Any], split: str, what: str) -> int:
    return sum(chunk[split][what] for chunk in manifest["chunks"])
