"""The data sources of conf/data: functions that return a `Corpus`.

The caller passes the knobs of the YAML and, of tokenizer, vocab_size, sequence_length and
ask_again, what the signature asks for. `shuffle` and `ignore_id` belong to the loop and never get
here. A source NAME of documents has a function NAME_sources beside it, from the same knobs to its
`Source`s, for commands that read the documents themselves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from llmexp.data.cache import cache_folder, cached
from llmexp.data.files import allow_open_files, files_fingerprint, stdlib_files
from llmexp.data.labels import add_labels
from llmexp.data.matching import left_out_text, match_files
from llmexp.data.order import sequence_index
from llmexp.data.overlap import warnings_of
from llmexp.data.prepared import prepare_sources, refuse_tokenizer
from llmexp.data.remote import RemoteCache
from llmexp.data.stream import Corpus, TokenStream, check_ids, sample_digest
from llmexp.data.token_files import documents_of, open_all
from llmexp.data.tokenizers import Tokenizer
from llmexp.data.work import TRAIN, Source, works_of
from llmexp.settings.labels import plural
from llmexp.settings.parts import DataKnobs
from llmexp.settings.values import choice, knob, refuse
from llmexp.system.text import size_text

FlatType = Annotated[
    str | None,
    choice(
        "type of the ids in a flat file, .bin or .npy without a header; null: uint16",
        "uint16 | int32 | uint32 | int64",
    ),
]


def shared_tokens(max_tokens: int | None, val_ratio: float) -> tuple[int | None, int | None]:
    """Return how many tokens to train on and to validate on; None: all there are."""
    if max_tokens is None:
        return None, None
    train = round(max_tokens * (1 - val_ratio))
    return train, max_tokens - train


def stdlib(
    *,
    tokenizer: Tokenizer,
    val_ratio: DataKnobs.val_ratio,
    max_tokens: DataKnobs.max_tokens,
    seed: DataKnobs.seed,
    cache_dir: DataKnobs.cache_dir,
) -> Corpus:
    """Return the source text of Python's standard library, without its tests.

    That is real text on every machine.
    """
    remote = RemoteCache(cache_folder(cache_dir))
    sources = stdlib_sources(remote, val_ratio=val_ratio, seed=seed)
    found = _text_corpus(sources, val_ratio, max_tokens, seed, tokenizer, remote)
    return replace(found, description=f"Python's standard library, {found.description}")


def stdlib_sources(remote: RemoteCache, *, val_ratio: float, seed: int, **_: Any) -> list[Source]:
    """Return the source of data=stdlib. Raises ValueError for a Python without source files."""
    return [replace(_source("data", stdlib_files(), val_ratio, seed), plain=True)]


def text(
    *,
    train_files: DataKnobs.train_files,
    val_files: DataKnobs.val_files,
    tokenizer: Tokenizer,
    val_ratio: DataKnobs.val_ratio,
    max_tokens: DataKnobs.max_tokens,
    seed: DataKnobs.seed,
    cache_dir: DataKnobs.cache_dir,
    plain: Annotated[
        bool, knob("each file is plain text, a document a file, also one like JSON", False)
    ] = False,
) -> Corpus:
    """Return files of text as a corpus of one source, with the end-of-text token between documents.

    Without `val_files` the share `val_ratio` is for validation: of 100 files or more whole ones,
    chosen by their content, of fewer the last part of each. They are read in an order by `seed`
    then. A byte order mark at the start of a file is left out; everything else stays as it is.
    """
    remote = RemoteCache(cache_folder(cache_dir))
    knobs = {"train_files": train_files, "val_files": val_files, "val_ratio": val_ratio}
    sources = text_sources(remote, seed=seed, plain=plain, **knobs)
    return _text_corpus(sources, val_ratio, max_tokens, seed, tokenizer, remote)


def text_sources(
    remote: RemoteCache,
    *,
    train_files: Any,
    val_files: Any,
    val_ratio: float,
    seed: int,
    plain: bool = False,
    **_: Any,
) -> list[Source]:
    """Return the sources that the knobs of data=text name. Raises ValueError."""
    left = list[str]()
    train, *val = _match_both(train_files, val_files, left).items()
    found = _source(*train) if val else _source(*train, val_ratio, seed)
    held_out = [replace(_source(*one), name="val", held_out=True, plain=plain) for one in val]
    return [replace(found, left_out=tuple(left), plain=plain), *held_out]


def _source(key: str, paths: list[Path], val_ratio: float = 0.0, seed: int | None = None) -> Source:
    """Return files as a source, in an order by `seed`, a share of them for validation."""
    if seed is not None:
        order = sequence_index(seed, np.arange(len(paths)), len(paths), True)
        paths = [paths[i] for i in order]
    shares = (("val", val_ratio),) if val_ratio else ()
    return Source("text", key, files=tuple(map(str, paths)), shares=shares)


def _match_both(train_files: Any, val_files: Any, left: list[str]) -> dict[str, list[Path]]:
    """Return the files by knob; those for validation only where they are asked for.

    `left` gets what is left out.
    """
    found = {"data.train_files": match_files("data.train_files", train_files, left)}
    if val_files is not None:
        found["data.val_files"] = match_files("data.val_files", val_files, left)
    return found


def _text_corpus(
    sources: list[Source],
    val_ratio: float,
    max_tokens: int | None,
    seed: int,
    tokenizer: Tokenizer,
    remote: RemoteCache,
) -> Corpus:
    """Return the corpus of one source, with its share or another source for validation."""
    works = works_of(sources, tokenizer, remote)
    trained, held_out = prepare_sources(works, remote)
    ready = trained["text"]
    most: tuple[int | None, int | None] = max_tokens, None
    if held_out:
        val = held_out["val"].streams[TRAIN]
    else:
        most = shared_tokens(max_tokens, val_ratio)
        val = ready.streams.get("val", TokenStream([]))
    train, val = (
        # without the last end-of-text token: it stands between two documents
        stream.part(0, max(0, min(len(stream) - 1, len(stream) if left is None else left)))
        for stream, left in zip((ready.streams[TRAIN], val), most, strict=True)
    )
    both = [ready, *held_out.values()]
    size = sum(sum(one.text_bytes.values()) for one in both)
    count = sum(one.counts.documents for one in both)
    description = f"{plural(count, 'document')}, {size_text(size)} of text"
    if (files := sum(len(one.work.source.files) for one in both)) > 1:
        description += f" in {files:,} files"
    if empty := sum(one.counts.empty for one in both):
        description += f", {plural(empty, 'empty one')} left out"
    description += left_out_text(works[0].source.left_out)
    marks = [
        files_fingerprint({Path(name): one.content for name, one in work.inputs.items()})
        for work in works
    ]
    fingerprint: dict[str, Any] = {
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.identity,
        "train_files": marks[0],
        "val_files": marks[1] if held_out else {},
        "max_tokens": max_tokens,
    }
    if not held_out:
        source = works[0].source
        fingerprint |= {
            "val_ratio": val_ratio,
            "val_is": "the last part of each file" if source.cuts_texts else "whole documents",
            "seed": seed if len(source.files) > 1 else None,
        }
    return Corpus(
        train=train,
        val=val or None,
        description=description,
        fingerprint=fingerprint,
        is_text=True,
        warnings=warnings_of(trained, held_out, remote),
    )


def tokens(
    *,
    train_files: DataKnobs.train_files,
    val_files: DataKnobs.val_files,
    dtype: FlatType,
    val_ratio: DataKnobs.val_ratio,
    max_tokens: DataKnobs.max_tokens,
    cache_dir: DataKnobs.cache_dir,
    vocab_size: int,
    sequence_length: int,
    train_labels: DataKnobs.train_labels = None,
    val_labels: DataKnobs.val_labels = None,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """Return the ids of token files, memory-mapped.

    These are .npy (1-d integers), .bin of llm.c (has a header) or of Megatron (with its .idx),
    other .bin and OLMo's .npy (flat: of `dtype`, which others must not have). Labels beside them
    hide targets. All ids are checked against `vocab_size`, once per state of the files. Without
    `val_files` the last `val_ratio` of the tokens is for validation.
    """
    cache = cache_folder(cache_dir)
    left = list[str]()
    paths = _match_both(train_files, val_files, left)
    allow_open_files(sum(map(len, paths.values())))  # a map keeps its file open
    arrays = open_all(paths, dtype)
    if tokenizer is not None:
        for folder in {path.resolve().parent for path in arrays}:
            refuse_tokenizer(folder, tokenizer)
    # before the scan: from here on a change is noticed
    streams = [TokenStream([arrays[p] for p in some]) for some in paths.values()]
    # The content counts, at each start: a note by size and time misses a change that leaves both.
    digests = {p: sample_digest(TokenStream([a])) for p, a in arrays.items()}
    _check_all_ids(arrays, vocab_size, cache)
    marked = {"data.train_labels": train_labels, "data.val_labels": val_labels}
    labels = add_labels(marked, streams, paths, arrays, cache)

    if len(streams) > 1:
        train, val = streams[0].part(0, max_tokens or len(streams[0])), streams[1]
    else:
        train, val = _split(streams[0], val_ratio, max_tokens)
    train_paths, val_paths = paths["data.train_files"], paths.get("data.val_files", [])
    if len(train) < sequence_length + 1:
        text = f"{len(train):,} training tokens in {len(train_paths)} files do not fill a sequence"
        needed = f"batch.sequence_length={sequence_length} needs {sequence_length + 1:,}"
        raise refuse("data.train_files", train_files, f"{text}; {needed}")
    description = f"{plural(len(arrays), 'token file')}, {len(train):,} training tokens"
    about, unmarked = _documents_text(arrays, tokenizer, cache)
    about += left_out_text(left)
    fingerprint = {
        name: files_fingerprint({p: digests[p] for p in some})
        for name, some in (("train_files", train_paths), ("val_files", val_paths))
    }
    share = {"max_tokens": max_tokens, "val_ratio": None if val_paths else val_ratio}
    content = fingerprint | labels | share
    found = Corpus(train, val or None, description + about, content, unmarked=unmarked)
    both = _overlap(*({digests[p]: p for p in some} for some in (train_paths, val_paths)))
    return replace(found, warnings=both)


def _documents_text(
    arrays: dict[Path, np.ndarray], tokenizer: Tokenizer | None, cache: Path
) -> tuple[str, int]:
    """Return what the indexes know of documents, in words, and how many lack the end-of-text id."""
    there, unmarked = documents_of(arrays, tokenizer, cache)
    text = f", {plural(there, 'document')} by their indexes" if there else ""
    if unmarked:
        text += f" ({unmarked:,} do not end with the end-of-text id)"
    return text, unmarked


def _check_all_ids(arrays: dict[Path, np.ndarray], vocab_size: int, cache: Path) -> None:
    def scan() -> bool:
        for path, array in arrays.items():
            check_ids(array, vocab_size, str(path))
        return True

    settings = [vocab_size, [a.dtype.str for a in arrays.values()]]
    cached(cache, "ids", settings, list(arrays), scan)


def _split(
    stream: TokenStream, val_ratio: float, max_tokens: int | None
) -> tuple[TokenStream, TokenStream]:
    """Return the first tokens for training, and those after the share of them for validation."""
    end, most = int(len(stream) * (1 - val_ratio)), shared_tokens(max_tokens, val_ratio)
    train, val = (len(stream) if share is None else share for share in most)
    return stream.part(0, min(end, train)), stream.part(end, min(len(stream), end + val))


def synthetic(
    *,
    pattern: Annotated[
        str,
        choice(
            "markov: four successors per id; copy: blocks of 16 random ids, each twice",
            "markov | copy",
        ),
    ],
    n_tokens: Annotated[int, knob("tokens in all, training and validation", 1_000_000, at_least=2)],
    n_ids: Annotated[
        int | None,
        knob("token ids in use, 0 to n_ids - 1; null: the whole vocabulary", 64, at_least=4),
    ],
    val_ratio: DataKnobs.val_ratio,
    seed: DataKnobs.seed,
    vocab_size: int,
) -> Corpus:
    """Return a stream that can be learned, of known entropy, made in memory: no files.

    markov: a first-order chain. Each id has four successors, with probabilities 0.7, 0.1, 0.1, 0.1:
    the best possible loss is 0.940 nats per token. copy: blocks of 16 random ids, each block twice:
    a model that looks back 16 tokens gets to ln(n_ids) / 2.
    """
    ids = vocab_size if n_ids is None else n_ids
    if not 4 <= ids <= vocab_size:
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
    else:
        period = 16
        blocks = (rng.random((-(-n_tokens // (2 * period)), period)) * ids).astype(np.int64)
        stream = np.repeat(blocks, 2, axis=0).reshape(-1)[:n_tokens]
        nats = math.log(ids) / 2
    kept = stream.astype(np.uint16 if ids <= 1 << 16 else np.uint32)
    end = int(n_tokens * (1 - val_ratio))
    train, val = TokenStream([kept[:end]]), TokenStream([kept[end:]])
    best = f"best possible loss {nats:.3f} nats per token"
    description = f"synthetic {pattern} over {ids} ids, {best}"
    fingerprint = {"content": sample_digest(TokenStream([kept])), "val_ratio": val_ratio}
    return Corpus(train, val or None, description, fingerprint, has_documents=False)


def _overlap(train: dict[str, Path], val: dict[str, Path]) -> tuple[str, ...]:
    """Return a warning where files (content -> path) are in both, whatever their names."""
    shared = sorted(str(val[content]) for content in train.keys() & val.keys())
    if not shared:
        return ()
    files = f"{plural(len(shared), 'file')} of data.val_files, such as {shared[0]},"
    verb = "are" if len(shared) > 1 else "is"
    return (f"{files} {verb} in data.train_files too; leave what is in both out of one of them",)
