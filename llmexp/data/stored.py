"""The token shards of a source that the cache has."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.config.values import ConfigError
from llmexp.data.beside import SHARD_MANIFEST
from llmexp.data.documents import Counts
from llmexp.data.files import allow_open_files
from llmexp.data.stream import TokenStream, sample_digest
from llmexp.data.work import Work


@dataclass(frozen=True)
class SourceShards:
    """The shards of a source."""

    work: Work
    streams: dict[str, TokenStream]  # by split, as the counts of documents and of bytes of text
    counts: Counts
    documents: dict[str, int]
    text_bytes: dict[str, int]

    @property
    def content(self) -> str:
        """Return what identifies the documents: records that were left out are none of them."""
        bad, digest = self.counts.bad, self.work.digest
        return f"{digest} without {bad} records" if bad else digest


def open_shards(work: Work) -> SourceShards | None:
    """Return a source from its shards, or None where they are missing, torn or damaged."""
    splits, folder = work.source.splits, work.folder
    try:
        found = json.loads((folder / SHARD_MANIFEST).read_text())
        streams = {split: stream_of(folder, found, split) for split in splits}
        if any(sample_digest(streams[split]) != found["samples"][split] for split in splits):
            return None
        documents, text_bytes = (
            {split: sum(chunk[split][what] for chunk in found["chunks"]) for split in splits}
            for what in ("documents", "text_bytes")
        )
        return SourceShards(work, streams, Counts(**found["counts"]), documents, text_bytes)
    except ConfigError:  # too many files, which are whole
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def stream_of(folder: Path, manifest: Mapping[str, Any], split: str) -> TokenStream:
    """Return the ids of a split. Raises ConfigError for a shard that is not whole, and OSError."""
    dtype, arrays = np.dtype(manifest["dtype"]), []
    allow_open_files(len(manifest["chunks"]))  # a map keeps its file open
    for chunk in manifest["chunks"]:
        path, count = f"{folder}/{chunk['name']}.{split}.bin", chunk[split]["tokens"]
        if os.path.getsize(path) != count * dtype.itemsize:
            raise ValueError(f"{path}: is not whole")
        if count:
            arrays.append(np.memmap(path, dtype, "r", shape=(count,)))
    return TokenStream(arrays)
