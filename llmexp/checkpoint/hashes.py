"""Find files of a checkpoint that are damaged, or that change while they are read."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llmexp.system.fileio import file_state, sha256


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or does not fit; the text names the file."""


class NewerFormat(CheckpointError):
    """A newer version of this program wrote the checkpoint.

    It is whole, and not to be passed over for an older one."""


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and sha256 of a file."""
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def refuse_damaged(expected: dict[Path, dict[str, Any]]) -> None:
    """Raise CheckpointError for the first file that has not its size and sha256.

    Several are read at a time."""
    with ThreadPoolExecutor() as threads:
        # the largest one first, as it takes longest
        order = sorted(expected, key=lambda file: -file.stat().st_size)
        found = {file: threads.submit(fingerprint, file) for file in order}
    for file, wanted in expected.items():
        try:
            whole = found[file].result() == wanted
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        if not whole:
            raise CheckpointError(f"{file} does not match the size and sha256 of its manifest")


def refuse_changed(files: Iterable[Path], before: dict[Path, tuple[int, ...]]) -> None:
    """Raise CheckpointError where a file that was read is no longer the one that was hashed."""
    for file in files:
        if file_state(file) != before[file]:
            raise CheckpointError(f"{file} was changed while it was read; resume again")
