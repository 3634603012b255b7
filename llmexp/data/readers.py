"""Read the documents of files: text, JSON lines and Parquet, each plain or compressed, on this
machine or in a bucket. A file is read as what it is, whatever its name.

A document comes in pieces of text, so that a long file is never in memory as a whole.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from llmexp.data.files import refuse_others
from llmexp.data.places import need, open_file
from llmexp.values import refuse

BOM = b"\xef\xbb\xbf"
BLANK = b" \t\r\n"
BLOCK = 1 << 19  # bytes read at a time
HEAD = 512  # bytes that tell what a file is
LONGEST_LINE = 1 << 30  # bytes of a record
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")  # a frame, or one to skip


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
        """Return how many bytes of the file at `place` were read; packed ones count as packed."""
        try:
            return self.file.tell() if self.file is not None else 0
        except (OSError, ValueError):  # a stream of the web; a closed file
            return 0

    def plus(self, other: Counts) -> Counts:
        documents, empty = self.documents + other.documents, self.empty + other.empty
        bad, first_bad = self.bad + other.bad, self.first_bad or other.first_bad
        return Counts(documents, empty, bad, first_bad)


@dataclass(frozen=True)
class Document:
    """A text in pieces, which can be read once; `digest` (16 bytes) is of all its UTF-8 bytes."""

    digest: bytes
    pieces: Iterator[str] = field(repr=False)
    where: str = ""  # its file, and its place there


class Zstd(io.RawIOBase):
    """The content of zstd frames one after the other. Raises EOFError for a file that is cut short,
    which the library's own reader takes for the end."""

    def __init__(self, file: BinaryIO, decompressor: Any) -> None:
        self._file, self._decompressor = file, decompressor
        self._frame: Any = None  # under way
        self._rest = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._rest or self._file.read(BLOCK)
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
    """Return the file, or the content of one that is compressed by gzip or zstd."""
    head = file.peek(4)
    if head.startswith(GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK)
    if ZSTD.match(head):
        zstandard = need("zstandard", key, f"reading {place}")
        packed = zstandard.ZstdDecompressor(max_window_size=2**31)
        return io.BufferedReader(Zstd(file, packed), BLOCK)
    return file


def kind_of(key: str, place: str) -> str:
    """Return what a file is: "parquet", "jsonl", "text" or "empty". Raises ValueError for what
    holds no documents."""
    with open_file(key, place) as file:
        refuse_others(key, place, file.peek(HEAD))
        if file.peek(4).startswith(PARQUET):
            return "parquet"
        with _damage_named(key, place), unpacked(key, place, file) as inner:
            refuse_others(key, place, inner.peek(HEAD))
            return _kind_of_text(key, place, inner)


def _kind_of_text(key: str, place: str, file: BinaryIO) -> str:
    line = file.readline(BLOCK)
    if not line:
        return "empty"
    if _named(place, ".jsonl", ".ndjson", ".json"):
        return "jsonl"
    if b"\0" in line:
        raise refuse(key, place, "is no text: there are zero bytes in it")
    line = line.removeprefix(BOM)
    while line and not line.strip(BLANK):
        line = file.readline(BLOCK)
    if not line.lstrip(BLANK).startswith(b"{"):  # so a text of one line is not read as a whole
        return "text"
    try:
        line += b"" if line.endswith(b"\n") else file.readline(LONGEST_LINE)
        return "jsonl" if isinstance(json.loads(line), dict) else "text"
    except (ValueError, RecursionError):
        return "text"


def _named(place: str, *endings: str) -> bool:
    bare = place.lower().removesuffix(".gz").removesuffix(".zst")
    return bare.endswith(endings)


@contextlib.contextmanager
def _damage_named(key: str, place: str) -> Iterator[None]:
    """Turn what reads a damaged file raises into a ValueError that names it."""
    try:
        yield
    except Exception as error:
        of_library = type(error).__name__ in ("ZstdError", "ArrowInvalid")
        if not of_library and not isinstance(error, (EOFError, OSError, zlib.error)):
            raise
        text = f"is cut short or damaged ({error}); get the file again"
        raise refuse(key, place, text) from None


def documents(
    key: str, place: str, text_key: str, skip_bad: bool, counts: Counts
) -> Iterator[Document]:
    """Yield the documents of one file in order; empty ones are counted and left out.

    A record that cannot be read is counted and left out with `skip_bad`, else refused. Raises
    ValueError that names the file and the place in it.
    """
    kind = kind_of(key, place)
    read = {"parquet": _parquet, "jsonl": _json_lines, "text": _text, "empty": _nothing}[kind]
    counts.place, counts.file = place, None
    with _damage_named(key, place):
        yield from counted(read(key, place, text_key, counts), skip_bad, counts)


Found = Document | BadRecord | None  # None: an empty document


def counted(records: Iterator[Found], skip_bad: bool, counts: Counts) -> Iterator[Document]:
    """Yield the documents among the records, and count all."""
    for found in records:
        if isinstance(found, BadRecord):
            if not skip_bad:
                raise found
            counts.bad += 1
            counts.first_bad = counts.first_bad or str(found)
        elif found is None:
            counts.empty += 1
        else:
            counts.documents += 1
            yield found


def whole(text: str, where: str) -> Found:
    """Return a document of one piece. Raises UnicodeEncodeError for half a surrogate pair."""
    if not text:
        return None
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return Document(digest, iter((text,)), where)


def _nothing(key: str, place: str, text_key: str, counts: Counts) -> Iterator[Found]:
    yield None


def _text(key: str, place: str, text_key: str, counts: Counts) -> Iterator[Found]:
    """Yield a text file's one document. It is read twice: for its digest, and in pieces."""
    digest = hashlib.blake2b(digest_size=16)
    size = 0
    try:
        for piece in _pieces(key, place, Counts()):
            size += len(piece)
            digest.update(piece.encode())
    except BadRecord as bad:
        yield bad
        return
    where = f"{key}={place}"
    yield Document(digest.digest(), _pieces(key, place, counts), where) if size else None


def _pieces(key: str, place: str, counts: Counts) -> Iterator[str]:
    with open_file(key, place) as packed, unpacked(key, place, packed) as file:
        counts.file = packed
        try:
            for number, text in enumerate(decoded(file)):
                if piece := text if number else text.removeprefix("\ufeff"):
                    yield piece
        except UnicodeError as error:
            raise BadRecord(f"{key}={place}: {error}") from None


def decoded(file: BinaryIO, at: int = 0, stop: int | None = None) -> Iterator[str]:
    """Yield UTF-8 text from where a file stands, its byte `at`, to its end or to the byte `stop`.
    Raises UnicodeError with the place and what to do, EOFError where the file ends before."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        raw = file.read(BLOCK if stop is None else min(BLOCK, stop - at))
        if not raw and stop is not None and at < stop:
            raise EOFError
        before = at - len(decoder.getstate()[0])
        at += len(raw)
        try:
            text = decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            text = f"not UTF-8 at byte {before + error.start:,} ({error.reason})"
            way = "convert the file, for example with iconv -f latin1 -t utf-8"
            raise UnicodeError(f"{text}; {way}") from None
        if not raw:
            return
        yield text


def _json_lines(key: str, place: str, text_key: str, counts: Counts) -> Iterator[Found]:
    with open_file(key, place) as packed, unpacked(key, place, packed) as file:
        counts.file = packed
        for number, line in enumerate(file, 1):
            if number == 1 and line.startswith(BOM):
                line = line[len(BOM) :]
            if line.strip(BLANK):
                yield _record(f"{key}={place}, line {number:,}", line, text_key)


def _record(where: str, line: bytes, text_key: str) -> Found:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRecord(f"{where}: no valid JSON ({error})")
    if not isinstance(record, dict):
        return BadRecord(f"{where}: no JSON object but {type(record).__name__}")
    return record_text(where, record, text_key)


def record_text(where: str, record: dict[str, Any], text_key: str) -> Found:
    if text_key not in record:
        there = ", ".join(map(str, list(record)[:8])) or "none"
        return BadRecord(f"{where}: no key {text_key!r}; the keys are: {there}")
    text = record[text_key]
    if not isinstance(text, str):
        return BadRecord(f"{where}: {text_key!r} is no text but {type(text).__name__}")
    try:
        return whole(text, where)
    except UnicodeEncodeError:
        return BadRecord(f"{where}: {text_key!r} holds half a surrogate pair, which is no text")


def _parquet(key: str, place: str, text_key: str, counts: Counts) -> Iterator[Found]:
    parquet = need("pyarrow.parquet", key, f"reading {place}")
    with open_file(key, place, seeks=True) as file:
        counts.file = file
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        if text_key not in names:
            text = f"no column {text_key!r}; the columns are: {', '.join(names[:8])}"
            raise refuse(key, place, text)
        kind = table.schema_arrow.field(text_key).type
        if hasattr(kind, "index_type"):  # a dictionary
            kind = kind.value_type
        if str(kind) not in ("string", "large_string", "string_view"):
            raise refuse(key, place, f"the column {text_key!r} is no text but {kind}")
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
            for text in _texts_of(batch.column(0)):
                number += 1
                where = f"{key}={place}, row {number:,}"
                if isinstance(text, str):
                    yield whole(text, where)
                elif text is None:
                    yield BadRecord(f"{where}: {text_key!r} is null")
                else:
                    yield BadRecord(f"{where}: {text_key!r} is not UTF-8 ({text.reason})")


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
