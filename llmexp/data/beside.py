"""Read what stands beside a shard of documents: a file of each kind, and a record in its chunk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.config.values import ConfigError
from llmexp.data.stream import Shard
from llmexp.data.tokenizers.base import Tokenizer

SHARD_MANIFEST = "manifest.json"
DIGEST = np.dtype([("first", "<u8"), ("second", "<u8")])  # 16 bytes
# ends: in ids from the start of the shard; bytes: of the text of each document
_BESIDE = {"digests": DIGEST, "ends": np.dtype("<u8"), "bytes": np.dtype("<u8")}


def beside(shard: Shard, kind: str) -> np.ndarray:
    """Return the values of a file beside a shard, one for each document. Raises OSError."""
    return np.fromfile(Path(shard.name).with_suffix(f".{kind}"), _BESIDE[kind])


def digests_of(shards: Iterable[Shard]) -> np.ndarray:
    """Return the digest of each document of some shards. Raises OSError."""
    return np.concatenate([np.empty(0, DIGEST), *(beside(s, "digests") for s in shards)])


def noted(path: Path) -> dict[str, Any]:
    """Return what was noted of a shard when it was written: tokens, documents, text_bytes, sha256.

    That is {} for other files.
    """
    path = path.resolve()
    try:
        chunk, split = path.stem.split(".")  # CHUNK.SPLIT.bin
        found = json.loads(path.with_name(f"{chunk}.json").read_text())["shards"][split]
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def refuse_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the shards in a folder of the cache were made by another tokenizer."""
    try:
        noted = json.loads((folder / SHARD_MANIFEST).read_text())["tokenizer"]
        other = noted["sha256"] != tokenizer.identity
    except (OSError, ValueError, KeyError, TypeError):
        return
    if other:
        raise ConfigError(
            "wrong_tokenizer",
            f"{folder}: these shards were made by the tokenizer {noted.get('name')} "
            f"({noted['sha256'][:8]}), and {tokenizer.name} ({tokenizer.identity[:8]}) is another "
            "one; give the tokenizer that made them, for example tokenizer=gpt2",
        )
