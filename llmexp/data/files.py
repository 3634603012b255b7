"""Files that a data source reads: found by glob, identified by content, remembered in the cache
folder."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import re
import resource
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

NAMED_FILES = 20  # a fingerprint names the files of a corpus up to this many, and only counts more
MOST_LINE = 1 << 24  # bytes of a first line that is looked at
BLANK = b"\xef\xbb\xbf \t\r\n"  # white space, and a byte order mark
PARQUET = b"PAR1"
READ_BY_CORPUS = "read it as a source: data=corpus data.sources.main.files={path}"
# First bytes of files that hold text, but not as it is; and expressions for those of files that
# hold several documents in one piece, or none: what they are, and what to do with them.
PACKED = {
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    PARQUET: "a Parquet file",
}
OTHERS = {
    rb"BZh[1-9]1AY&SY": ("compressed by bzip2", "unpack it first: bunzip2 {path}"),
    rb"\xfd7zXZ\x00": ("compressed by xz", "unpack it first: unxz {path}"),
    rb"PK\x03\x04": ("a zip archive", "unpack it first: unzip {path}"),
    rb"[\s\S]{257}ustar": ("a tar archive", "unpack it first: tar -xf {path}"),
    rb"\x93NUMPY": ("an array of NumPy", "for token ids use data=tokens"),
    rb"ARROW1|\xff{4}": ("an Arrow file", "give its dataset: data.sources.NAME.hf=FOLDER"),
    rb"[\s\xef\xbb\xbf]*\[\s*\{\s*[\"}]": (
        "one JSON array", "write a record a line: jq -c '.[]' {path} > FILE.jsonl",
    ),
}  # fmt: skip
OTHER_FILES = 512  # that a process may have open beside those of its data


def cache_folder(cache_dir: str | None) -> Path:
    """Return `data.cache_dir`, else $LLMEXP_CACHE_DIR, else ~/.cache/llmexp. Nothing is made here.
    Raises ValueError."""
    if not isinstance(cache_dir, str | None):
        raise ValueError(f"data.cache_dir={cache_dir}: the path of a folder is needed, or null")
    return (
        Path(cache_dir or os.environ.get("LLMEXP_CACHE_DIR") or "~/.cache/llmexp")
        .expanduser()
        .absolute()
    )


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files for so many that stay open. Raises ValueError where
    it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most, enough = (math.inf if n == resource.RLIM_INFINITY else n for n in (hard, soft))
    if count + 64 > most:
        text = (
            f"{count:,} token files are more than this process may open ({hard:,}, by ulimit -Hn)"
        )
        raise ValueError(f"data: {text}; join them to fewer")
    if (wanted := min(count + OTHER_FILES, most)) > enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), hard))


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def match_files(key: str, patterns: Any) -> list[Path]:
    """Return the readable files that a glob, or a list of globs, names: sorted per glob, each file
    once.

    Relative globs start in the current folder; `**` crosses folders. Raises ValueError, naming
    `key`, for a glob without a match and for what is no readable file.
    """
    wanted = [patterns] if isinstance(patterns, str) else patterns
    if (
        not isinstance(wanted, (list, tuple))
        or not wanted
        or not all(isinstance(p, str) and p for p in wanted)
    ):
        given = "null" if patterns is None else patterns
        raise ValueError(
            f"{key}={given}: a glob or a list of globs is needed; for example {key}=corpus/**/*.txt"
        )
    found: dict[Path, None] = {}
    for pattern in wanted:
        expanded = os.path.expanduser(pattern)
        # A name that exists is meant as it stands, also with brackets in it.
        names = (
            [expanded] if os.path.lexists(expanded) else sorted(glob.glob(expanded, recursive=True))
        )
        if not names:
            raise ValueError(
                f"{key}={pattern}: no file matches (looked in {os.path.abspath(os.curdir)})"
            )
        paths = [Path(name) for name in names if not os.path.isdir(name)]
        if not paths:
            raise ValueError(
                f"{key}={pattern}: {names[0]} is a folder; for its files write {key}={names[0]}/*"
            )
        for path in paths:
            if path.exists() and not path.is_file():  # to read from it could wait for ever
                text = "is a pipe or a device, and data files are read more than once"
                raise ValueError(
                    f"{key}={pattern}: {path} {text}; write what comes out of it to a plain file "
                    "first"
                )
            try:
                with open(path, "rb") as file:
                    file.read(1)
            except OSError as error:
                raise ValueError(
                    f"{key}={pattern}: {path} cannot be read: {error.strerror}"
                ) from None
            found[path] = None
    return list(found)


def refuse_others(key: str, path: str, head: bytes) -> None:
    """Raise ValueError, with what to do, for a file of OTHERS by its first 512 bytes."""
    for form, (what, way) in OTHERS.items():
        if re.match(form, head):
            quoted = shlex.quote(path)
            raise ValueError(f"{key}={path}: is {what}, not text; {way.format(path=quoted)}")


def refuse_packed(key: str, path: Path) -> None:
    """Raise ValueError, with a way to read it, for a file that is not plain text by its first
    bytes."""
    quoted = shlex.quote(str(path))
    with open(path, "rb") as file:
        head = file.read(512)
        file.seek(max(0, path.stat().st_size - 4))
        is_parquet = file.read() == PARQUET  # at both ends
        file.seek(0)
        for magic, kind in PACKED.items():
            if head.startswith(magic) and (magic != PARQUET or is_parquet):
                way = READ_BY_CORPUS.format(path=quoted)
                raise ValueError(f"{key}={path}: is {kind}, not plain text; {way}")
        refuse_others(key, str(path), head)
        line = _first_line(file) if head.lstrip(BLANK).startswith(b"{") else b""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict):
        texts = [name for name, value in found.items() if isinstance(value, str)]
        way = READ_BY_CORPUS.format(path=quoted)
        if "text" not in texts and texts:
            way += f" data.sources.main.text_key={shlex.quote(str(texts[0]))}"
        keys = ", ".join(map(str, list(found)[:5]))
        text = f"its first line is an object with the keys {keys}"
        raise ValueError(f"{key}={path}: is JSON lines, not plain text ({text}); {way}")


def _first_line(file: BinaryIO) -> bytes:
    """Return the first line that is not blank, cut at MOST_LINE bytes."""
    while line := file.readline(MOST_LINE):
        if line.strip(BLANK):
            return line.strip(BLANK)
    return b""


def sha256_of(paths: Sequence[Path]) -> list[str]:
    """Return the sha256 of each file."""

    def one(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(8, cpu_count())) as pool:
        return list(pool.map(one, paths))


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return names that do not change when the files move together: relative to the folder that
    holds them all."""
    if not paths:
        return []
    full = [os.path.abspath(p) for p in paths]
    root = os.path.commonpath([os.path.dirname(p) for p in full])
    return [os.path.relpath(p, root) for p in full]


def files_fingerprint(paths: Sequence[Path], digests: Sequence[str]) -> dict[str, str]:
    """Name -> digest of the content; one digest of all where there are many files."""
    pairs = list(zip(names_of(paths), digests, strict=True))
    if len(pairs) <= NAMED_FILES:
        return dict(pairs)
    return {f"{len(pairs)} files": hashlib.sha256(json.dumps(pairs).encode()).hexdigest()}


def cut_files(states: Mapping[str, int]) -> str:
    """In words, which of the files (path -> bytes when they were opened: `Corpus.states`) are
    shorter now.

    For a worker that died by SIGBUS, which reading a memory map past the end of its file sends. ""
    where none is.
    """
    found = []
    for path, size in states.items():
        try:
            now = os.stat(path).st_size
        except OSError:
            now = size  # that it is gone does no harm to an open map
        if now < size:
            found.append(
                f"{path}: this token file was cut from {size:,} to {now:,} bytes while it was in "
                "use"
            )
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def state_of(path: Path) -> tuple[int, int]:
    """Return (bytes, time of change in ns) of a file; (-1, -1) of one that is not there."""
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def remembered(
    cache: Path,
    what: str,
    settings: Any,
    paths: Sequence[Path],
    compute: Callable[[], Any],
    write: bool,
) -> Any:
    """Return `compute()`, or what it returned (plain values) when the files had the same sizes and
    times of change.

    A note that cannot be written or read is no error: the value is computed again.
    """
    states = [
        (os.path.abspath(p), s.st_size, s.st_mtime_ns) for p, s in ((p, p.stat()) for p in paths)
    ]
    key = hashlib.sha256(json.dumps([what, settings, states]).encode()).hexdigest()
    note = cache / "notes" / f"{what}-{key[:32]}.json"
    try:
        return json.loads(note.read_text())["value"]
    except (OSError, ValueError, KeyError, TypeError):
        value = compute()
    # A file that changed just now can change again within one tick of its clock without a new time.
    settled = all(mtime < time.time_ns() - 2_000_000_000 for _, _, mtime in states)
    unchanged = all(
        p.stat().st_mtime_ns == state[2] for p, state in zip(paths, states, strict=True)
    )
    if write and settled and unchanged:
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            temporary = note.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps({"value": value}))
            temporary.replace(note)
        except OSError:
            pass
    return value
