"""The data sources of conf/data: functions that return a `Corpus`.

The caller passes the knobs of the YAML and, of tokenizer, vocab_size, sequence_length and write,
what the signature asks for. `shuffle` and `ignore_id` belong to the loop and never get here.
"""

from __future__ import annotations

import math
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.data.files import (
    allow_open_files,
    cache_folder,
    files_fingerprint,
    match_files,
    refuse_packed,
    remembered,
    sha256_of,
    state_of,
)
from llmexp.data.order import sequence_index
from llmexp.data.prepare import Segment, prepare
from llmexp.data.stream import Corpus, TokenStream, check_ids, sample_digest
from llmexp.data.tokenizers import Tokenizer, identity

BOM = b"\xef\xbb\xbf"
# 256 int32: magic, version, number of tokens (llm.c, dev/data/data_common.py)
LLM_C_HEADER_BYTES = 1024
LLM_C_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


def size_text(size: int) -> str:
    """Return a number of bytes for a reader: `512 bytes`, `48.3 kB`, `12.1 MB`."""
    if size < 1000:
        return f"{size} bytes"
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


def stdlib(
    *,
    tokenizer: Tokenizer,
    val_ratio: float,
    max_tokens: int | None,
    seed: int,
    cache_dir: str | None,
    write: bool = True,
) -> Corpus:
    """Return the source text of the running Python's standard library, without its tests: real text
    on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith("config-")]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths = sorted(
        (p for p in paths if os.access(p, os.R_OK)), key=lambda p: p.relative_to(root).parts
    )
    if len(paths) < 50:
        raise ValueError(
            f"data=stdlib: this Python has no readable source files in {root} ({len(paths)} "
            "found); use text files of your own: data=text data.train_files=corpus/*.txt"
        )
    return _text_corpus(
        paths,
        [],
        "Python's standard library",
        tokenizer,
        val_ratio,
        max_tokens,
        seed,
        cache_dir,
        write,
    )


def text(
    *,
    train_files: str | list[str] | None,
    val_files: str | list[str] | None,
    tokenizer: Tokenizer,
    val_ratio: float,
    max_tokens: int | None,
    seed: int,
    cache_dir: str | None,
    write: bool = True,
) -> Corpus:
    """UTF-8 text files, each a document; the end-of-text token stands between two documents.

    Without `val_files` the last `val_ratio` of the text (bytes, cut between characters) is for
    validation; several documents are put into an order by `seed` first. A byte order mark at the
    start of a file is left out; everything else stays as it is.
    """
    train_paths = match_files("data.train_files", train_files)
    val_paths = match_files("data.val_files", val_files) if val_files is not None else []
    return _text_corpus(
        train_paths, val_paths, "", tokenizer, val_ratio, max_tokens, seed, cache_dir, write
    )


@dataclass(frozen=True)
class _Document:
    path: Path
    start: int  # after the byte order mark
    stop: int
    content: str
    state: tuple[int, int]

    def segment(self, start: int, stop: int) -> Segment:
        return Segment(self.path, start, stop, self.content, self.state)


def _text_corpus(
    train_paths: list[Path],
    val_paths: list[Path],
    label: str,
    tokenizer: Tokenizer,
    val_ratio: float,
    max_tokens: int | None,
    seed: int,
    cache_dir: str | None,
    write: bool,
) -> Corpus:
    _check_knobs(val_ratio, max_tokens, seed)
    cache = cache_folder(cache_dir)
    key = "data.train_files" if not label else "data"
    train_documents = _documents(key, train_paths, cache, write)
    val_documents = _documents("data.val_files", val_paths, cache, write) if val_paths else []
    caps: dict[str, int | None]
    if val_documents:
        splits = {
            name: [d.segment(d.start, d.stop) for d in found]
            for name, found in (("train", train_documents), ("val", val_documents))
        }
        caps = {"train": max_tokens, "val": None}
    else:
        splits = split(train_documents, val_ratio, seed)
        caps = _shares(max_tokens, val_ratio)
    streams = prepare(splits, caps, tokenizer, cache, write)

    every = train_documents + val_documents
    size = sum(d.stop - d.start for d in every)
    count = f"{len(every):,} file{'s' if len(every) > 1 else ''}, {size_text(size)} of text"
    description = f"{label}, {count}" if label else count
    empty = len(train_paths) + len(val_paths) - len(every)
    if empty:
        description += f", {empty} empty file{'s' if empty > 1 else ''} left out"
    description += _overlap(train_paths, val_paths)
    fingerprint: dict[str, Any] = {
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": identity(tokenizer),
        "train_files": files_fingerprint(
            [d.path for d in train_documents], [d.content for d in train_documents]
        ),
        "val_files": files_fingerprint(
            [d.path for d in val_documents], [d.content for d in val_documents]
        ),
        "max_tokens": max_tokens,
    }
    if not val_documents:
        fingerprint |= {"val_ratio": val_ratio, "seed": seed if len(train_documents) > 1 else None}
    val = streams.get("val")
    return Corpus(streams["train"], val if val else None, description, fingerprint, is_text=True)


def _documents(key: str, paths: list[Path], cache: Path, write: bool) -> list[_Document]:
    """Return the files that are not empty. Raises ValueError when all are, or one that is the only
    one."""
    states = [state_of(p) for p in paths]  # before the hashing: from here on a change is noticed
    contents = remembered(cache, "sha256", None, paths, lambda: sha256_of(paths), write)
    documents = []
    for path, state, content in zip(paths, states, contents, strict=True):
        refuse_packed(key, path)
        with open(path, "rb") as file:
            start = len(BOM) if file.read(len(BOM)) == BOM else 0
        if state[0] > start:
            documents.append(_Document(path, start, state[0], content, state))
    if not documents:
        raise ValueError(
            f"{key}={paths[0]}: the file is empty"
            if len(paths) == 1
            else f"{key}: all {len(paths)} files are empty, {paths[0]} is the first"
        )
    return documents


def split(documents: list[_Document], val_ratio: float, seed: int) -> dict[str, list[Segment]]:
    """Return the documents one after the other, cut where the share `val_ratio` of their bytes is
    left.

    For a single ASCII file this is text[:int(n * (1 - val_ratio))]. Several are shuffled by `seed`
    before.
    """
    if len(documents) > 1:
        documents = [
            documents[i]
            for i in sequence_index(seed, np.arange(len(documents)), len(documents), True)
        ]
    left = int(sum(d.stop - d.start for d in documents) * (1 - val_ratio))
    found: dict[str, list[Segment]] = {"train": [], "val": []}
    for d in documents:
        at = (
            _character_start(d, d.start + left)
            if 0 < left < d.stop - d.start
            else d.start + max(0, left)
        )
        at = min(at, d.stop)
        if at > d.start:
            found["train"].append(d.segment(d.start, at))
        if at < d.stop:
            found["val"].append(d.segment(at, d.stop))
        left -= d.stop - d.start
    return found


def _character_start(document: _Document, at: int) -> int:
    """Return the start of the UTF-8 character that the byte `at` belongs to."""
    with open(document.path, "rb") as file:
        first = max(document.start, at - 3)
        file.seek(first)
        around = file.read(at - first + 1)
    while len(around) > 1 and around[-1] & 0xC0 == 0x80:
        around = around[:-1]
    return first + len(around) - 1


def tokens(
    *,
    train_files: str | list[str] | None,
    val_files: str | list[str] | None,
    dtype: str,
    val_ratio: float,
    max_tokens: int | None,
    cache_dir: str | None,
    vocab_size: int,
    sequence_length: int,
    write: bool = True,
) -> Corpus:
    """Token files, memory-mapped: .npy (1-d integers), .bin of llm.c (has a header), other .bin
    (flat, `dtype`).

    All ids are checked against `vocab_size`, once per state of the files. Without `val_files` the
    last `val_ratio` of the tokens is for validation.
    """
    _check_knobs(val_ratio, max_tokens, 0)
    if dtype not in ("uint16", "uint32"):
        raise ValueError(f"data.dtype={dtype}: must be uint16 or uint32")
    train_paths = match_files("data.train_files", train_files)
    val_paths = match_files("data.val_files", val_files) if val_files is not None else []
    allow_open_files(len(train_paths) + len(val_paths))  # a map keeps its file open
    arrays = {p: _open_tokens("data.train_files", p, dtype) for p in train_paths}
    arrays |= {p: _open_tokens("data.val_files", p, dtype) for p in val_paths if p not in arrays}
    # before the scan: from here on a change is noticed
    train = TokenStream([arrays[p] for p in train_paths])
    val: TokenStream | None = TokenStream([arrays[p] for p in val_paths])
    # Of the content, at each start: what is remembered by size and time misses a change that leaves
    # both.
    digests = {p: sample_digest(TokenStream([a])) for p, a in arrays.items()}

    def scan() -> bool:
        for path, array in arrays.items():
            check_ids(array, vocab_size, str(path))
        return True

    types = [a.dtype.str for a in arrays.values()]
    remembered(
        cache_folder(cache_dir), "ids", [vocab_size, types, dtype], list(arrays), scan, write
    )

    if val_paths:
        train = train.part(0, max_tokens or len(train))
    else:
        end = int(len(train) * (1 - val_ratio))
        caps = _shares(max_tokens, val_ratio)
        val = train.part(
            end, min(len(train), end + (len(train) if caps["val"] is None else caps["val"]))
        )
        train = train.part(0, end if caps["train"] is None else min(end, caps["train"]))
    if len(train) < sequence_length + 1:
        raise ValueError(
            f"data.train_files={train_files}: {len(train):,} training tokens in {len(train_paths)} "
            f"files do not fill one sequence; batch.sequence_length={sequence_length} needs "
            f"{sequence_length + 1:,}"
        )
    count = (
        f"{len(arrays):,} token file{'s' if len(arrays) > 1 else ''}, {len(train):,} training "
        "tokens"
    )
    fingerprint: dict[str, Any] = {
        "train_files": files_fingerprint(train_paths, [digests[p] for p in train_paths]),
        "val_files": files_fingerprint(val_paths, [digests[p] for p in val_paths]),
        "max_tokens": max_tokens,
        "val_ratio": None if val_paths else val_ratio,
    }
    description = count + _overlap(train_paths, val_paths)
    return Corpus(train, val if val else None, description, fingerprint)


def _open_tokens(key: str, path: Path, dtype: str) -> np.ndarray:
    """Return the ids of a token file as a 1-d memory map. Raises ValueError with the sizes for what
    is not whole."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{key}={path}: the file is empty (0 bytes)")
    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # a damaged header raises what its parser raises
            raise ValueError(
                f"{key}={path}: no readable .npy file of {size:,} bytes: {error}"
            ) from None
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
            what = (
                f"{array.ndim}-d {array.dtype}"
                if isinstance(array, np.ndarray)
                else type(array).__name__
            )
            raise ValueError(
                f"{key}={path}: a 1-d array of integers is needed, the file holds {what}"
            )
        if not len(array):
            raise ValueError(f"{key}={path}: the array is empty")
        return array
    if path.suffix != ".bin":
        raise ValueError(f"{key}={path}: a token file ends in .npy or .bin; for text use data=text")
    header = np.fromfile(path, "<i4", 256) if size >= LLM_C_HEADER_BYTES else np.zeros(256, "<i4")
    magic, version, told = header[:3].tolist()
    if magic in {m for m, _ in LLM_C_TYPES}:
        if (magic, version) not in LLM_C_TYPES:
            raise ValueError(
                f"{key}={path}: llm.c format {magic} version {version} is unknown; known (magic, "
                f"version): {', '.join(map(str, LLM_C_TYPES))}"
            )
        kind, offset = np.dtype(LLM_C_TYPES[magic, version]), LLM_C_HEADER_BYTES
        if told < 1 or size != offset + told * kind.itemsize:
            raise ValueError(
                f"{key}={path}: the header tells of {told:,} {kind.name} tokens = "
                f"{offset + told * kind.itemsize:,} bytes, the file has {size:,}"
            )
    else:
        kind, offset = np.dtype(dtype).newbyteorder("<"), 0
        if size % kind.itemsize:
            raise ValueError(
                f"{key}={path}: {size:,} bytes are no whole number of {dtype} tokens "
                f"(data.dtype={dtype})"
            )
    array = np.memmap(path, kind, "r", offset, shape=((size - offset) // kind.itemsize,))
    if offset == 0 and dtype == "uint16":
        # Wide ids read as narrow ones are all valid: the high halves give them away.
        head = np.asarray(array[: 1 << 16])
        if len(head) >= 256 and len(array) % 2 == 0 and head[1::2].max() <= 3 < head[::2].max():
            raise ValueError(
                f"{key}={path}: data.dtype=uint16, but every other value is almost 0: these are "
                "uint32 tokens"
            )
    return array


def synthetic(
    *,
    pattern: str,
    n_tokens: int,
    n_ids: int | None,
    val_ratio: float,
    seed: int,
    vocab_size: int,
) -> Corpus:
    """Return a stream that can be learned, of known entropy, made in memory: no files.

    markov: a first-order chain. Each id has four successors, with probabilities 0.7, 0.1, 0.1, 0.1:
    the best possible loss is 0.940 nats per token. copy: blocks of 16 random ids, each block twice:
    a model that looks back 16 tokens gets to ln(n_ids) / 2.
    """
    _check_knobs(val_ratio, n_tokens, seed, "data.n_tokens")
    ids = vocab_size if n_ids is None else n_ids
    if not _whole(ids, 4) or ids > vocab_size:
        raise ValueError(
            f"data.n_ids={n_ids}: must be between 4 and the vocabulary of {vocab_size}, or null "
            "for all of it"
        )
    rng = np.random.Generator(np.random.PCG64(seed))
    names = np.argsort(rng.random(ids))  # which id stands for which state
    if pattern == "markov":
        # A walk on a circle: the next state is the present one plus one of four distances, so it is
        # a running sum.
        distances = np.array([1, 0, ids // 2, ids - 1])
        steps = distances[np.searchsorted([0.7, 0.8, 0.9], rng.random(n_tokens), side="right")]
        stream = names[np.cumsum(steps) % ids]
        nats = -(0.7 * math.log(0.7) + 0.3 * math.log(0.1))
    elif pattern == "copy":
        period = 16
        blocks = (rng.random((-(-n_tokens // (2 * period)), period)) * ids).astype(np.int64)
        stream = np.repeat(blocks, 2, axis=0).reshape(-1)[:n_tokens]
        nats = math.log(ids) / 2
    else:
        raise ValueError(f"data.pattern={pattern}: must be markov or copy")
    kept = stream.astype(np.uint16 if ids <= 1 << 16 else np.uint32)
    end = int(n_tokens * (1 - val_ratio))
    train, val = TokenStream([kept[:end]]), TokenStream([kept[end:]])
    description = (
        f"synthetic {pattern} over {ids} ids, best possible loss {nats:.3f} nats per token"
    )
    fingerprint = {"content": sample_digest(TokenStream([kept])), "val_ratio": val_ratio}
    return Corpus(train, val if val else None, description, fingerprint)


def _shares(max_tokens: int | None, val_ratio: float) -> dict[str, int | None]:
    if max_tokens is None:
        return {"train": None, "val": None}
    train = round(max_tokens * (1 - val_ratio))
    return {"train": train, "val": max_tokens - train}


def _whole(value: Any, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _check_knobs(
    val_ratio: Any, max_tokens: Any, seed: Any, max_key: str = "data.max_tokens"
) -> None:
    number = isinstance(val_ratio, (int, float)) and not isinstance(val_ratio, bool)
    if not number or not 0 <= val_ratio < 1:
        raise ValueError(
            f"data.val_ratio={val_ratio}: a share from 0 to below 1 is needed, for example 0.1"
        )
    if not (_whole(max_tokens, 2) or (max_tokens is None and max_key == "data.max_tokens")):
        raise ValueError(
            f"{max_key}={max_tokens}: a whole number of tokens, at least 2, is needed; for example "
            "1000000"
        )
    if not _whole(seed, 0):
        raise ValueError(f"data.seed={seed}: a whole number of at least 0 is needed")


def _overlap(train_paths: list[Path], val_paths: list[Path]) -> str:
    shared = {p.resolve() for p in train_paths} & {p.resolve() for p in val_paths}
    if not shared:
        return ""
    return (
        f"; WARNING: in both train and validation: {', '.join(sorted(map(str, shared))[:3])} "
        f"({len(shared)} files)"
    )
