"""Places that documents come from: files on this machine, and addresses in buckets and on the
web, which the library fsspec reads."""

from __future__ import annotations

import contextlib
import datetime
import glob
import hashlib
import importlib
import io
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llmexp.data.files import match_files, read_note, remembered, sha256_of, write_note
from llmexp.settings.values import refuse

T = TypeVar("T")
ANSWER_S = 10.0  # a bucket or hub that does not answer in this time is given up
AHEAD_BYTES = 1 << 21  # asked of a bucket at a time; slower than this in ANSWER_S is no answer
WEB = ("http://", "https://")
BUFFER_BYTES = 1 << 19
ASKED = 16  # files asked about at once
RECORDS = 256  # of a stream, waited for at a time
MARKS = ("etag", "ETag", "md5Hash", "mtime", "LastModified")  # of a file's content, in a bucket


def need(package: str, key: str, what: str, extra: str = "data") -> Any:
    """Import an optional package. Raise ValueError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        why = f"{what} needs the package {package}, which is not installed"
        raise ValueError(f"{key}: {why}; pip install 'llmexp[{extra}]'") from None


def answered(ask: Callable[[], T], wait_s: float) -> Future[T]:
    """Call `ask` in a thread; return its future as soon as it is done, or after so long."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(ask())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="llmexp-ask", daemon=True).start()
    wait([found], wait_s)
    return found


def in_time(key: str, place: str, ask: Callable[[], T]) -> T:
    """Return what `ask` returns. Raise ValueError where it fails or takes longer than ANSWER_S."""
    found, why = answered(ask, ANSWER_S), f"no answer within {ANSWER_S:g} s"
    if found.done():
        if (error := found.exception()) is None:
            return found.result()
        if isinstance(error, ImportError):
            raise refuse(key, place, f"needs a package that is missing: {error}")
        cause = error.__cause__ or error  # "not found" may hide a refused connection
        why = f"{type(cause).__name__}: {cause}"[:300]
    raise Unreachable(f"{key}={place}: cannot be read ({why}); try again, or copy it to this disk")


def next_in_time(key: str, place: str, records: Iterable[T]) -> Iterator[T]:
    """Yield the records. Raises ValueError where RECORDS of them take longer than ANSWER_S."""
    left = iter(records)
    while some := in_time(key, place, lambda: list(itertools.islice(left, RECORDS))):
        yield from some


class Unreachable(ValueError):
    """A bucket or hub did not answer, or refused."""


class Watched(io.RawIOBase):
    """A file in a bucket: a read that takes longer than ANSWER_S raises ValueError."""

    def __init__(self, key: str, place: str, file: Any) -> None:
        self._key, self._place, self._file = key, place, file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = int(self._file.seek(offset, whence))
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = in_time(self._key, self._place, lambda: self._file.read(len(buffer)))
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(Exception):  # it was only read
                self._file.close()
        super().close()


def open_file(key: str, place: str, *, seeks: bool = False) -> io.BufferedReader:
    """Open a path or an address (s3://, gs://, https://) for reading bytes, with `seeks` in any
    order. Raises ValueError."""
    if is_remote(place):
        system, path = _remote(key, place)
        # One stream of a web server needs no ranges, which not every server has.
        block = 0 if place.startswith(WEB) and not seeks else AHEAD_BYTES
        file = in_time(key, place, lambda: system.open(path, "rb", block_size=block))
        return io.BufferedReader(Watched(key, place, file), BUFFER_BYTES)
    try:
        return open(place, "rb")
    except OSError as error:
        raise refuse(key, place, f"cannot be read: {error.strerror}") from None


def is_remote(place: str) -> bool:
    return "://" in place


def _remote(key: str, address: str) -> tuple[Any, str]:
    """Return (file system, path in it) of an address. Raises ValueError."""
    fsspec = need("fsspec", key, f"reading {address}")
    knobs = {}
    if address.startswith(WEB):
        timeout = need("aiohttp", key, f"reading {address}").ClientTimeout(total=None)
        knobs = {"client_kwargs": {"timeout": timeout}}  # else a stream ends after five minutes
    found: tuple[Any, str] = in_time(key, address, lambda: fsspec.core.url_to_fs(address, **knobs))
    return found


@dataclass
class Answers:
    """Answers of buckets and the hub about their files, remembered in the cache: a run whose
    shards are there asks nothing."""

    cache: Path
    write: bool
    anew: bool  # ask, whatever is remembered
    remembered: dict[str, str] = field(default_factory=dict)  # key -> day of an answer in use

    def get(self, key: str, question: str, ask: Callable[[], T]) -> T:
        """Return the answer (plain values) to a question of the knob `key` that is remembered, else
        that of `ask`."""
        name = hashlib.sha256(question.encode()).hexdigest()[:32]
        note = self.cache / "notes" / f"remote-{name}.json"
        found = {} if self.anew else read_note(note)
        if {"answer", "day"} <= found.keys():
            self.remembered[key] = str(found["day"])
            known: T = found["answer"]
            return known
        answer = ask()
        if self.write:
            day = datetime.date.today().isoformat()
            write_note(note, {"question": question, "answer": answer, "day": day})
        return answer

    def digests(self, paths: list[Path]) -> list[str]:
        """Return the sha256 of each file here."""
        found: list[str] = remembered(
            self.cache, "sha256", None, paths, lambda: sha256_of(paths), self.write
        )
        return found


def match_places(key: str, patterns: Any, answers: Answers) -> list[str]:
    """Return the files that globs and addresses name, sorted per glob, each once. Raises
    ValueError."""
    wanted = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(wanted, (list, tuple)) or not any(is_remote(str(p)) for p in wanted):
        return [str(path) for path in match_files(key, patterns)]
    found: dict[str, None] = {}
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise refuse(key, wanted, "a list of paths, globs and addresses is needed")
        if not is_remote(pattern):
            names = [str(path) for path in match_files(key, pattern)]
        elif glob.has_magic(pattern):
            names = answers.get(key, f"glob {pattern}", partial(_match_remote, key, pattern))
        else:
            names = [pattern]
        found |= dict.fromkeys(names)
    return list(found)


def _match_remote(key: str, pattern: str) -> list[str]:
    system, path = _remote(key, pattern)
    names = in_time(key, pattern, lambda: sorted(system.glob(path)))
    if not names:
        raise refuse(key, pattern, "no file matches there")
    return [str(system.unstrip_protocol(name)) for name in names]


def contents_of(key: str, places: Sequence[str], answers: Answers) -> tuple[list[str], list[int]]:
    """Return what identifies the content of each file (a digest; in a bucket, what the bucket says
    of it), and their sizes in bytes. Raises ValueError."""
    local = [Path(place) for place in places if not is_remote(place)]
    pairs = zip(local, answers.digests(local), strict=True)
    known = {str(path): (digest, os.path.getsize(path)) for path, digest in pairs}
    if far := [place for place in places if is_remote(place)]:
        asked = answers.get(key, f"files {json.dumps(far)}", lambda: remote_contents(key, far))
        known |= {place: (content, size) for place, (content, size) in zip(far, asked, strict=True)}
    found = [known[place] for place in places]
    return [content for content, _ in found], [size for _, size in found]


def remote_contents(key: str, addresses: Sequence[str]) -> list[tuple[str, int]]:
    """Return for each address (what the bucket says of its content, its bytes). Raises
    ValueError."""

    def one(address: str) -> tuple[str, int]:
        system, path = _remote(key, address)
        info = in_time(key, address, lambda: system.info(path))
        size = info.get("size") or 0
        marks = {name: str(info[name]) for name in MARKS if info.get(name)}
        return json.dumps([address, size, marks], sort_keys=True), size

    with ThreadPoolExecutor(min(ASKED, len(addresses))) as pool:
        return list(pool.map(one, addresses))
