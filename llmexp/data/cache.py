"""Keep token shards and what is known of files in the cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.config.values import ConfigError, Plain, refuse
from llmexp.data.stream import DataChanged
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.system.fileio import file_state, sampled, text_sha256, write_whole


def cache_folder(cache_dir: str | None) -> Path:
    """Return `data.cache_dir`, else $LLMEXP_CACHE_DIR, else ~/.cache/llmexp.

    Nothing is made here. Raises ConfigError.
    """
    if not isinstance(cache_dir, str | None):
        raise refuse(
            "wrong_type", "data.cache_dir", cache_dir, "the path of a folder is needed, or null"
        )
    folder = cache_dir or os.environ.get("LLMEXP_CACHE_DIR") or "~/.cache/llmexp"
    return Path(folder).expanduser().absolute()


def id_type(tokenizer: Tokenizer) -> np.dtype:
    """Return the type of the ids on disk."""
    return np.dtype("<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4")


@contextlib.contextmanager
def building(folder: Path, cache: Path, *, alone: bool = True) -> Iterator[None]:
    """Hold the lock of a folder of the cache, alone or with others that are not alone.

    Raises ConfigError where the disk does not take it; DataChanged passes through.
    """
    path, kind = folder.with_suffix(".lock"), fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # the kernel lets it go when the process dies; NFS wants to read and to write it
        with open(path, "a+") as file:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"waiting for another process that prepares the same data ({path})"
                print(text, file=sys.stderr, flush=True)
                fcntl.flock(file, kind)
            yield
    except DataChanged:  # is an OSError too
        raise
    except OSError as error:
        raise ConfigError(
            "disk",
            f"data.cache_dir={cache}: the token cache cannot be written there "
            f"({error.strerror or error}); set data.cache_dir or the environment variable "
            "LLMEXP_CACHE_DIR to a folder with free space that you may write to",
        ) from error


def cached(
    cache: Path,
    what: str,
    settings: Any,
    paths: Sequence[Path],
    compute: Callable[[], Any],
) -> Any:
    """Return `compute()`, or what it returned for files of the same states and sampled content.

    The value is plain. An entry that cannot be written or read is no error: it is computed again.
    """

    def states() -> list[tuple[Any, ...]]:
        return [(os.path.abspath(path), sampled(path), *file_state(path)) for path in paths]

    before = states()
    entry = entry_path(cache, what, settings, before)
    if "value" in (known := read_cache_entry(entry)):
        return known["value"]
    value = compute()
    # A file that changed just now can change again within one tick of its clock without a new time.
    settled = all(max(state[-2:]) < time.time_ns() - 2_000_000_000 for state in before)
    if settled and states() == before:
        write_entry(entry, {"value": value})
    return value


def entry_path(cache: Path, what: str, *deciding: Any) -> Path:
    """Return where the cache keeps what was found for these values."""
    text = json.dumps([what, *deciding], sort_keys=True, default=repr)
    return cache / "notes" / f"{what}-{text_sha256(text)[:32]}.json"


def read_cache_entry(entry: Path) -> Plain:
    """Return what an entry of the cache holds; {} where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(entry.read_text())
        if isinstance(found, dict):
            return found
    return {}


def write_entry(entry: Path, content: Plain) -> None:
    """Write an entry of the cache. A disk that does not take it is no error."""
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_whole(entry, json.dumps(content))
