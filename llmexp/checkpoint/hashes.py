"""Find files of a checkpoint that are damaged, or that change while they are read."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from llmexp.config.values import ConfigError, Plain
from llmexp.system.fileio import sha256

OPENING = os.O_RDONLY | os.O_CLOEXEC


class CheckpointError(ConfigError):
    """A checkpoint is missing, damaged or does not fit; the text names the file."""


def fingerprint(path: Path) -> Plain:
    """Return the size and sha256 of a file."""
    return {"size": path.stat().st_size, "sha256": sha256(path)}


class OpenFiles:
    """Keep files open from their hashing to their reading, so that each is opened once.

    More than KEPT are opened again."""

    KEPT = 8

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}

    def __del__(self) -> None:
        for file in list(self._handles):
            self.close(file)

    def fingerprint(self, file: Path) -> Plain:
        """Return the size and sha256 of a file, which may stay open."""
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            found = {"size": size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}
            if len(self._handles) < self.KEPT:
                self._handles[file] = os.dup(opened.fileno())
        return found

    def read(self, file: Path, into: memoryview, at: int) -> None:
        """Fill bytes from a file, from its byte `at` on; it stays open.

        Raises OSError, EOFError where it ends before."""
        if file not in self._handles:
            self._handles[file] = os.open(file, OPENING)
        while into:
            if not (count := os.preadv(self._handles[file], [into], at)):
                raise EOFError("it ends too early")
            into, at = into[count:], at + count

    def whole(self, file: Path) -> BinaryIO:
        """Return a file to be read from its beginning, opened anew where it is not open."""
        handle = self._handles.pop(file, None)
        found = os.fdopen(os.open(file, OPENING) if handle is None else handle, "rb")
        found.seek(0)
        return found

    def close(self, file: Path) -> None:
        """Close a file, where it is open."""
        if (handle := self._handles.pop(file, None)) is not None:
            os.close(handle)


def open_undamaged(expected: dict[Path, Plain]) -> OpenFiles:
    """Return the files, some of them open, or raise CheckpointError for the first damaged one.

    A file is damaged where its size or sha256 is not that of `expected`, from the manifest. Several
    are read at a time."""
    opened = OpenFiles()
    with ThreadPoolExecutor() as threads:
        # the largest one first, as it takes longest
        order = sorted(expected, key=lambda file: -expected[file]["size"])
        found = {file: threads.submit(opened.fingerprint, file) for file in order}
    for file, wanted in expected.items():
        wrong = "does not match the size and sha256 of its manifest"
        try:
            if found[file].result() == wanted:
                continue
        except OSError as error:
            wrong = f"cannot be read: {error}"
        raise CheckpointError("damaged_file", f"{file} {wrong}")
    return opened
