"""Read and write small files, each whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from llmexp.config.kinds import kind_of_error
from llmexp.config.values import MAX_DEPTH, ConfigError, nested

MOST_BYTES = 2**26  # of a file that is read whole


class Unwritable(OSError):
    """A file of llmexp's own cannot be written; its text says all."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write under a temporary name, flush to disk, rename. Raises Unwritable."""
    # pids repeat on other hosts
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    # file names in the text may hold bytes that are no UTF-8
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        with open(temporary, "xb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as error:
        # report the real path, not the temporary one
        raise Unwritable(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a draft of a folder beside its name, which it gets when all is in it.

    Drafts for this name that killed processes left are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, draft, ignore_errors=True)
        with contextlib.suppress(OSError):  # a file system without locks
            stack.enter_context(_locked(draft))
        yield draft
        if path.is_dir():
            path.rmdir()  # an empty one
        os.rename(draft, path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which the kernel releases when the process dies.

    Raises OSError where another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def last_bytes(path: Path, most: int) -> bytes:
    """Return the last bytes of a file, at most so many; none where it is missing."""
    with contextlib.suppress(OSError), open(path, "rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - most))
        return f.read()
    return b""


def last_line(path: Path, start: str = "") -> str:
    """Return the last line of a log that is not empty and begins with `start`, without `start`."""
    lines = last_bytes(path, 1 << 16).decode(errors="replace").splitlines()
    found = [line for line in lines if line.strip() and line.startswith(start)]
    return found[-1].removeprefix(start) if found else ""


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_state(path: Path | str) -> tuple[int, int, int, int]:
    """Return (inode, bytes, time of change in ns, that of the inode): another where it changed.

    A program may set the first time, as `cp -p` and `rsync -t` do, but not the second.
    """
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def sampled(path: Path | str) -> str:
    """Return a digest of 8 evenly spread pieces of a file, for disks whose times say too little."""
    with open(path, "rb") as file:
        last = max(0, file.seek(0, os.SEEK_END) - 512)
        pieces = [os.pread(file.fileno(), 512, last * number // 7) for number in range(8)]
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_object(path: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError that begins with `name`."""
    try:
        found = from_json(read_text(path))
        if not isinstance(found, dict):
            raise ValueError("holds no object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    return found


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file to be read. Raises OSError, also for a pipe or a device: it has no end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a plain file", str(path))
    return os.fdopen(handle, "rb")


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Return the text of a plain file. Raises OSError; ValueError where it is too large or none."""
    with open_plain(path) as file:
        data = bytearray()
        while len(data) <= most and (more := file.read(2**20)):  # no more memory than it needs
            data += more
    if len(data) > most:
        raise ValueError(f"is larger than {most / 2**20:g} MiB")
    return data.decode("utf-8-sig")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


JSON = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse)


def from_json(text: str) -> Any:
    """Return the value of JSON as strict as we write it.

    Raises ValueError for all else, also where it is too deep for a function that calls itself.
    """
    try:
        found = JSON.decode(text)
        level = [found]
        for _ in range(MAX_DEPTH):
            level = [value for above in level for _, value in nested(above)]
    except RecursionError:
        level = [None]
    if level:
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
    return found


def check_format(path: Path, there: Any, ours: int) -> None:
    """Raise ConfigError for a file that another version of llmexp wrote, by its `format`."""
    if there != ours:
        raise ConfigError(
            "other_format",
            f"{path}: format={there}: this version of llmexp reads format {ours}; use the version "
            "that wrote it, or start again in another folder",
        )


def read_json(path: Path) -> Any:
    """Return the value in a JSON file, which is as strict as we write it.

    Raises ConfigError naming the file where it is missing or not that.
    """
    try:
        return from_json(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            kind_of_error(error, "damaged_file"), f"{path}: cannot be read as JSON: {error}"
        ) from None
