"""data=corpus: named sources of documents, mixed by weight, with named validation sets.

Each source is prepared on its own, so another mixture of the same sources costs nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmexp.data.files import cache_folder
from llmexp.data.mixture import Mixed
from llmexp.data.places import is_remote, match_places
from llmexp.data.prepared import Prepared, prepare
from llmexp.data.readers import Counts
from llmexp.data.source import TRAIN, Source
from llmexp.data.stream import Corpus, TokenStream
from llmexp.data.tokenizers import Tokenizer, identity

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
PLACE_KEYS = ("files", "hf", "split", "text_key")


def corpus(  # noqa: PLR0913 (its knobs)
    *,
    sources: Mapping[str, Any],
    val: Mapping[str, Any],
    val_main: str | None,
    stages: Sequence[Mapping[str, Any]],
    max_epochs: float | None,
    on_bad_record: str,
    cache_dir: str | None,
    tokenizer: Tokenizer,
    sequence_length: int,
    write: bool = True,
) -> Corpus:
    """Documents of several sources, mixed by weight.

    `sources`: name -> files (paths, globs or addresses) or hf (a folder of save_to_disk, or a name
    on the hub), text_key, weight. `val`: name -> files or hf, or share: so much of the documents of
    all sources, chosen by their content. `stages`: [{from_tokens, weights}], each replaces the
    weights from there on. Raises ValueError.
    """
    _check_kinds(val, stages, on_bad_record)
    skip_bad = on_bad_record == "skip"
    chosen, weights = _sources(sources)
    held_out, shares = _validation(val)
    main = _main(val_main, list(val))
    mixed = _stages(stages, list(chosen), sequence_length)
    chosen = {name: replace(source, shares=shares) for name, source in chosen.items()}
    _refuse_shared_files([*chosen.values(), *held_out.values()])
    cache = cache_folder(cache_dir)
    ready, ready_val = (
        {name: prepare(source, skip_bad, tokenizer, cache, write) for name, source in some.items()}
        for some in (chosen, held_out)
    )
    streams = {name: one.streams[TRAIN] for name, one in ready.items()}
    sequences = _check_lengths(streams, sequence_length)
    val_sets = _val_sets(list(val), ready, ready_val, sequence_length)
    return Corpus(
        train=TokenStream.joined(list(streams.values())),
        val=val_sets[main] if main else None,
        description=_description(ready),
        fingerprint={
            "tokenizer": tokenizer.name,
            "tokenizer_sha256": identity(tokenizer),
            "sources": {name: one.content for name, one in ready.items()},
            "val_sets": {name: one.content for name, one in ready_val.items()},
            "val_files": _main_texts(main, ready, ready_val, shares),
        },
        is_text=True,
        mixed=Mixed(
            {name: len(stream) for name, stream in streams.items()},
            # Without weights each source comes as often as it has sequences.
            {0: weights or sequences} | mixed,
            max_epochs,
        ),
        val_sets=val_sets,
        table=[*_table(ready, TRAIN), *_table(ready_val, "validation")],
    )


def _check_kinds(val: Any, stages: Any, on_bad_record: Any) -> None:
    if not isinstance(val, Mapping):
        raise ValueError(f"data.val={val}: named sets are needed; for example data.val={{}}")
    if not isinstance(stages, Sequence) or isinstance(stages, str):
        raise ValueError(f"data.stages={stages}: a list is needed; for example data.stages=[]")
    if on_bad_record not in ("refuse", "skip"):
        raise ValueError(f"data.on_bad_record={on_bad_record}: must be refuse or skip")


def _check_lengths(streams: Mapping[str, TokenStream], length: int) -> dict[str, float]:
    """Return the sequences of each source. Raises ValueError where one has none."""
    for name, stream in streams.items():
        if stream.n_sequences(length) < 1:
            raise ValueError(
                f"data.sources.{name}: {len(stream):,} training tokens do not fill one sequence; "
                f"batch.sequence_length={length} needs {length + 1:,}"
            )
    return {name: float(stream.n_sequences(length)) for name, stream in streams.items()}


def _val_sets(
    names: Sequence[str],
    ready: Mapping[str, Prepared],
    ready_val: Mapping[str, Prepared],
    length: int,
) -> dict[str, TokenStream]:
    """Return the validation sets in the order of their names: of files of their own, or the shares
    of all sources."""
    found = {}
    for name in names:
        if name in ready_val:
            found[name] = ready_val[name].streams[TRAIN]
        else:
            found[name] = TokenStream.joined([one.streams[name] for one in ready.values()])
        if found[name].n_sequences(length) < 1:
            raise ValueError(
                f"data.val.{name}: {len(found[name]):,} tokens do not fill one sequence; "
                f"batch.sequence_length={length} needs {length + 1:,}"
            )
    return found


def _sources(sections: Mapping[str, Any]) -> tuple[dict[str, Source], dict[str, float] | None]:
    """Return the sources and their weights; None where none is given."""
    if not isinstance(sections, Mapping) or not sections:
        raise ValueError(
            "data.sources: name one source at least; for example "
            "data.sources.web.files=corpus/*.jsonl"
        )
    found: dict[str, Source] = {}
    weights: dict[str, float] = {}
    for name, value in sections.items():
        key = f"data.sources.{name}"
        section = _section(key, name, value, (*PLACE_KEYS, "weight"))
        found[name] = _source(key, section)
        if (weight := section.get("weight")) is not None:
            weights[name] = _number(f"{key}.weight", weight, "above 0", "0.5")
    if weights and (missing := [name for name in found if name not in weights]):
        raise ValueError(
            f"data.sources.{missing[0]}.weight: the other sources have weights, this one has none; "
            "give all sources a weight, or none (then each counts by its tokens)"
        )
    return found, weights or None


def _validation(
    sections: Mapping[str, Any],
) -> tuple[dict[str, Source], tuple[tuple[str, float], ...]]:
    """Return the validation sets with files of their own, and the shares of the others."""
    held_out, shares = {}, []
    for name, value in sections.items():
        key = f"data.val.{name}"
        section = _section(key, name, value, (*PLACE_KEYS, "share"))
        if name == TRAIN:
            raise ValueError(f"{key}: is the name of the training split; choose another one")
        if (share := section.get("share")) is None:
            held_out[name] = _source(key, section)
            continue
        if len(section) > 1:
            raise ValueError(
                f"{key}: has share and {next(k for k in section if k != 'share')}; "
                "a validation set is a share of the sources, or has files of its own"
            )
        shares.append((name, _number(f"{key}.share", share, "above 0 and below 1", "0.01")))
    if (total := sum(share for _, share in shares)) >= 1:
        raise ValueError(f"data.val: the shares add up to {total:g}; nothing is left to train on")
    return held_out, tuple(shares)


def _section(key: str, name: Any, value: Any, known: Sequence[str]) -> dict[str, Any]:
    if NAME.fullmatch(str(name)) is None:
        raise ValueError(f"{key}: a name has letters, digits, - and _, at most 40; for example web")
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}={value}: keys are needed; for example {key}.files=corpus/*.jsonl")
    for found in value:
        if found not in known:
            raise ValueError(f"{key}.{found}: there is no such key; known: {', '.join(known)}")
    return {str(found): item for found, item in value.items() if item is not None}


def _source(key: str, section: Mapping[str, Any]) -> Source:
    text_key = section.get("text_key", "text")
    if not isinstance(text_key, str) or not text_key:
        raise ValueError(
            f"{key}.text_key={text_key}: the name of a field is needed; for example "
            f"{key}.text_key=text"
        )
    if ("files" in section) == ("hf" in section):
        raise ValueError(
            f"{key}: either files or hf is needed; for example {key}.files=corpus/*.jsonl"
        )
    if "hf" in section:
        return Source(key, text_key, hf=str(section["hf"]), split=str(section.get("split", TRAIN)))
    if "split" in section:
        raise ValueError(f"{key}.split={section['split']}: belongs to hf, and the source has files")
    return Source(key, text_key, tuple(match_places(f"{key}.files", section["files"])))


def _number(key: str, value: Any, what: str, example: str) -> float:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not 0 < value < (1 if "below 1" in what else float("inf")):
        raise ValueError(f"{key}={value}: a number {what} is needed; for example {key}={example}")
    return float(value)


def _main(given: str | None, names: list[str]) -> str | None:
    if given is None:
        return names[0] if names else None
    if given not in names:
        known = ", ".join(names) or "none is given"
        raise ValueError(f"data.val_main={given}: there is no such validation set; known: {known}")
    return given


def _stages(
    stages: Sequence[Mapping[str, Any]], names: list[str], sequence_length: int
) -> dict[int, dict[str, float]]:
    """Return the weights by the first sequence of the run that they count for."""
    found: dict[int, dict[str, float]] = {}
    example = "data.stages=[{from_tokens: 1000000, weights: {web: 0.5, code: 0.5}}]"
    for number, stage in enumerate(stages):
        key = f"data.stages[{number}]"
        if not isinstance(stage, Mapping) or set(stage) != {"from_tokens", "weights"}:
            raise ValueError(
                f"{key}={stage}: from_tokens and weights are needed; for example {example}"
            )
        tokens, weights = stage["from_tokens"], stage["weights"]
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(
                f"{key}.from_tokens={tokens}: a whole number above 0 is needed; for "
                f"example {example}"
            )
        if not isinstance(weights, Mapping) or set(weights) != set(names):
            raise ValueError(
                f"{key}.weights={weights}: each source needs a weight: "
                f"{', '.join(names)}; 0 leaves it out"
            )
        checked = {
            name: 0.0
            if weights[name] == 0
            else _number(f"{key}.weights.{name}", weights[name], "from 0", "0.5")
            for name in names
        }
        start = -(-tokens // sequence_length)
        if not any(checked.values()):
            raise ValueError(f"{key}.weights={weights}: one weight must be above 0")
        if found and start <= max(found):
            raise ValueError(
                f"{key}.from_tokens={tokens}: stages stand in order; the one before "
                "begins there or later"
            )
        found[start] = checked
    return found


def _refuse_shared_files(sources: Sequence[Source]) -> None:
    """Refuse a file that two sources read: it would count twice, or be trained and validated."""
    seen: dict[str, str] = {}
    for source in sources:
        hf = source.hf
        if hf is not None and os.path.isdir(hf):
            hf = os.path.realpath(hf)
        names = source.files or (f"{hf}, split {source.split}",)
        for name in names:
            real = name if source.hf or is_remote(name) else os.path.realpath(name)
            if real in seen:
                raise ValueError(
                    f"{source.key}: {name} is in {seen[real]} too; a file belongs to one source"
                )
            seen[real] = source.key


def _description(ready: Mapping[str, Prepared]) -> str:
    parts = [f"{name} {len(one.streams[TRAIN]):,} tokens" for name, one in ready.items()]
    bad = sum(one.counts.bad for one in ready.values())
    text = f"corpus of {', '.join(parts)}"
    if bad:
        records = (
            "record that cannot be read was" if bad == 1 else "records that cannot be read were"
        )
        text += f"; {bad:,} {records} left out"
    return text


def _main_texts(
    main: str | None,
    ready: Mapping[str, Prepared],
    ready_val: Mapping[str, Prepared],
    shares: Sequence[tuple[str, float]],
) -> dict[str, str]:
    """Return what identifies the text of the main validation set."""
    if main is None:
        return {}
    if main in ready_val:
        return {main: ready_val[main].key.text}
    at = [name for name, _ in shares].index(main)
    found = {name: one.key.text for name, one in ready.items()}
    return found | {"shares": str([share for _, share in shares[: at + 1]])}


def _table(sources: Mapping[str, Prepared], whole: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each split of each source, for the table of `llmexp prepare`. `whole`: what
    the split is called that is no share."""
    for name, one in sources.items():
        for split, stream in one.streams.items():
            tokens, first = len(stream), split == TRAIN
            yield {
                "source": name,
                "split": whole if first else split,
                "files": len(one.source.files),
                "documents": one.documents[split],
                "tokens": tokens,
                "bytes_per_token": one.text_bytes[split] / tokens if tokens else None,
                "empty": one.counts.empty if first else 0,  # of the whole source
                "bad": one.counts.bad if first else 0,
            }


def training_texts(
    sources: Mapping[str, Any], val: Mapping[str, Any], on_bad_record: str
) -> Iterator[str]:
    """Yield the training documents of all sources, one source after the other."""
    chosen, _ = _sources(sources)
    _, shares = _validation(val)
    for source in chosen.values():
        source = replace(source, shares=shares)
        for document in source.read(Counts(), on_bad_record == "skip"):
            if source.split_of(document.digest) == TRAIN:
                yield "".join(document.pieces)
