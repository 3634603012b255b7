"""data=tokens: files of token ids that somebody else has prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from llmexp.config.labels import plural
from llmexp.config.values import choice, refuse
from llmexp.data.beside import refuse_tokenizer
from llmexp.data.cache import cache_folder, cached
from llmexp.data.files import allow_open_files, files_fingerprint
from llmexp.data.matching import left_out_text
from llmexp.data.sources.settings import Knobs
from llmexp.data.sources.shares import match_both, shared_tokens
from llmexp.data.stream import Corpus, TokenStream, check_ids, sample_digest
from llmexp.data.token_files import add_labels, documents_of, open_all
from llmexp.data.tokenizers.base import Tokenizer

FlatType = Annotated[
    str | None,
    choice(
        "type of the ids in a flat file, .bin or .npy without a header; null: uint16",
        "uint16 | int32 | uint32 | int64",
    ),
]


def tokens(
    *,
    train_files: Knobs.train_files,
    val_files: Knobs.val_files,
    dtype: FlatType,
    val_ratio: Knobs.val_ratio,
    max_tokens: Knobs.max_tokens,
    cache_dir: Knobs.cache_dir,
    vocab_size: int,
    sequence_length: int,
    train_labels: Knobs.train_labels = None,
    val_labels: Knobs.val_labels = None,
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
    paths = match_both(train_files, val_files, left)
    allow_open_files(sum(map(len, paths.values())))  # a map keeps its file open
    arrays = open_all(paths, dtype)
    if tokenizer is not None:
        for folder in {path.resolve().parent for path in arrays}:
            refuse_tokenizer(folder, tokenizer)
    # before the scan: from here on a change is noticed
    streams = [TokenStream([arrays[p] for p in some]) for some in paths.values()]
    # The content counts, at each start: a note by size and time misses a change that leaves both.
    digests = {p: sample_digest(TokenStream([a])) for p, a in arrays.items()}

    def scan() -> None:
        for path, array in arrays.items():
            check_ids(array, vocab_size, str(path))

    cached(cache, "ids", [vocab_size, [a.dtype.str for a in arrays.values()]], [*arrays], scan)
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
        raise refuse("too_little_data", "data.train_files", train_files, f"{text}; {needed}")
    description = f"{plural(len(arrays), 'token file')}, {len(train):,} training tokens"
    about, unmarked = documents_of(arrays, tokenizer, cache)
    content = {
        name: files_fingerprint({p: digests[p] for p in some})
        for name, some in (("train_files", train_paths), ("val_files", val_paths))
    }
    content |= labels | {"max_tokens": max_tokens, "val_ratio": None if val_paths else val_ratio}
    both = _overlap(*({digests[p]: p for p in some} for some in (train_paths, val_paths)))
    description += about + left_out_text(left)
    return Corpus(train, val or None, description, content, unmarked=unmarked, warnings=both)


def _split(
    stream: TokenStream, val_ratio: float, max_tokens: int | None
) -> tuple[TokenStream, TokenStream]:
    """Return the first tokens for training, and those after the share of them for validation."""
    end, most = int(len(stream) * (1 - val_ratio)), shared_tokens(max_tokens, val_ratio)
    train, val = (len(stream) if share is None else share for share in most)
    return stream.part(0, min(end, train)), stream.part(end, min(len(stream), end + val))


def _overlap(train: dict[str, Path], val: dict[str, Path]) -> tuple[str, ...]:
    """Return a warning where files (content -> path) are in both, whatever their names."""
    shared = sorted(str(val[content]) for content in train.keys() & val.keys())
    if not shared:
        return ()
    files = f"{plural(len(shared), 'file')} of data.val_files, such as {shared[0]},"
    verb = "are" if len(shared) > 1 else "is"
    return (f"{files} {verb} in data.train_files too; leave what is in both out of one of them",)
