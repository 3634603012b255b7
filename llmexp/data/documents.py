"""Read the documents of files, on this machine or in a bucket.

A file is read as what it is, whatever its name: text, JSON lines and arrays, plain or compressed,
Parquet and Arrow. A document comes in pieces of text, so that a long file is never in memory as a
whole.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import itertools
import json
import shlex
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from llmexp.config.commands import need_package
from llmexp.config.values import ConfigError, refuse
from llmexp.data import sniffing
from llmexp.data.remote import open_file
from llmexp.data.sniffing import BLANK, BOM, damage_named, kind_of_file, unpacked
from llmexp.system.text import first_of

ROWS_AT_ONCE = 1024  # of a table, read at a time
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


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

    def records(self) -> int:
        """Return how many were read, whatever was in them."""
        return self.documents + self.empty + self.bad

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
            return BadRecord(f"{where}: {text_key!r} is not text but {_json_name(text)}")
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    except UnicodeDecodeError as error:
        return BadRecord(f"{where}: {text_key!r} is not UTF-8 ({error.reason})")
    except UnicodeEncodeError:
        return BadRecord(f"{where}: {text_key!r} holds half a surrogate pair, which is not text")
    return Document(digest, iter((text,)), where) if text else None


def read_documents(
    key: str, place: str, text_key: str | None, skip_bad: bool, counts: Counts
) -> Iterator[Document]:
    """Yield the documents of one file in order; empty ones are counted and left out.

    Without a `text_key` it is plain text. A record that cannot be read is counted and left out with
    `skip_bad`, else refused. Raises ValueError that names the file and the place in it.
    """
    kind = kind_of_file(key, place, text_key is None)
    counts.place, counts.file = place, None
    way = as_plain(key) if kind in ("jsonl", "array") else ""
    before = counts.records()
    with damage_named(key, place, lambda: counts.records() - before):
        records = _records(kind, key, place, text_key or "", counts)
        yield from count_records(records, skip_bad, counts, way)


def as_plain(key: str) -> str:
    """Return what to do with a file that looks like JSON and is none; `key` names its source."""
    return f"; to read the file as plain text add {key.rpartition('.')[0]}.plain=true"


def _records(kind: str, key: str, place: str, text_key: str, counts: Counts) -> Iterator[Record]:
    if kind == "text":
        yield _text(key, place, counts)
        return
    is_table = kind in ("parquet", "arrow")
    with _opened(key, place, counts, seeks=is_table) as file:
        if is_table:
            yield from (_parquet if kind == "parquet" else _arrow)(key, place, text_key, file)
        elif kind != "empty":
            read = _json_lines if kind == "jsonl" else _json_array
            yield from read(key, place, text_key, file)
        else:
            yield None


@contextlib.contextmanager
def _opened(
    key: str, place: str, counts: Counts, seeks: bool = False
) -> Iterator[io.BufferedReader]:
    with open_file(key, place, seeks=seeks) as packed, unpacked(key, place, packed) as file:
        counts.file = packed
        yield file


def _text(key: str, place: str, counts: Counts) -> Record:
    """Return a text file's one document. It is read twice: for its digest, and in pieces."""
    digest, size, where = hashlib.blake2b(digest_size=16), 0, f"{key}={place}"

    def pieces(counts: Counts) -> Iterator[str]:
        with _opened(key, place, counts) as file:
            yield from _pieces(where, file)

    try:
        for piece in pieces(Counts()):
            size += len(piece)
            digest.update(piece.encode())
    except BadRecord as bad:
        return bad
    return Document(digest.digest(), pieces(counts), where, size) if size else None


def _pieces(where: str, file: BinaryIO) -> Iterator[str]:
    """Yield the UTF-8 text of a file, without a byte order mark.

    Raises BadRecord with the place and what to do.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = lines = 0
    while True:
        raw = file.read(sniffing.BLOCK_BYTES)
        before, is_first = at - len(decoder.getstate()[0]), not at
        at += len(raw)
        try:
            text = decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            line = lines + error.object[: error.start].count(b"\n") + 1
            text = f"not UTF-8 at byte {before + error.start:,} in line {line:,}"
            way = "convert the file, for example with iconv -f latin1 -t utf-8"
            raise BadRecord(f"{where}: {text} ({error.reason}); {way}") from None
        lines += raw.count(b"\n")
        if piece := text.removeprefix("\ufeff") if is_first else text:
            yield piece
        if not raw:
            return


def _json_lines(key: str, place: str, text_key: str, file: BinaryIO) -> Iterator[Record]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(BOM)
        if not (line := line.rstrip(BLANK)):
            continue
        where = f"{key}={place}, line {number:,}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = str(error)
            if isinstance(error, json.JSONDecodeError):
                why = f"{error.msg} at column {error.colno}"
            yield BadRecord(f"{where}: no valid JSON ({why})")
            continue
        if isinstance(record, dict):
            yield record_text(where, record, text_key)
        else:
            yield BadRecord(f"{where}: no JSON object but {_json_name(record)}")


def _json_array(key: str, place: str, text_key: str, file: BinaryIO) -> Iterator[Record]:
    """Yield the records of an array, one after the other; each is in memory as a whole."""
    texts, number = _pieces(f"{key}={place}", file), 0
    held = next(texts, "")
    at = held.find("[") + 1
    while True:
        at = _after_space(held, at)
        if not number and held.startswith("]", at):
            at += 1
            break
        try:
            record, end = DECODER.raw_decode(held, at)
            end = _after_space(held, end)
            after, why = held[end : end + 1], "no comma after it"
        except (ValueError, RecursionError) as error:
            after, why = "", getattr(error, "msg", str(error))
        if after not in ("]", ","):
            more = "".join(itertools.islice(texts, 1 + (len(held) - at) // sniffing.BLOCK_BYTES))
            if after or not more:
                text = f"item {number + 1:,} is not valid JSON ({why}){as_plain(key)}"
                raise refuse("bad_data", key, place, text)
            held, at = held[at:] + more, 0
            continue
        number, at = number + 1, end + 1
        yield record_of(f"{key}={place}, item {number:,}", record, text_key)
        if after == "]":
            break
    if any(text.strip() for text in itertools.chain((held[at:],), texts)):
        way = (
            f"put all into one array, or into lines: jq -c '.[]' {shlex.quote(place)} > FILE.jsonl"
        )
        text = f"there is more behind its array of {number:,} items; {way}{as_plain(key)}"
        raise refuse("bad_data", key, place, text)


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def record_of(where: str, record: Any, text_key: str) -> Record:
    """Return the document of an item: an object with the key, or a text itself."""
    if isinstance(record, dict):
        return record_text(where, record, text_key)
    if isinstance(record, str):
        return as_text(where, record, "the item")
    return BadRecord(f"{where}: neither a JSON object nor a text but {_json_name(record)}")


def _json_name(value: Any) -> str:
    """Return what a value is in the words of JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


DECODER = json.JSONDecoder()


def _parquet(key: str, place: str, text_key: str, file: io.BufferedReader) -> Iterator[Record]:
    table = need_package("pyarrow.parquet", key, f"reading {place}").ParquetFile(file)
    path = _column_path(key, place, table.schema_arrow, text_key)
    batches = table.iter_batches(batch_size=ROWS_AT_ONCE, columns=[".".join(path)])
    yield from _rows(f"{key}={place}", batches, path, text_key)


def _arrow(key: str, place: str, text_key: str, file: io.BufferedReader) -> Iterator[Record]:
    library = need_package("pyarrow", key, f"reading {place}")
    if file.peek(6).startswith(b"ARROW1"):
        table = library.ipc.open_file(file)
        batches = (table.get_batch(number) for number in range(table.num_record_batches))
    else:
        table = batches = library.ipc.open_stream(file)
    path = _column_path(key, place, table.schema, text_key)
    yield from _rows(f"{key}={place}", batches, path, text_key)


def _column_path(key: str, place: str, schema: Any, text_key: str) -> list[str]:
    """Return the names that lead to the column of text: one, or those of structs around it.

    Raises ValueError.
    """
    kind, path, left = schema, list[str](), text_key
    while left:
        name = left if left in kind.names else left.partition(".")[0]
        if name not in kind.names:
            names = first_of(kind.names, 8) or "none"
            there = f"the fields of {'.'.join(path)}" if path else "the columns"
            raise refuse("bad_data", key, place, f"no column {text_key!r}; {there} are: {names}")
        path.append(name)
        kind, left = kind.field(name).type, left[len(name) + 1 :]
        if left and not hasattr(kind, "names"):
            left = ""
    kind = getattr(kind, "value_type", kind) if hasattr(kind, "index_type") else kind
    if ".".join(path) != text_key or str(kind) not in TEXT_TYPES:
        raise refuse(
            "bad_data", key, place, f"the column {'.'.join(path)!r} is not text but {kind}"
        )
    return path


def _rows(where: str, batches: Any, path: list[str], text_key: str) -> Iterator[Record]:
    number = 0
    for batch in batches:
        column = batch.column(batch.schema.get_field_index(path[0]))
        for name in path[1:]:
            column = column.flatten()[column.type.get_field_index(name)]
        for start in range(0, len(column), ROWS_AT_ONCE):
            for text in _texts_of(column.slice(start, ROWS_AT_ONCE)):
                number += 1
                row = f"{where}, row {number:,}"
                if text is None:
                    yield BadRecord(f"{row}: {text_key!r} is null")
                elif isinstance(text, UnicodeDecodeError):
                    yield BadRecord(f"{row}: {text_key!r} is not UTF-8 ({text.reason})")
                else:
                    yield as_text(row, text, text_key)


def _texts_of(column: Any) -> Iterator[Any]:
    """Yield texts, nulls, and the error of each value that is not UTF-8."""
    try:
        yield from column.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for value in column:
        try:
            found = value.as_py()
        except UnicodeDecodeError as error:
            found = error
        yield found
