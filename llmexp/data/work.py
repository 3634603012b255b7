"""Divide the preparation of a source: units of files, and the parts that processes take of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmexp.data.readers import kind_of_file
from llmexp.data.remote import RemoteCache, contents_of, is_remote
from llmexp.data.source import FEW_FILES, Source, hub_identity
from llmexp.data.stream import DataChanged
from llmexp.data.tokenizers import Tokenizer
from llmexp.settings.values import ConfigError
from llmexp.system.fileio import file_state

FORMAT = 1  # of the shards; part of their key
UNIT_BYTES = 1 << 28  # files are put together to units of at least so many bytes
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio


@dataclass(frozen=True)
class SourceKey:
    """The identity of a source."""

    text: str  # its documents, whatever the tokenizer
    shards: str  # and what is made of them


@dataclass(frozen=True)
class Work:
    """The work for a source: its units, and where their shards go.

    It can be sent to another process.
    """

    source: Source
    folder: Path
    key: SourceKey
    contents: dict[str, str]  # what identifies the content of each file, or of the dataset
    units: tuple[tuple[str, ...], ...]
    sizes: dict[str, int]  # bytes of each file
    states: dict[str, tuple[int, ...] | None]  # of the files here, from before they were hashed
    tokenizer: Tokenizer

    @property
    def text(self) -> str:
        """Return in words what is read."""
        size = sum(self.sizes.values())
        return f"{self.source.key}, {size / 1e6:,.1f} MB in files" if size else self.source.key

    def unit_bytes(self) -> list[int]:
        """Return the bytes to read for each unit; where nobody knows, what one has at least."""
        sizes = (sum(self.sizes[name] for name in files) for files in self.units)
        return [size or UNIT_BYTES for size in sizes]

    def refuse_changed(self, files: Sequence[str]) -> None:
        """Raise DataChanged for a file that is not any more what was hashed.

        Else other text would be found under its hash.
        """
        for name in files:
            if name in self.states and _state_of(name) != self.states[name]:
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
    states = {name: _state_of(name) for name in source.files if not is_remote(name)}
    sizes: list[int] = []
    if source.hf is None:
        contents, sizes = contents_of(source.key, source.files, remote)
        source = with_kinds(source, remote)
    else:
        content, commit = hub_identity(source.key, source.hf, remote)
        contents, source = [content], replace(source, revision=commit)
    places = source.files or (f"{source.hf}, split {source.split}",)
    text = _digest([contents, source.text_key, source.split if source.hf else None])
    recipe = [FORMAT, tokenizer.identity, text, source.shares]
    key = SourceKey(text, _digest([*recipe, "cut"] if source.cuts_texts else recipe))
    name = f"{key.shards}-skipped" if source.skip_bad else key.shards
    folder = remote.cache / "corpus" / name
    of_files = dict(zip(source.files, sizes, strict=True))
    units = _units(source, sizes)
    known = dict(zip(places, contents, strict=True))
    return Work(source, folder, key, known, units, of_files, states, tokenizer)


def with_kinds(source: Source, remote: RemoteCache) -> Source:
    """Return the source, and whether it cuts texts.

    It does with shares, and few files, if plain text is among them.
    """
    if not source.shares or len(source.files) >= FEW_FILES:
        return source
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
        for name, content in work.contents.items():
            if not work.sizes.get(name, 1):
                continue
            mark = f"{content}, split {work.source.split}"
            other, there = seen.setdefault(mark, (name, key))
            if there != key:
                alike = "" if other == name else f" under the name {other}"
                text = f"{name} is in {there} too{alike}; a file belongs to one source"
                raise ConfigError(f"{key}: {text}")


def _state_of(name: str) -> tuple[int, ...] | None:
    with contextlib.suppress(OSError):  # it is gone
        return file_state(name)
    return None


def _digest(recipe: list[Any]) -> str:
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]


def _units(source: Source, sizes: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return the files of each unit: as few as hold UNIT_BYTES."""
    if source.hf is not None:
        return ((),)
    found: list[list[str]] = []
    room = 0
    for name, size in zip(source.files, sizes, strict=True):
        if room <= 0:
            found.append([])
            room = UNIT_BYTES
        found[-1].append(name)
        room -= size
    return tuple(map(tuple, found))
