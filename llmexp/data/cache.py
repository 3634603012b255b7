"""Write into the token cache: one process at a time, on the disk before it counts."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llmexp.data.stream import DataChanged
from llmexp.data.tokenizers import Tokenizer


def id_type(tokenizer: Tokenizer) -> np.dtype:
    """Return the type of the ids on disk."""
    return np.dtype("<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4")


@contextlib.contextmanager
def building(folder: Path, cache: Path, *, alone: bool = True) -> Iterator[None]:
    """Hold the lock of a folder of the cache, alone or with others that are not alone.

    Raises ValueError where the disk does not take it; DataChanged passes through.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock"), fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            yield
    except DataChanged:  # is an OSError too
        raise
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={cache}: the token cache cannot be written there "
            f"({error.strerror or error}); set data.cache_dir or the environment variable "
            "LLMEXP_CACHE_DIR to a folder with room that you may write to"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    """Hold the lock file; the kernel lets it go when the process dies."""
    with open(path, "a+") as file:  # NFS wants to read and to write it
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"waiting for another process that prepares the same data ({path})",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(file, kind)
        yield
