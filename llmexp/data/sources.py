"""The data sources of conf/data: functions that return a `Corpus`.

The caller passes the knobs of the YAML and, of tokenizer, vocab_size, sequence_length and write,
what the signature asks for. `shuffle` and `ignore_id` belong to the loop and never get here.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.data.documents import blocks, find_documents, split
from llmexp.data.files import (
    allow_open_files,
    cache_folder,
    files_fingerprint,
    match_files,
    remembered,
)
from llmexp.data.labels import add_labels
from llmexp.data.prepare import Split, prepare, refuse_tokenizer
from llmexp.data.stream import Corpus, TokenStream, check_ids, sample_digest
from llmexp.data.token_files import documents_of, open_tokens
from llmexp.data.tokenizers import Tokenizer, identity
from llmexp.settings.values import refuse


@dataclass(frozen=True)
class Amount:
    """The amount of data to use, and the share of it for validation."""

    val_ratio: float
    max_tokens: int | None
    seed: int = 0

    def __post_init__(self) -> None:
        ratio = self.val_ratio
        number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
        if not number or not 0 <= ratio < 1:
            text = "a share from 0 to below 1 is needed, for example 0.1"
            raise refuse("data.val_ratio", ratio, text)
        if self.max_tokens is not None:
            _check_tokens("data.max_tokens", self.max_tokens)
        if not _whole(self.seed, 0):
            raise refuse("data.seed", self.seed, "a whole number of at least 0 is needed")

    def shares(self) -> tuple[int | None, int | None]:
        """Return how many tokens to train on and to validate on; None: all there are."""
        if self.max_tokens is None:
            return None, None
        train = round(self.max_tokens * (1 - self.val_ratio))
        return train, self.max_tokens - train


def _whole(value: Any, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _check_tokens(key: str, value: Any) -> None:
    if not _whole(value, 2):
        text = "a whole number of tokens, at least 2, is needed; for example 1000000"
        raise refuse(key, value, text)


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
    amount, cache = Amount(val_ratio, max_tokens, seed), cache_folder(cache_dir)
    found = _text_corpus({"data": _stdlib_files()}, amount, tokenizer, cache, write)
    return replace(found, description=f"Python's standard library, {found.description}")


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith("config-")]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths = [path for path in paths if os.access(path, os.R_OK)]
    if len(paths) < 50:
        text = f"this Python has no readable source files in {root} ({len(paths)} found)"
        way = "use text files of your own: data=text data.train_files=corpus/*.txt"
        raise ValueError(f"data=stdlib: {text}; {way}")
    return sorted(paths, key=lambda path: path.relative_to(root).parts)


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
    paths = _match_both(train_files, val_files)
    amount, cache = Amount(val_ratio, max_tokens, seed), cache_folder(cache_dir)
    return _text_corpus(paths, amount, tokenizer, cache, write)


def _match_both(train_files: Any, val_files: Any) -> dict[str, list[Path]]:
    """Return the files by knob; those for validation only where they are asked for."""
    found = {"data.train_files": match_files("data.train_files", train_files)}
    if val_files is not None:
        found["data.val_files"] = match_files("data.val_files", val_files)
    return found


def training_documents(
    *,
    val_ratio: float,
    max_tokens: int | None,
    seed: int,
    cache_dir: str | None,
    train_files: Any = None,
    val_files: Any = None,
) -> Iterator[Iterator[str]]:
    """Yield the pieces of each training document of `text`, or of `stdlib` without files;
    `max_tokens` does not cut them."""
    paths = (
        {"data": _stdlib_files()} if train_files is None else _match_both(train_files, val_files)
    )
    amount, cache = Amount(val_ratio, max_tokens, seed), cache_folder(cache_dir)
    key, some = next(iter(paths.items()))
    found = find_documents(key, some, cache, False)
    if len(paths) == 1:
        found = split(found, amount.val_ratio, amount.seed)["train"]
    for document in found:
        yield blocks(document)


def _text_corpus(
    paths: dict[str, list[Path]], amount: Amount, tokenizer: Tokenizer, cache: Path, write: bool
) -> Corpus:
    """Return the corpus of text files, of which the second knob's, if any, are for validation."""
    found = [find_documents(key, some, cache, write) for key, some in paths.items()]
    train, val = found if len(found) > 1 else (found[0], [])
    if val:
        splits = {"train": Split(train, amount.max_tokens), "val": Split(val, None)}
    else:
        parts, shares = split(train, amount.val_ratio, amount.seed), amount.shares()
        splits = {"train": Split(parts["train"], shares[0]), "val": Split(parts["val"], shares[1])}
    streams = prepare(splits, tokenizer, cache, write)

    every = train + val
    size = size_text(sum(d.size for d in every))
    description = f"{_counted(len(every), 'file')}, {size} of text"
    if empty := sum(map(len, paths.values())) - len(every):
        description += f", {_counted(empty, 'empty file')} left out"
    fingerprint: dict[str, Any] = {
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": identity(tokenizer),
        "train_files": files_fingerprint([d.path for d in train], [d.content for d in train]),
        "val_files": files_fingerprint([d.path for d in val], [d.content for d in val]),
        "max_tokens": amount.max_tokens,
    }
    if not val:
        seed = amount.seed if len(train) > 1 else None
        fingerprint |= {"val_ratio": amount.val_ratio, "seed": seed}
    both = _overlap(*({d.content: d.path for d in some} for some in (train, val)))
    return Corpus(
        train=streams["train"],
        val=streams["val"] or None,
        description=description,
        fingerprint=fingerprint,
        is_text=True,
        warnings=both,
    )


def size_text(size: int) -> str:
    """Return a number of bytes for a reader: `512 bytes`, `48.3 kB`, `12.1 MB`."""
    if size < 1000:
        return f"{size} bytes"
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count > 1 else ''}"


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
    train_labels: str | list[str] | None = None,
    val_labels: str | list[str] | None = None,
    tokenizer: Tokenizer | None = None,
    write: bool = True,
) -> Corpus:
    """Token files, memory-mapped: .npy (1-d integers), .bin of llm.c (has a header) or of Megatron
    (with its .idx), other .bin and OLMo's .npy (flat, `dtype`). Labels beside them hide targets.

    All ids are checked against `vocab_size`, once per state of the files. Without `val_files` the
    last `val_ratio` of the tokens is for validation.
    """
    amount, cache = Amount(val_ratio, max_tokens), cache_folder(cache_dir)
    if dtype not in ("uint16", "uint32"):
        raise refuse("data.dtype", dtype, "must be uint16 or uint32")
    paths = _match_both(train_files, val_files)
    allow_open_files(sum(map(len, paths.values())))  # a map keeps its file open
    arrays: dict[Path, np.ndarray] = {}
    for key, some in paths.items():
        arrays |= {p: open_tokens(key, p, dtype) for p in some if p not in arrays}
    if tokenizer is not None:
        for folder in {path.parent for path in arrays}:
            refuse_tokenizer(folder, tokenizer)
    # before the scan: from here on a change is noticed
    streams = [TokenStream([arrays[p] for p in some]) for some in paths.values()]
    # The content counts, at each start: a note by size and time misses a change that leaves both.
    digests = {p: sample_digest(TokenStream([a])) for p, a in arrays.items()}
    _check_all_ids(arrays, vocab_size, dtype, cache, write)
    marked = {"data.train_labels": train_labels, "data.val_labels": val_labels}
    labels = add_labels(marked, streams, paths, arrays, cache, write)

    if len(streams) > 1:
        train, val = streams[0].part(0, max_tokens or len(streams[0])), streams[1]
    else:
        train, val = _split_stream(streams[0], amount)
    train_paths, val_paths = paths["data.train_files"], paths.get("data.val_files", [])
    if len(train) < sequence_length + 1:
        text = f"{len(train):,} training tokens in {len(train_paths)} files do not fill a sequence"
        needed = f"batch.sequence_length={sequence_length} needs {sequence_length + 1:,}"
        raise refuse("data.train_files", train_files, f"{text}; {needed}")
    description = f"{_counted(len(arrays), 'token file')}, {len(train):,} training tokens"
    about, unmarked = _documents_text(arrays, tokenizer, cache, write)
    fingerprint = {
        name: files_fingerprint(some, [digests[p] for p in some])
        for name, some in (("train_files", train_paths), ("val_files", val_paths))
    }
    share = {"max_tokens": max_tokens, "val_ratio": None if val_paths else val_ratio}
    content = fingerprint | labels | share
    found = Corpus(train, val or None, description + about, content, unmarked=unmarked)
    both = _overlap(*({digests[p]: p for p in some} for some in (train_paths, val_paths)))
    return replace(found, warnings=both)


def _documents_text(
    arrays: dict[Path, np.ndarray], tokenizer: Tokenizer | None, cache: Path, write: bool
) -> tuple[str, int]:
    """Return what the indexes know of documents, in words, and how many lack the end-of-text id."""
    there, unmarked = documents_of(arrays, tokenizer, cache, write)
    text = f", {_counted(there, 'document')} by their indexes" if there else ""
    if unmarked:
        text += f" ({unmarked:,} do not end with the end-of-text id)"
    return text, unmarked


def _check_all_ids(
    arrays: dict[Path, np.ndarray], vocab_size: int, dtype: str, cache: Path, write: bool
) -> None:
    def scan() -> bool:
        for path, array in arrays.items():
            check_ids(array, vocab_size, str(path))
        return True

    settings = [vocab_size, [a.dtype.str for a in arrays.values()], dtype]
    remembered(cache, "ids", settings, list(arrays), scan, write)


def _split_stream(stream: TokenStream, amount: Amount) -> list[TokenStream]:
    """Return the first tokens for training, and those after the share of them for validation."""
    end = int(len(stream) * (1 - amount.val_ratio))
    train, val = (len(stream) if share is None else share for share in amount.shares())
    return [stream.part(0, min(end, train)), stream.part(end, min(len(stream), end + val))]


def synthetic(
    *, pattern: str, n_tokens: int, n_ids: int | None, val_ratio: float, seed: int, vocab_size: int
) -> Corpus:
    """Return a stream that can be learned, of known entropy, made in memory: no files.

    markov: a first-order chain. Each id has four successors, with probabilities 0.7, 0.1, 0.1, 0.1:
    the best possible loss is 0.940 nats per token. copy: blocks of 16 random ids, each block twice:
    a model that looks back 16 tokens gets to ln(n_ids) / 2.
    """
    Amount(val_ratio, None, seed)  # checks them
    _check_tokens("data.n_tokens", n_tokens)
    ids = vocab_size if n_ids is None else n_ids
    if not _whole(ids, 4) or ids > vocab_size:
        text = f"must be between 4 and the vocabulary of {vocab_size}, or null for all of it"
        raise refuse("data.n_ids", n_ids, text)
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
        raise refuse("data.pattern", pattern, "must be markov or copy")
    kept = stream.astype(np.uint16 if ids <= 1 << 16 else np.uint32)
    end = int(n_tokens * (1 - val_ratio))
    train, val = TokenStream([kept[:end]]), TokenStream([kept[end:]])
    best = f"best possible loss {nats:.3f} nats per token"
    description = f"synthetic {pattern} over {ids} ids, {best}"
    fingerprint = {"content": sample_digest(TokenStream([kept])), "val_ratio": val_ratio}
    return Corpus(train, val or None, description, fingerprint)


def _overlap(train: dict[str, Path], val: dict[str, Path]) -> tuple[str, ...]:
    """Return a warning where files (content -> path) are in both, whatever their names."""
    shared = sorted(str(val[content]) for content in train.keys() & val.keys())
    if not shared:
        return ()
    files = f"{_counted(len(shared), 'file')} of data.val_files, such as {shared[0]},"
    verb = "are" if len(shared) > 1 else "is"
    return (f"{files} {verb} in data.train_files too; leave what is in both out of one of them",)
