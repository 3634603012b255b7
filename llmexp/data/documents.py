"""Read the documents of files, on this machine or in a bucket.

A file is read as what it is, whatever its name: text, JSON lines and arrays, plain or compressed,
Parquet and Arrow. A document comes in pieces of text, so that a long file is never in memory as a
whole.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from llmexp.data.records import (
    BadRecord,
    Counts,
    Document,
    Record,
    as_text,
    count_records,
    record_text,
)
from llmexp.data.remote import is_remote, open_file, reading
from llmexp.data.sniffing import HEAD, sniffed
from llmexp.settings.commands import need_package
from llmexp.settings.values import refuse

BOM = b"\xef\xbb\xbf"
BLANK = b" \t\r\n"
BLOCK_BYTES = 1 << 19  # bytes read at a time
LONGEST_LINE = 1 << 30  # bytes of a record
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)


class Zstd(io.RawIOBase):
    """The content of zstd frames one after the other.

    Raises EOFError for a file that is cut short, which the library's own reader takes for the end.
    """

    def __init__(self, file: BinaryIO, decompressor: Any) -> None:
        self._file, self._decompressor = file, decompressor
        self._frame: Any = None  # under way
        self._rest = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._rest or self._file.read(BLOCK_BYTES)
            self._rest = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame has no end")
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._ready = self._frame.decompress(packed)
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def unpacked(key: str, place: str, file: io.BufferedReader) -> io.BufferedReader:
    """Return the file, or the content of one that is compressed by gzip, zstd, xz or bzip2."""
    match sniffed(key, place, file.peek(HEAD)):
        case "gzip":
            return io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK_BYTES)
        case "xz":
            return io.BufferedReader(lzma.LZMAFile(file), BLOCK_BYTES)
        case "bzip2":
            return io.BufferedReader(bz2.BZ2File(file), BLOCK_BYTES)
        case "zstd":
            zstandard = need_package("zstandard", key, f"reading {place}")
            packed = zstandard.ZstdDecompressor(max_window_size=2**31)
            return io.BufferedReader(Zstd(file, packed), BLOCK_BYTES)
    return file


def kind_of_file(key: str, place: str, plain: bool = False) -> str:
    """Return what a file is: "parquet", "arrow", "jsonl", "array", "text" or "empty".

    A `plain` one is text. Raises ValueError for what holds no documents.
    """
    with _damage_named(key, place), open_file(key, place) as file:
        kind = sniffed(key, place, file.peek(HEAD))
        if kind in ("parquet", "arrow") and not plain:
            return kind
        with unpacked(key, place, file) as inner:
            kind = sniffed(key, place, inner.peek(HEAD))
            if not plain and (kind == "array" or (kind == "strings" and _named(place, ".json"))):
                return "array"
            line = inner.readline(BLOCK_BYTES)
            if not line:
                return "empty"
            if not plain and _named(place, ".jsonl", ".ndjson", ".json"):
                return "jsonl"
            if b"\0" in line:
                way = "; if it is UTF-16, convert it: iconv -f UTF-16LE -t UTF-8"
                text = "is no text: there are zero bytes in it"
                raise refuse(key, place, text + way * (b"\0" in line[:2]))
            line = line.removeprefix(BOM)
            while line and not line.strip(BLANK):
                line = inner.readline(BLOCK_BYTES)
            # so a text of one line is not read as a whole
            if plain or not line.lstrip(BLANK).startswith(b"{"):
                return "text"
            try:
                line += b"" if line.endswith(b"\n") else inner.readline(LONGEST_LINE)
                return "jsonl" if isinstance(json.loads(line), dict) else "text"
            except (ValueError, RecursionError):
                return "text"


def _named(place: str, *endings: str) -> bool:
    return re.sub(r"\.(gz|zst|xz|bz2)$", "", place.lower()).endswith(endings)


@contextlib.contextmanager
def _damage_named(key: str, place: str) -> Iterator[None]:
    """Turn what reading a damaged file, or a server that fails, raises into a ValueError."""
    with reading(key, place) if is_remote(place) else contextlib.nullcontext():
        try:
            yield
        except Exception as error:
            of_library = type(error).__name__ in ("ZstdError", "ArrowInvalid")
            of_network = isinstance(error, (TimeoutError, ConnectionError))
            if of_network or not (of_library or isinstance(error, DAMAGED)):
                raise
            text = f"is cut short or damaged ({error}); get the file again"
            raise refuse(key, place, text) from None


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
    with _damage_named(key, place):
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
        raw = file.read(BLOCK_BYTES)
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
            more = "".join(itertools.islice(texts, 1 + (len(held) - at) // BLOCK_BYTES))
            if after or not more:
                text = f"item {number + 1:,} is no valid JSON ({why}){as_plain(key)}"
                raise refuse(key, place, text)
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
        raise refuse(key, place, text)


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
