"""Identify the files that a data source reads, and keep them open."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmexp.config.values import ConfigError
from llmexp.system.devices import cpu_count
from llmexp.system.fileio import sha256, text_sha256
from llmexp.system.text import first_of

NAMED_FILES = 20  # a fingerprint names the files of a corpus up to this many, and only counts more
OTHER_FILES = 512  # that a process may have open beside those of its data


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, for so many more that stay open.

    Raises ConfigError (too_large) where it may not.
    """
    there = 0
    with contextlib.suppress(OSError):  # a machine without this folder
        there = len(os.listdir("/dev/fd"))  # such as those of the sources before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most, enough = (math.inf if n == resource.RLIM_INFINITY else n for n in (hard, soft))
    if there + count + 64 > most:
        text = f"are more than this process may open beside the {there:,} that it has open "
        text += f"({hard:,} in all, by ulimit -Hn); join them to fewer"
        raise ConfigError("too_large", f"data: {count:,} token files {text}")
    if (wanted := min(there + count + OTHER_FILES, most)) > enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), hard))


def sha256_of(paths: Sequence[Path]) -> list[str]:
    """Return the sha256 of each file."""
    with ThreadPoolExecutor(min(8, cpu_count())) as pool:
        return list(pool.map(sha256, paths))


def files_fingerprint(digests: Mapping[Path, str]) -> dict[str, str]:
    """Name -> digest of the content; one digest of all where there are many files."""
    if not digests:
        return {}
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in digests])
    pairs = [(os.path.relpath(path, root), digest) for path, digest in digests.items()]
    if len(pairs) <= NAMED_FILES:
        return dict(pairs)
    return {f"{len(pairs)} files": text_sha256(json.dumps(pairs))}


def cut_files(states: Mapping[str, int]) -> str:
    """Return in words which files are shorter now than when they were opened; "" where none is.

    `states`: path -> bytes (`Corpus.states`). Reading a memory map past the end of its file sends
    SIGBUS: this tells why a worker died by it.
    """
    found = []
    for path, size in states.items():
        with contextlib.suppress(OSError):  # that it is gone does no harm to an open map
            if (now := os.stat(path).st_size) < size:
                found.append(cut_text(path, size, now))
    return first_of(found, between="; ")


def cut_text(path: str, before: int, now: int) -> str:
    return f"{path}: this token file was truncated from {before:,} to {now:,} bytes in use"
