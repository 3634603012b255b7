"""Make the sources of documents that a data section names into a `Corpus`.

`corpus` is data=corpus: named sources, mixed by weight, with named validation sets. Each source is
prepared on its own, so another mixture of the same sources prepares nothing. data=text and
data=stdlib (in `sources`) are a corpus of one source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from llmexp.data.cache import cache_folder
from llmexp.data.matching import left_out_text
from llmexp.data.mixture import Mixture
from llmexp.data.overlap import warnings_of
from llmexp.data.prepared import SourceShards, StaleCache, prepare_sources
from llmexp.data.remote import RemoteCache, Unreachable
from llmexp.data.sections import main_set, read_sources, read_stages, read_validation
from llmexp.data.stream import Corpus, TokenStream
from llmexp.data.tokenizers import Tokenizer
from llmexp.data.work import TRAIN, Source, refuse_shared_files, works_of
from llmexp.settings.parts import DataKnobs
from llmexp.settings.values import ConfigError, knob


def corpus(  # noqa: PLR0913 (its knobs)
    *,
    sources: Annotated[
        Any,
        knob(
            "needed: NAME: {files: web/*.jsonl.zst, weight: 0.7, text_key: text}, or hf: in place "
            "of files"
        ),
    ],
    val: Annotated[
        Any,
        knob("NAME: {files: ...}, or NAME: {share: 0.01} of the documents of all sources"),
    ],
    val_main: Annotated[
        str | None, knob("the validation set that val/loss is of; null: the first", "web")
    ],
    stages: Annotated[
        Any,
        knob(
            "[{from_tokens: 1000000, weights: {web: 0.5, code: 0.5}}]: other weights from there on"
        ),
    ],
    max_epochs: DataKnobs.max_epochs,
    on_bad_record: DataKnobs.on_bad_record,
    cache_dir: DataKnobs.cache_dir,
    tokenizer: Tokenizer,
    sequence_length: int,
    ask_again: bool = False,
) -> Corpus:
    """Return the documents of several sources, mixed by weight.

    `sources`: name -> files (paths, globs or addresses) or hf (a folder of save_to_disk, or a name
    on the hub), text_key, weight. `val`: name -> files or hf, or share: so much of the documents of
    all sources. `stages`: [{from_tokens, weights}], each replaces the weights from there on.
    Buckets and the hub are asked where shards are missing, or with `ask_again`. Raises ConfigError.
    """
    data: dict[str, Any] = {"sources": sources, "val": val, "val_main": val_main}
    data |= {"stages": stages, "max_epochs": max_epochs, "on_bad_record": on_bad_record}
    cache = cache_folder(cache_dir)

    def made(anew: bool) -> Corpus:
        return _corpus(data, tokenizer, sequence_length, RemoteCache(cache, anew))

    try:
        return made(ask_again)
    except StaleCache:
        return made(True)
    except Unreachable as error:
        if not ask_again:
            raise
        try:
            found = made(False)
        except StaleCache:
            raise error from None
        return replace(found, description=f"{found.description}; not asked now: {error}")


def corpus_sources(
    remote: RemoteCache, *, sources: Any, val: Any, on_bad_record: Any, **_: Any
) -> list[Source]:
    """Return the sources that the knobs of data=corpus name. Raises ConfigError."""
    skip = on_bad_record == "skip"
    held_out, shares = read_validation(val, skip, remote)
    return [*read_sources(sources, shares, skip, remote), *held_out]


def _corpus(
    data: Mapping[str, Any], tokenizer: Tokenizer, length: int, remote: RemoteCache
) -> Corpus:
    chosen = corpus_sources(remote, **data)
    sources, names = [s for s in chosen if not s.held_out], list(data["val"])
    main = main_set(data["val_main"], names)
    mixed = read_stages(data["stages"], [source.name for source in sources], length)
    works = works_of(chosen, tokenizer, remote)
    refuse_shared_files(works)
    weights = {source.name: source.weight for source in sources if source.weight is not None}
    ready, ready_val = prepare_sources(works, remote)
    left = "".join(left_out_text(source.left_out, f" of {source.key}") for source in chosen)
    texts = {name: _texts(name, ready, ready_val) for name in names}
    stages = ([weights] if weights else []) + list(mixed.values())
    # A source without a weight anywhere is held out as a whole: its shares are validated.
    trained = {
        name: one
        for name, one in ready.items()
        if not weights or any(stage[name] for stage in stages)
    }
    streams = {name: one.streams[TRAIN] for name, one in trained.items()}
    for name, stream in streams.items():
        _check_fills(f"data.sources.{name}", stream, length, "training tokens")
    # Without weights each source comes as often as it has sequences.
    even = {name: float(stream.n_sequences(length)) for name, stream in streams.items()}
    val_sets = {}
    for name in names:
        if name in ready_val:
            val_sets[name] = ready_val[name].streams[TRAIN]
        else:
            val_sets[name] = TokenStream.joined([one.streams[name] for one in ready.values()])
        _check_fills(f"data.val.{name}", val_sets[name], length, "tokens")
    lengths = {name: len(stream) for name, stream in streams.items()}
    return Corpus(
        train=TokenStream.joined(list(streams.values())),
        val=val_sets[main] if main else None,
        description=_description(ready, list(trained), remote) + left,
        fingerprint={
            "tokenizer": tokenizer.name,
            "tokenizer_sha256": tokenizer.identity,
            "sources": {name: one.content for name, one in ready.items()},
            "val_sets": {name: one.content for name, one in ready_val.items()},
            "val_files": texts[main] if main else {},
        },
        is_text=True,
        mixed=Mixture(lengths, {0: weights or even} | mixed, data["max_epochs"]),
        val_sets=val_sets,
        val_texts=texts,
        table=[*_table(ready, TRAIN), *_table(ready_val, "validation")],
        warnings=warnings_of(trained, ready_val, remote),
    )


def _check_fills(key: str, stream: TokenStream, length: int, what: str) -> None:
    if stream.n_sequences(length) < 1:
        text = f"{len(stream):,} {what} do not fill one sequence"
        raise ConfigError(f"{key}: {text}; batch.sequence_length={length} needs {length + 1:,}")


def _description(ready: Mapping[str, SourceShards], trained: list[str], remote: RemoteCache) -> str:
    parts = [f"{name} {len(ready[name].streams[TRAIN]):,} tokens" for name in trained]
    bad = sum(one.counts.bad for one in ready.values())
    text = f"corpus of {', '.join(parts)}"
    text += "".join(f"; {name} has weight 0" for name in ready if name not in trained)
    if bad:
        records = (
            "record that cannot be read was" if bad == 1 else "records that cannot be read were"
        )
        text += f"; {bad:,} {records} left out"
    commits = {one.work.source.hf: one.work.source.revision for one in ready.values()}
    text += "".join(f"; {name} at {commit[:12]}" for name, commit in commits.items() if commit)
    if remote.remembered:
        day = min(remote.remembered.values())
        text += f"; buckets and hub as they were on {day} (llmexp prepare asks again)"
    return text


def _texts(
    name: str, ready: Mapping[str, SourceShards], ready_val: Mapping[str, SourceShards]
) -> dict[str, str]:
    """Return what identifies the text of a validation set."""
    if name in ready_val:
        return {name: ready_val[name].work.text_digest}
    found = {source: one.work.text_digest for source, one in ready.items()}
    shares = next(iter(ready.values())).work.source.shares
    at = [other for other, _ in shares].index(name)
    return found | {"shares": str([share for _, share in shares[: at + 1]])}


def _table(sources: Mapping[str, SourceShards], whole: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each split of each source, for the table of `llmexp prepare`.

    `whole`: the name of the split that is no share.
    """
    for name, one in sources.items():
        for split, stream in one.streams.items():
            tokens, first = len(stream), split == TRAIN
            yield {
                "source": name,
                "split": whole if first else split,
                "files": len(one.work.source.files),
                "hf": one.work.source.hf,  # in place of files
                "documents": one.documents[split],
                "tokens": tokens,
                "bytes_per_token": one.text_bytes[split] / tokens if tokens else None,
                "empty": one.counts.empty if first else 0,  # of the whole source
                "bad": one.counts.bad if first else 0,
            }
