"""Open the files that documents come from: on this machine, in buckets and on the web.

The library fsspec reads addresses, with its own timeouts.
"""

from __future__ import annotations

import contextlib
import datetime
import glob
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llmexp.config.commands import need_package
from llmexp.config.kinds import kind_of_error
from llmexp.config.values import ConfigError, refuse
from llmexp.data.cache import cached, entry_path, read_cache_entry, write_entry
from llmexp.data.files import sha256_of
from llmexp.data.matching import match_files, named_once, patterns_of

_T = TypeVar("_T")
ANSWER_S = 10.0  # a web server that is silent for so long is given up
AHEAD_BYTES = 1 << 21  # asked of a bucket at a time
WEB = ("http://", "https://")
BUFFER_BYTES = 1 << 19
ASKED_AT_ONCE = 16  # files asked about at once
# What buckets, web servers and file systems know of a file's content.
_MARK = re.compile(r"etag|md5|crc|digest|generation|mtime|modified|created|\bino\b", re.IGNORECASE)


@contextlib.contextmanager
def reading(key: str, place: str) -> Iterator[None]:
    """Turn what a library raises for a remote place into a ValueError that names it."""
    try:
        yield
    except ImportError as error:
        raise refuse(
            "missing_package", key, place, f"needs a package that is missing: {error}"
        ) from None
    except ValueError:  # it names the place
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:300]
        if isinstance(error, TimeoutError):
            why = "no answer in time"
        way = "try again, or copy it to this disk"
        raise ConfigError("network", f"{key}={place}: cannot be read ({why}); {way}") from None


def open_file(key: str, place: str, *, seeks: bool = False) -> io.BufferedReader:
    """Open a path or an address (s3://, gs://, https://) for reading bytes.

    `seeks`: it is read in any order. Raises ConfigError.
    """
    if is_remote(place):
        system, path = _remote(key, place)
        # One stream of a web server needs no ranges, which not every server has.
        block = 0 if place.startswith(WEB) and not seeks else AHEAD_BYTES
        with reading(key, place):
            return io.BufferedReader(system.open(path, "rb", block_size=block), BUFFER_BYTES)
    try:
        return open(place, "rb")
    except OSError as error:
        raise refuse(
            kind_of_error(error), key, place, f"cannot be read: {error.strerror}"
        ) from None


def is_remote(place: str) -> bool:
    return "://" in place


def _remote(key: str, address: str) -> tuple[Any, str]:
    """Return (file system, path in it) of an address. Raises ConfigError."""
    fsspec = need_package("fsspec", key, f"reading {address}")
    knobs = {}
    if address.startswith(WEB):
        limits = need_package("aiohttp", key, f"reading {address}").ClientTimeout(
            total=None, sock_connect=ANSWER_S, sock_read=ANSWER_S
        )  # a total would end a stream after five minutes
        knobs = {"client_kwargs": {"timeout": limits}}
    with reading(key, address):
        return fsspec.core.url_to_fs(address, **knobs)


@dataclass
class RemoteCache:
    """The answers of buckets and the hub about their files, kept in the cache.

    A run whose shards are there asks nothing.
    """

    cache: Path
    anew: bool = False  # ask, whatever is remembered
    keep: bool = True  # remember answers; else files here are hashed anew, too
    remembered: dict[str, str] = field(default_factory=dict)  # key -> day of an answer in use

    def get(self, key: str, question: str, ask: Callable[[], _T]) -> _T:
        """Return the remembered answer (plain values) to a question, else that of `ask`.

        `key`: the knob that the question is about.
        """
        entry = entry_path(self.cache, "remote", question)
        found = {} if self.anew else read_cache_entry(entry)
        if {"answer", "day"} <= found.keys():
            self.remembered[key] = str(found["day"])
            return found["answer"]
        answer = ask()
        day = datetime.date.today().isoformat()
        if self.keep:
            write_entry(entry, {"question": question, "answer": answer, "day": day})
        return answer

    def digests(self, paths: list[Path]) -> list[str]:
        """Return the sha256 of each file here."""
        if not self.keep:
            return sha256_of(paths)
        return cached(self.cache, "sha256", None, paths, lambda: sha256_of(paths))


def match_places(key: str, patterns: Any, remote: RemoteCache, left: list[str]) -> list[str]:
    """Return the files that globs and addresses name, sorted per glob, each once.

    `left` gets what is left out.
    """

    def ask(pattern: str) -> list[str]:
        system, path = _remote(key, pattern)
        with reading(key, pattern):
            names = sorted(system.glob(path))
        if not names:
            raise refuse("unknown_file", key, pattern, "no file matches there")
        return [str(system.unstrip_protocol(name)) for name in names]

    found = list[str]()
    for pattern in patterns_of(key, patterns):
        if not is_remote(pattern):
            found += map(str, match_files(key, pattern, left))
        elif glob.has_magic(pattern):
            found += remote.get(key, f"glob {pattern}", partial(ask, pattern))
        else:
            found.append(pattern)
    return named_once(found, left)


def contents_of(key: str, places: Sequence[str], remote: RemoteCache) -> dict[str, tuple[str, int]]:
    """Return what identifies the content of each file, and its size in bytes.

    It is a digest; in a bucket, what the bucket says of the file. Raises ConfigError.
    """

    def ask(address: str) -> tuple[str, int]:
        system, path = _remote(key, address)
        with reading(key, address):
            info = system.info(path)
            marks = {name: str(mark) for name, mark in info.items() if _MARK.search(name) and mark}
            if not marks:  # its content has to be read
                with system.open(path, "rb", block_size=0) as file:
                    marks["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        size = info.get("size") or 0
        return json.dumps([address, size, marks], sort_keys=True), size

    def ask_all() -> list[tuple[str, int]]:
        with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(far))) as pool:
            return list(pool.map(ask, far))

    local = [Path(place) for place in places if not is_remote(place)]
    pairs = zip(local, remote.digests(local), strict=True)
    known = {str(path): (digest, os.path.getsize(path)) for path, digest in pairs}
    if far := [place for place in places if is_remote(place)]:
        asked = remote.get(key, f"files {json.dumps(far)}", ask_all)
        known |= {place: (content, size) for place, (content, size) in zip(far, asked, strict=True)}
    return known
