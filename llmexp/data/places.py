"""Places that documents come from: files on this machine, and addresses in buckets and on the
web, which the library fsspec reads."""

from __future__ import annotations

import glob
import importlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from llmexp.data.files import match_files, remembered, sha256_of

T = TypeVar("T")
ANSWER_S = 10.0  # a bucket or hub that does not answer in this time is given up
MARKS = ("etag", "ETag", "md5Hash", "mtime", "LastModified")  # of a file's content, in a bucket


def need(package: str, key: str, what: str) -> Any:
    """Import an optional package. Raise ValueError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(
            f"{key}: {what} needs the package {package}, which is not installed; "
            "pip install 'llmexp[data]'"
        ) from None


def in_time(key: str, place: str, ask: Callable[[], T]) -> T:
    """Return what `ask` returns. Raise ValueError where it fails or takes longer than ANSWER_S."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="llmexp-ask", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if answers:
        return answers[0]
    why = f"no answer within {ANSWER_S:g} s"
    if errors:
        why = f"{type(errors[0]).__name__}: {errors[0]}"[:300]
    raise ValueError(f"{key}={place}: cannot be read ({why})")


def open_file(key: str, place: str) -> BinaryIO:
    """Open a path or an address (s3://, gs://, https://) for reading bytes. Raises ValueError."""
    if "://" in place:
        fsspec = need("fsspec", key, f"reading {place}")
        found: BinaryIO = in_time(key, place, lambda: fsspec.open(place, "rb").open())
        return found
    try:
        return open(place, "rb")
    except OSError as error:
        raise ValueError(f"{key}={place}: cannot be read: {error.strerror}") from None


def is_remote(place: str) -> bool:
    return "://" in place


def _remote(key: str, address: str) -> tuple[Any, str]:
    """Return (file system, path in it) of an address. Raises ValueError."""
    fsspec = need("fsspec", key, f"reading {address}")
    found: tuple[Any, str] = in_time(key, address, lambda: fsspec.core.url_to_fs(address))
    return found


def match_places(key: str, patterns: Any) -> list[str]:
    """Return the files that globs and addresses name, sorted per glob, each once. Raises
    ValueError."""
    wanted = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(wanted, (list, tuple)) or not any(is_remote(str(p)) for p in wanted):
        return [str(path) for path in match_files(key, patterns)]
    found: dict[str, None] = {}
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise ValueError(f"{key}={wanted}: a list of paths, globs and addresses is needed")
        if is_remote(pattern):
            names = _match_remote(key, pattern)
        else:
            names = [str(path) for path in match_files(key, pattern)]
        found |= dict.fromkeys(names)
    return list(found)


def _match_remote(key: str, pattern: str) -> list[str]:
    if not glob.has_magic(pattern):
        return [pattern]
    system, path = _remote(key, pattern)
    names = in_time(key, pattern, lambda: sorted(system.glob(path)))
    if not names:
        raise ValueError(f"{key}={pattern}: no file matches there")
    return [system.unstrip_protocol(name) for name in names]


def contents_of(
    key: str, places: Sequence[str], cache: Path, write: bool
) -> tuple[list[str], list[int]]:
    """Return what identifies the content of each file (a digest; in a bucket, what the bucket says
    of it), and their sizes in bytes. Raises ValueError."""
    local = [Path(place) for place in places if not is_remote(place)]
    digests = remembered(cache, "sha256", None, local, lambda: sha256_of(local), write)
    known = {
        str(path): (digest, os.path.getsize(path))
        for path, digest in zip(local, digests, strict=True)
    }
    found = [known[place] if place in known else _remote_content(key, place) for place in places]
    return [content for content, _ in found], [size for _, size in found]


def _remote_content(key: str, address: str) -> tuple[str, int]:
    system, path = _remote(key, address)
    info = in_time(key, address, lambda: system.info(path))
    size = info.get("size") or 0
    marks = {name: str(info[name]) for name in MARKS if info.get(name)}
    return json.dumps([address, size, marks], sort_keys=True), size
