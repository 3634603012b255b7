"""Tell what a file is by its first bytes, and open what is compressed."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from llmexp.config.commands import need_package
from llmexp.config.labels import plural
from llmexp.config.values import refuse
from llmexp.data.remote import is_remote, open_file, reading
from llmexp.system.redact import clean

BOM = b"\xef\xbb\xbf"
BLANK = b" \t\r\n"
BLOCK_BYTES = 1 << 19  # bytes read at a time
LONGEST_LINE = 1 << 30  # bytes of a record
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)
HEAD = 512  # bytes that are looked at
CONVERT = "convert it first: iconv -f {kind} -t UTF-8 {{path}} > FILE"
# Expressions of first bytes. Files that are read:
READ = {
    "gzip": rb"\x1f\x8b",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # a frame, or one to skip
    "xz": rb"\xfd7zXZ\x00",
    "bzip2": rb"BZh[1-9]1AY&SY",
    "parquet": rb"PAR1",
    "arrow": rb"ARROW1|\xff\xff\xff\xff",  # a file, a stream
    "array": rb"[\s\xef\xbb\xbf]*\[\s*\{\s*[\"}]",  # of JSON objects
    "strings": rb"[\s\xef\xbb\xbf]*\[\s*[\"\]]",  # an array of texts, or a text
}
# Files that are not read: what they are, and what to do with them.
REFUSED = {
    rb"PK\x03\x04": ("a zip archive, not text", "unpack it first: unzip {path}"),
    rb"[\s\S]{257}ustar": ("a tar archive, not text", "unpack it first: tar -xf {path}"),
    rb"\x93NUMPY": ("an array of NumPy, not text", "for token ids use data=tokens"),
    rb"FEA1": ("a Feather file of version 1", "write it again as version 2 with pyarrow.feather"),
    rb"\xff\xfe\0\0|\0\0\xfe\xff": ("text in UTF-32, not UTF-8", CONVERT.format(kind="UTF-32")),
    rb"\xff\xfe|\xfe\xff": ("text in UTF-16, not UTF-8", CONVERT.format(kind="UTF-16")),
}


def sniffed(key: str, place: str, head: bytes) -> str | None:
    """Return the name in READ of a file that begins with these bytes, or None.

    Raises ValueError, with what to do, for a file that is not read.
    """
    for form, (what, way) in REFUSED.items():
        if re.match(form, head):
            raise refuse(
                "bad_data", key, place, f"is {what}; {way.format(path=shlex.quote(place))}"
            )
    return next((name for name, form in READ.items() if re.match(form, head)), None)


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
    with damage_named(key, place), open_file(key, place) as file:
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
                text = "is not text: there are zero bytes in it"
                raise refuse("bad_data", key, place, text + way * (b"\0" in line[:2]))
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
def damage_named(key: str, place: str, read: Callable[[], int] = int) -> Iterator[None]:
    """Turn what reading a damaged file, or a server that fails, raises into a ValueError.

    `read`: how many records came before.
    """
    with reading(key, place) if is_remote(place) else contextlib.nullcontext():
        try:
            yield
        except Exception as error:
            of_library = type(error).__name__ in ("ZstdError", "ArrowInvalid")
            of_network = isinstance(error, (TimeoutError, ConnectionError))
            if of_network or not (of_library or isinstance(error, DAMAGED)):
                raise
            after = f" after {plural(count, 'record')}" if (count := read()) else ""
            text = f"is truncated or damaged{after} ({clean(error)}); get the file again"
            raise refuse("damaged_file", key, place, text) from None
