"""Divide the preparation of a source: units of files, and the parts that processes take of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

from llmexp.config.targets import resolve
from llmexp.config.values import ConfigError, is_ours, refuse
from llmexp.data.cache import cache_folder
from llmexp.data.documents import Counts, Document, count_records, read_documents, split_document
from llmexp.data.remote import RemoteCache, contents_of, is_remote
from llmexp.data.sniffing import kind_of_file
from llmexp.data.stream import DataChanged
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.system.fileio import file_state, text_sha256

TRAIN = "train"
FEW_FILES = 100  # plain text files: too few for whole ones to make up a share
SHARD_FORMAT = 1  # of the shards; part of their key
UNIT_BYTES = 1 << 28  # files are put together to units of at least so many bytes
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio


@dataclass(frozen=True)
class Source:
    """A place that documents come from, and the share of each validation set in them.

    It is a list of files, or a dataset of Hugging Face.
    """

    name: str
    key: str  # the knob that names it: data.train_files, data.sources.NAME.hf
    text_key: str = "text"
    files: tuple[str, ...] = ()  # paths or addresses, in order
    left_out: tuple[str, ...] = ()  # what lies beside them, for the reader
    hf: str | None = None
    split: str = TRAIN  # of the dataset
    revision: str | None = None  # the commit of a dataset on the hub
    shares: tuple[tuple[str, float], ...] = ()  # of validation sets; the rest is for training
    weight: float | None = None
    plain: bool = False  # each file is plain text, whatever it looks like
    skip_bad: bool = False  # leave out records that cannot be read, instead of refusing them
    cuts_texts: bool = False  # a plain text file gives its last part to the shares
    held_out: bool = False  # it is a validation set

    @property
    def splits(self) -> list[str]:
        return [TRAIN, *dict(self.shares)]

    def split_of(self, digest: bytes) -> str:
        """Return the split of a whole document, which depends on its content alone."""
        at = int.from_bytes(digest[:8], "little") / 2**64
        ends = accumulate(share for _, share in self.shares)
        pairs = zip(self.splits[1:], ends, strict=True)
        return next((name for name, end in pairs if at < end), TRAIN)

    def read(self, counts: Counts, files: Sequence[str] = ()) -> Iterator[Document]:
        """Yield the documents of some files, or of all, each with its split. Raises ValueError."""
        if self.hf is not None:
            from llmexp.data.hub import read_dataset

            found = read_dataset(self.key, self.hf, self.split, self.revision, self.text_key)
            whole = count_records(found, self.skip_bad, counts)
        else:
            how = None if self.plain else self.text_key, self.skip_bad, counts
            places = files or self.files
            whole = chain.from_iterable(read_documents(self.key, one, *how) for one in places)
        for document in whole:
            if self.cuts_texts and document.characters:
                yield from split_document(document, dict(self.shares))
            else:
                document.split = self.split_of(document.digest)
                yield document


class Input(NamedTuple):
    """A file of a source, or its dataset."""

    content: str  # what identifies it
    size: int = 0  # bytes; 0 where nobody knows
    state: tuple[int, ...] | None = None  # of a file here, from before it was hashed


@dataclass(frozen=True)
class Work:
    """The work for a source: its units, and where their shards go.

    It can be sent to another process.
    """

    source: Source
    folder: Path
    text_digest: str  # of its documents, whatever the tokenizer
    digest: str  # and of what is made of them
    inputs: dict[str, Input]  # by name
    units: list[list[str]]  # names of files
    tokenizer: Tokenizer

    def unit_bytes(self) -> list[int]:
        """Return the bytes to read for each unit; where nobody knows, what one has at least."""
        sizes = (sum(self.inputs[name].size for name in files) for files in self.units)
        return [size or UNIT_BYTES for size in sizes]

    def refuse_changed(self, files: Sequence[str]) -> None:
        """Raise DataChanged for a file that is not any more what was hashed.

        Else other text would be found under its hash.
        """
        for name in files:
            if not is_remote(name) and _state_of(name) != self.inputs[name].state:
                raise DataChanged(f"{name}: this file changed while it was prepared; start again")


@dataclass(frozen=True)
class Part:
    """Part `number`, from 1, of so many.

    The concatenated bytes of all sources are cut into equal parts; the chunks of a unit on a border
    are dealt out to the parts that meet in it.
    """

    number: int = 1
    of: int = 1

    def meets(self, start: int, size: int, total: int) -> bool:
        """Return whether something of the bytes from `start` on may be in this part."""
        first, end = (self.number - 1) * total, self.number * total
        return start * self.of < end and (start + size) * self.of > first

    def has(self, start: int, size: int, total: int, chunk: int) -> bool:
        """Return whether a chunk of the unit there is in this part.

        How many chunks a unit has is not known before it is read: multiples of the golden ratio are
        spread evenly, however many there are.
        """
        at = (start << 64) + size * (chunk * GOLDEN % (1 << 64))
        return at * self.of // (total << 64) == self.number - 1


def work_of(source: Source, tokenizer: Tokenizer, remote: RemoteCache) -> Work:
    """Return what there is to do for a source. Raises ConfigError."""
    units: list[list[str]] = []
    if source.hf is None:
        states = {name: _state_of(name) for name in source.files if not is_remote(name)}
        found = contents_of(source.key, source.files, remote)
        inputs = {name: Input(*found[name], states.get(name)) for name in source.files}
        source, room = with_kinds(source, remote), 0
        for name, one in inputs.items():  # as few files as hold UNIT_BYTES are a unit
            if room <= 0:
                units.append([])
                room = UNIT_BYTES
            units[-1].append(name)
            room -= one.size
    else:
        from llmexp.data.hub import dataset_identity

        content, commit = dataset_identity(source.key, source.hf, remote)
        inputs, units = {f"{source.hf}, split {source.split}": Input(content)}, [[]]
        source = replace(source, revision=commit)
    contents = [one.content for one in inputs.values()]
    how = "plain" if source.plain else [source.text_key, source.split if source.hf else None]
    text_digest = _digest([contents, how])
    recipe = [SHARD_FORMAT, tokenizer.identity, text_digest, source.shares]
    digest = _digest([*recipe, "cut"] if source.cuts_texts else recipe)
    folder = remote.cache / "corpus" / (f"{digest}-skipped" if source.skip_bad else digest)
    return Work(source, folder, text_digest, digest, inputs, units, tokenizer)


def works_of(sources: Iterable[Source], tokenizer: Tokenizer, remote: RemoteCache) -> list[Work]:
    """Return what there is to prepare for each source. Raises ConfigError."""
    tokenizer.end_of_text()  # ends each document
    return [work_of(source, tokenizer, remote) for source in sources]


def sources_of(data: dict[str, Any], keep: bool = True) -> tuple[list[Source], RemoteCache]:
    """Return the sources of documents that a section names, and what is known of remote files.

    Buckets and the hub are asked anew; `keep` their answers. Raises ConfigError.
    """
    target, knobs = resolve("data", data, ())
    if not hasattr(target, "documents"):
        name = str(data["_target_"])
        text = "has no documents of text; data=corpus and data=text have"
        if is_ours(name):
            raise refuse("unsupported", "data", name.rpartition(".")[2], text, "stdlib")
        raise refuse("unsupported", "data._target_", name, f"{text}; for example data=stdlib")
    remote = RemoteCache(cache_folder(knobs.get("cache_dir")), anew=True, keep=keep)
    return target(**knobs).documents(remote), remote


def works_to_prepare(data: dict[str, Any], tokenizer: Tokenizer) -> tuple[list[Work], Path]:
    """Return what there is to prepare for each source of a section, and the cache folder.

    Raises ConfigError.
    """
    sources, remote = sources_of(data)
    return works_of(sources, tokenizer, remote), remote.cache


def training_documents(data: dict[str, Any]) -> Iterator[Iterator[str]]:
    """Yield the pieces of each training document of a section, without those of validation.

    Raises ConfigError for data that are not text.
    """
    sources, remote = sources_of(data)
    for source in sources:
        if source.held_out:
            continue
        for document in with_kinds(source, remote).read(Counts()):
            if document.split == TRAIN:
                yield document.pieces


def with_kinds(source: Source, remote: RemoteCache) -> Source:
    """Return the source, and whether it cuts texts.

    It does with shares, and few files, if plain text is among them.
    """
    if not source.shares or len(source.files) >= FEW_FILES:
        return source
    if source.plain:
        return replace(source, cuts_texts=True)
    kinds = (
        remote.get(source.key, f"kind {name}", partial(kind_of_file, source.key, name))
        if is_remote(name)
        else kind_of_file(source.key, name)
        for name in source.files
    )
    return replace(source, cuts_texts="text" in kinds)


def refuse_shared_files(works: Iterable[Work]) -> None:
    """Refuse a file that two sources read, under whatever name.

    It would count twice, or be trained and validated.
    """
    seen: dict[str, tuple[str, str]] = {}
    for work in works:
        key = work.source.key
        for name, one in work.inputs.items():
            if not one.size and work.source.hf is None:
                continue
            other, there = seen.setdefault(f"{one.content}, split {work.source.split}", (name, key))
            if there != key:
                alike = "" if other == name else f" under the name {other}"
                text = f"{name} is in {there} too{alike}; a file belongs to one source"
                raise ConfigError("conflict", f"{key}: {text}")


def _state_of(name: str) -> tuple[int, ...] | None:
    with contextlib.suppress(OSError):  # it is gone
        return file_state(name)
    return None


def _digest(recipe: list[Any]) -> str:
    return text_sha256(json.dumps(recipe))[:32]
