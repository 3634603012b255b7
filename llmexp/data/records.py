"""Documents, records that cannot be read, and counts of both: what all readers share."""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from llmexp.config.values import ConfigError
from llmexp.system.text import first_of


class BadRecord(ValueError):
    """One record of a file cannot be read as a document; the next one may be."""


@dataclass
class Counts:
    """Counts of what was read of a source so far."""

    documents: int = 0
    empty: int = 0
    bad: int = 0
    first_bad: str = ""
    # The file that is being read, and what reads its bytes: how far it is, for whoever waits.
    place: str = field(default="", compare=False)
    file: BinaryIO | None = field(default=None, compare=False, repr=False)

    def record(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {name: getattr(self, name) for name in ("documents", "empty", "bad", "first_bad")}

    def position(self) -> int:
        """Return how many bytes of the file at `place` were read; packed ones count as packed.

        A file that was read to its end and closed: more than any has.
        """
        if self.file is None:
            return 0
        try:
            return sys.maxsize if self.file.closed else self.file.tell()
        except OSError:  # a stream of the web
            return 0

    def plus(self, other: Counts) -> Counts:
        documents, empty = self.documents + other.documents, self.empty + other.empty
        bad, first_bad = self.bad + other.bad, self.first_bad or other.first_bad
        return Counts(documents, empty, bad, first_bad)


@dataclass
class Document:
    """A text in pieces, which can be read once; `digest` (16 bytes) is of all its UTF-8 bytes."""

    digest: bytes
    pieces: Iterator[str] = field(repr=False)
    where: str = ""  # its file, and its place there
    characters: int = 0  # of a plain text file
    split: str = ""


Record = Document | BadRecord | None  # None: an empty document


def count_records(
    records: Iterator[Record], skip_bad: bool, counts: Counts, way: str = ""
) -> Iterator[Document]:
    """Yield the documents among the records, and count all; `way`: what to do with one refused."""
    for found in records:
        if isinstance(found, BadRecord):
            if not skip_bad:
                raise ConfigError("bad_data", f"{found}{way}")
            counts.bad += 1
            counts.first_bad = counts.first_bad or str(found)
        elif found is None:
            counts.empty += 1
        else:
            counts.documents += 1
            yield found


def split_document(document: Document, shares: dict[str, float]) -> Iterator[Document]:
    """Yield a text file as a document for training and one per share, which is its last part.

    With one share it is text[:int(n * (1 - share))] and the rest, for n characters.
    """
    count, left = document.characters, list(shares.values())
    stops = [int(count * (1 - sum(left[at:]))) for at in range(len(left))] + [count]
    held, start = "", 0

    def pieces(left: int) -> Iterator[str]:
        nonlocal held
        while left and (held := held or next(document.pieces, "")):
            text, held = held[:left], held[left:]
            left -= len(text)
            yield text

    for split, stop in zip(("train", *shares), stops, strict=True):
        if stop > start:
            digest = hashlib.blake2b(document.digest + split.encode(), digest_size=16).digest()
            digest = digest if start else document.digest
            part = Document(digest, pieces(stop - start), document.where, split=split)
            yield part
            deque(part.pieces, 0)  # what was not read
        start = max(start, stop)


def value_at(record: Any, key: str) -> Any:
    """Return what a record holds at a key. Raises KeyError.

    It is a field of that name, or one of a field's own, by names with dots between.
    """
    if key in record:
        return record[key]
    head, _, rest = key.partition(".")
    if not rest or not isinstance(record.get(head), dict):
        raise KeyError(key)
    return value_at(record[head], rest)


def record_text(where: str, record: dict[str, Any], text_key: str) -> Record:
    try:
        return as_text(where, value_at(record, text_key), text_key)
    except KeyError:
        there = first_of([*map(str, record)], 8) or "none"
        return BadRecord(f"{where}: no key {text_key!r}; the keys are: {there}")


def as_text(where: str, text: Any, text_key: str) -> Record:
    """Return the document, of one piece, of a value: text, or bytes that are UTF-8."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        if not isinstance(text, str):
            return BadRecord(f"{where}: {text_key!r} is not text but {type(text).__name__}")
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    except UnicodeDecodeError as error:
        return BadRecord(f"{where}: {text_key!r} is not UTF-8 ({error.reason})")
    except UnicodeEncodeError:
        return BadRecord(f"{where}: {text_key!r} holds half a surrogate pair, which is not text")
    return Document(digest, iter((text,)), where) if text else None
