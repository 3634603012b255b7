"""Read the files beside a shard of documents: where they end, their digests, their bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmexp.data.stream import Shard

DIGEST = np.dtype([("first", "<u8"), ("second", "<u8")])  # 16 bytes


def digests_beside(shard: Shard) -> np.ndarray:
    """Return the digests of the documents of a shard. Raises OSError."""
    return np.fromfile(Path(shard.name).with_suffix(".digests"), DIGEST)


def ends_beside(shard: Shard) -> np.ndarray:
    """Return where the documents of a shard end, in ids from its start. Raises OSError."""
    return np.fromfile(Path(shard.name).with_suffix(".ends"), "<u8")


def bytes_beside(shard: Shard) -> np.ndarray:
    """Return the bytes of text of each document of a shard. Raises OSError."""
    return np.fromfile(Path(shard.name).with_suffix(".bytes"), "<u8")
