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
from collections.abc import Iterator
from typing import Any, BinaryIO

from llmexp.config.values import refuse
from llmexp.data import sniffing
from llmexp.data.records import (
    BadRecord,
    Counts,
    Document,
    Record,
    as_text,
    count_records,
    record_text,
)
from llmexp.data.remote import open_file
from llmexp.data.sniffing import BLANK, BOM, damage_named, kind_of_file, unpacked


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
    with damage_named(key, place):
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
            from llmexp.data import tables

            yield from getattr(tables, kind)(key, place, text_key, file)
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
    at = 0
    while True:
        raw = file.read(sniffing.BLOCK_BYTES)
        before, is_first = at - len(decoder.getstate()[0]), not at
        at += len(raw)
        try:
            text = decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            text = f"{where}: not UTF-8 at byte {before + error.start:,} ({error.reason})"
            way = "convert the file, for example with iconv -f latin1 -t utf-8"
            raise BadRecord(f"{text}; {way}") from None
        if piece := text.removeprefix("\ufeff") if is_first else text:
            yield piece
        if not raw:
            return


def _json_lines(key: str, place: str, text_key: str, file: BinaryIO) -> Iterator[Record]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.strip(BLANK):
            continue
        where = f"{key}={place}, line {number:,}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield BadRecord(f"{where}: no valid JSON ({error})")
            continue
        if isinstance(record, dict):
            yield record_text(where, record, text_key)
        else:
            yield BadRecord(f"{where}: no JSON object but {type(record).__name__}")


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
    return BadRecord(f"{where}: neither a JSON object nor a text but {type(record).__name__}")


DECODER = json.JSONDecoder()
