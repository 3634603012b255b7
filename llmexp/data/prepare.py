"""Token shards of text in the cache folder: made once, committed whole or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.data.cache import building, flushed, id_type
from llmexp.data.documents import Document, refuse_changed
from llmexp.data.encode import encode_documents
from llmexp.data.progress import Progress
from llmexp.data.stream import TokenStream, sample_digest
from llmexp.data.tokenizers import Own, Tokenizer, identified, identity
from llmexp.system.fileio import sync, write_whole

FORMAT = 1  # of the shards; part of their key
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Split:
    """The documents of one shard, and how many of their tokens are kept; None: all."""

    documents: list[Document]
    max_tokens: int | None


def prepare(
    splits: dict[str, Split], encoding: Tokenizer, cache: Path, write: bool
) -> dict[str, TokenStream]:
    """Return a token stream per split ("train", "val"); from the cache where it is there.

    Without `write` nothing is written: what is not in the cache is counted, and its stream knows
    its length only. Raises ValueError for text that is not UTF-8 (file and byte offset), for a file
    that is not what was hashed any more, and for a cache that cannot be written.
    """
    folder = cache / "tokens" / _key(splits, encoding)
    names = list(splits)
    if (there := _open(folder, names, encoding)) is not None:
        return there
    size = sum(d.size for s in splits.values() for d in s.documents)
    progress = Progress(f"{size / 1e6:,.0f} MB of text", write, size)
    if not write:
        counted = {}
        for name, split in splits.items():
            arrays = encode_documents(split.documents, encoding, split.max_tokens, progress.add)
            counted[name] = TokenStream.unprepared(sum(map(len, arrays)))
        progress.end()
        return counted
    with building(folder, cache):
        if (there := _open(folder, names, encoding)) is None:  # else another process was faster
            _build(folder, splits, encoding, progress)
            progress.end()
            there = _open(folder, names, encoding)
    if there is None:
        raise ValueError(
            f"data.cache_dir={cache}: what was just written to {folder} reads back damaged"
        )
    return there


def _key(splits: dict[str, Split], encoding: Tokenizer) -> str:
    recipe = {
        name: {
            "segments": [(d.content, d.start, d.stop) for d in split.documents],
            "max_tokens": split.max_tokens,
        }
        for name, split in splits.items()
    }
    text = json.dumps([FORMAT, identity(encoding), recipe], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _build(folder: Path, splits: dict[str, Split], encoding: Tokenizer, progress: Progress) -> None:
    """Write a shard per split beside `folder`, the manifest last, and rename. The caller holds the
    lock."""
    # one name: what a killed process left is cleared by the next one
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    dtype = id_type(encoding)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "dtype": dtype.str,
        "tokenizer": identified(encoding),
        "splits": {},
    }
    try:
        for name, split in splits.items():
            path, content = temporary / f"{name}.bin", hashlib.sha256()
            documents = _Documents(progress)
            with flushed(path) as file:
                for tokens in encode_documents(
                    split.documents, encoding, split.max_tokens, documents.note
                ):
                    written = tokens.astype(dtype).data
                    file.write(written)
                    content.update(written)
                    documents.tokens += len(tokens)
            documents.write(path)
            count = documents.tokens
            sample = sample_digest(_shard(path, dtype, count))
            manifest["splits"][name] = {
                "tokens": count,
                "sample": sample,
                "sha256": content.hexdigest(),
            }
            # else other tokens would be found under the hash of the old text
            refuse_changed(split.documents)
        with flushed(temporary / MANIFEST) as file:
            file.write(json.dumps(manifest).encode())
        sync(temporary)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        temporary.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Documents:
    """The documents of a shard while it is written: where they end, and the bytes of their text."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.tokens = 0  # written so far
        self._ends: list[int] = []
        self._sizes = [0]

    def note(self, n_bytes: int) -> None:
        """Note the bytes of text of the ids that come next; 0 for the id that ends a document."""
        self._progress.add(n_bytes)
        self._sizes[-1] += n_bytes
        if not n_bytes:
            self._ends.append(self.tokens + 1)
            self._sizes.append(0)

    def write(self, shard: Path) -> None:
        """Write the files beside a shard that is whole."""
        if self._ends[-1:] == [self.tokens]:  # the limit of tokens cut it there
            self._sizes.pop()
        elif self.tokens:
            self._ends.append(self.tokens)
        for ending, values in ((".ends", self._ends), (".bytes", self._sizes)):
            write_whole(shard.with_suffix(ending), np.array(values, "<u8").tobytes())


def _open(folder: Path, names: list[str], encoding: Tokenizer) -> dict[str, TokenStream] | None:
    """Return the streams of a cache entry, or None where it is missing, torn or damaged, or of an
    older version that did not count bytes which the ids alone do not tell."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        dtype = np.dtype(manifest["dtype"])
        streams = {}
        for name in names:
            noted = manifest["splits"][name]
            if isinstance(encoding, Own) and not (folder / f"{name}.bytes").exists():
                return None
            if (folder / f"{name}.bin").stat().st_size != noted["tokens"] * dtype.itemsize:
                return None
            streams[name] = _shard(folder / f"{name}.bin", dtype, noted["tokens"])
            if sample_digest(streams[name]) != noted["sample"]:
                return None
        return streams
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recorded(path: Path) -> dict[str, str]:
    """Return what was noted of a shard when it was written: the "sha256" of its bytes and its
    "sample" (`sample_digest`).

    Less where an older version wrote it, nothing for what is no shard of the cache.
    """
    try:
        manifest, split = path.parent / MANIFEST, path.stem
        part = "splits"
        if "." in split:  # of a corpus: CHUNK.SPLIT.bin
            chunk, _, split = split.partition(".")
            manifest, part = path.parent / f"{chunk}.json", "shards"
        found = json.loads(manifest.read_text())[part][split]
        return {key: found[key] for key in ("sha256", "sample") if isinstance(found.get(key), str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def refuse_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise ValueError where the shards of a folder of the cache were made by another tokenizer;
    older ones do not say."""
    try:
        noted = json.loads((folder / MANIFEST).read_text())["tokenizer"]
        other = noted["sha256"] != identity(tokenizer)
    except (OSError, ValueError, KeyError, TypeError):
        return
    if other:
        raise ValueError(
            f"{folder}: these shards were made by the tokenizer {noted.get('name')} "
            f"({noted['sha256'][:8]}), and {tokenizer.name} ({identity(tokenizer)[:8]}) is another "
            "one; give the tokenizer that made them, for example tokenizer=gpt2"
        )


def _shard(path: Path, dtype: np.dtype, count: int) -> TokenStream:
    return TokenStream([np.memmap(path, dtype, "r", shape=(count,))] if count else [])
