"""data=corpus: documents of named sources, mixed by weight, with named validation sets.

Each source is prepared on its own, so another mixture of the same sources prepares nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from llmexp.config.convert import convert_section, convert_value
from llmexp.config.values import ConfigError, Knob, knob, refuse, typed
from llmexp.data.cache import cache_folder
from llmexp.data.matching import left_out_text
from llmexp.data.mixture import Mixture
from llmexp.data.prepared import StaleCache, prepare_sources, warnings_of
from llmexp.data.remote import RemoteCache, match_places
from llmexp.data.sources.settings import NAME, Knobs
from llmexp.data.stored import SourceShards
from llmexp.data.stream import Corpus, TokenStream
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.data.work import TRAIN, Source, refuse_shared_files, works_of
from llmexp.metrics.keys import OTHER_WEIGHTS

TAKEN = {TRAIN: "the training split"}
TAKEN |= {name: words for name, (words, _) in OTHER_WEIGHTS.items()}
MOST = 1e18  # of a weight: sums and products stay finite
WEIGHT = Knob("share in the mixture; 0 leaves the source out", at_least=0, at_most=MOST)


@dataclass(frozen=True)
class PlaceKnobs:
    files: Any = knob("paths, globs or addresses", default=None)
    hf: str | None = knob("a folder of save_to_disk, or a name on the hub", default=None)
    split: str | None = knob("of the dataset; null: train", "train", default=None)
    text_key: str | None = knob("the field with the text; null: text", "text", default=None)
    plain: bool | None = knob("each file is plain text, a document a file", True, default=None)


@dataclass(frozen=True)
class SourceKnobs(PlaceKnobs):
    weight: float | None = knob(WEIGHT.doc, 0.5, at_least=0, at_most=MOST, default=None)


@dataclass(frozen=True)
class ValidationKnobs(PlaceKnobs):
    share: float | None = knob("of the documents of all sources", 0.01, above=0, below=1,
                               default=None)  # fmt: skip


@dataclass(frozen=True)
class StageKnobs:
    from_tokens: int = knob("tokens before the stage", at_least=1)
    weights: dict[str, Any] = knob("a weight for each source")


@dataclass(frozen=True, kw_only=True)
class corpus:
    """The documents of several sources, mixed by weight.

    `sources`: name -> files (paths, globs or addresses) or hf (a folder of save_to_disk, or a name
    on the hub), text_key, weight. `val`: name -> files or hf, or share: so much of the documents of
    all sources. `stages`: [{from_tokens, weights}], each replaces the weights from there on.
    """

    sources: Annotated[
        Any,
        knob(
            "needed: NAME: {files: web/*.jsonl.zst, weight: 0.7, text_key: text}, or hf: in place "
            "of files"
        ),
    ]
    val: Annotated[
        Any,
        knob("NAME: {files: ...}, or NAME: {share: 0.01} of the documents of all sources"),
    ]
    val_main: Annotated[
        str | None, knob("the validation set that val/loss is of; null: the first", "web")
    ]
    stages: Annotated[
        Any,
        knob(
            "[{from_tokens: 1000000, weights: {web: 0.5, code: 0.5}}]: other weights from there on"
        ),
    ]
    max_epochs: Knobs.max_epochs
    on_bad_record: Knobs.on_bad_record
    cache_dir: Knobs.cache_dir

    def documents(self, remote: RemoteCache) -> list[Source]:
        """Return the sources that the knobs name. Raises ConfigError."""
        held_out, shares = self._validation(remote)
        return [*self._training(tuple(shares), remote), *held_out]

    def build(self, tokenizer: Tokenizer, sequence_length: int, ask_again: bool = False) -> Corpus:
        """Return the corpus, prepared. Raises ConfigError.

        Buckets and the hub are asked where shards are missing, or with `ask_again`.
        """
        cache = cache_folder(self.cache_dir)

        def made(anew: bool) -> Corpus:
            return self._made(tokenizer, sequence_length, RemoteCache(cache, anew))

        try:
            return made(ask_again)
        except StaleCache:
            return made(True)
        except ConfigError as error:
            if not ask_again or error.kind != "network":
                raise
            try:
                found = made(False)
            except StaleCache:
                raise error from None
            return replace(found, description=f"{found.description}; not asked now: {error}")

    def _made(self, tokenizer: Tokenizer, length: int, remote: RemoteCache) -> Corpus:
        chosen = self.documents(remote)
        sources, names = [s for s in chosen if not s.held_out], list(self.val)
        main = _main_set(self.val_main, names)
        mixed = _read_stages(self.stages, [source.name for source in sources], length)
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
        # Without weights each source comes as often as it has sequences.
        even = {name: float(stream.n_sequences(length)) for name, stream in streams.items()}
        val_sets = {
            name: ready_val[name].streams[TRAIN]
            if name in ready_val
            else TokenStream.joined([one.streams[name] for one in ready.values()])
            for name in names
        }
        for what, some in (("sources", streams), ("val", val_sets)):
            for name, stream in some.items():
                if stream.n_sequences(length) < 1:
                    kind = "training tokens" if what == "sources" else "tokens"
                    text = f"{len(stream):,} {kind} do not fill one sequence; "
                    text += f"batch.sequence_length={length} needs {length + 1:,}"
                    raise ConfigError("too_little_data", f"data.{what}.{name}: {text}")
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
            mixed=Mixture(lengths, {0: weights or even} | mixed, self.max_epochs),
            val_sets=val_sets,
            val_texts=texts,
            table=[*_table(ready, TRAIN), *_table(ready_val, "validation")],
            warnings=warnings_of(trained, ready_val, remote),
        )

    def _training(self, shares: tuple[tuple[str, float], ...], remote: RemoteCache) -> list[Source]:
        """Return the sources, each with its weight, or all without. Raises ConfigError."""
        if not isinstance(self.sources, Mapping) or not self.sources:
            example = "data.sources.web.files=corpus/*.jsonl"
            raise ConfigError(
                "missing_value", f"data.sources: name one source at least; for example {example}"
            )
        found = []
        for name, value in self.sources.items():
            key = _key("data.sources", name, value)
            given = convert_section(SourceKnobs, value, f"{key}.")
            source = self._source(name, key, given, remote)
            found.append(replace(source, shares=shares, weight=given.weight))
        weights = {source.name: source.weight for source in found}
        missing = [name for name, weight in weights.items() if weight is None]
        if missing and len(missing) < len(found):
            way = "give all sources a weight, or none (then each counts by its tokens)"
            text = f"the other sources have weights, this one has none; {way}"
            raise ConfigError("missing_value", f"data.sources.{missing[0]}.weight: {text}")
        if not missing and not any(weights.values()):
            raise refuse(
                "out_of_range", f"data.sources.{found[0].name}.weight", 0, "all weights are 0", 1
            )
        return found

    def _validation(self, remote: RemoteCache) -> tuple[list[Source], list[tuple[str, float]]]:
        """Return the validation sets with files of their own, and the shares of the others."""
        if not isinstance(self.val, Mapping):
            raise refuse("wrong_type", "data.val", self.val, "named sets are needed", "{}")
        held_out, shares = [], []
        for name, value in self.val.items():
            key = _key("data.val", name, value)
            given = convert_section(ValidationKnobs, value, f"{key}.")
            if name in TAKEN:
                raise ConfigError(
                    "conflict", f"{key}: is the name of {TAKEN[name]}; choose another one"
                )
            if given.share is None:
                held_out.append(replace(self._source(name, key, given, remote), held_out=True))
                continue
            if other := next(
                (k for k, v in vars(given).items() if k != "share" and v is not None), ""
            ):
                text = "a validation set is a share of the sources, or has files of its own"
                raise ConfigError("conflict", f"{key}: has share and {other}; {text}")
            shares.append((name, given.share))
        if (total := sum(share for _, share in shares)) >= 1:
            raise ConfigError(
                "out_of_range",
                f"data.val: the shares add up to {total:g}; nothing is left to train on",
            )
        return held_out, shares

    def _source(self, name: str, key: str, given: PlaceKnobs, remote: RemoteCache) -> Source:
        skip, plain = self.on_bad_record == "skip", bool(given.plain)
        source = Source(name, key, given.text_key or "text", skip_bad=skip, plain=plain)
        if (given.files is None) == (given.hf is None):
            example = f"{key}.files=corpus/*.jsonl"
            raise ConfigError(
                "missing_value" if given.files is None else "conflict",
                f"{key}: either files or hf is needed; for example {example}",
            )
        if plain and (other := "hf" if given.hf else "text_key" if given.text_key else ""):
            raise refuse(
                "idle_knob",
                f"{key}.plain",
                True,
                f"does nothing beside {other}; leave one of them out",
            )
        if given.hf is not None:
            return replace(source, key=f"{key}.hf", hf=given.hf, split=given.split or TRAIN)
        if given.split is not None:
            raise refuse(
                "idle_knob", f"{key}.split", given.split, "belongs to hf, and the source has files"
            )
        left = list[str]()
        places = match_places(f"{key}.files", given.files, remote, left)
        return replace(source, key=f"{key}.files", files=tuple(places), left_out=tuple(left))


def _key(parent: str, name: Any, value: Any) -> str:
    """Return the key of a named section. Raises ConfigError for a wrong name, or no section."""
    key = f"{parent}.{name}"
    if NAME.fullmatch(str(name)) is None:
        text = "a name has letters, digits, - and _, at most 40; for example web"
        raise ConfigError("wrong_type", f"{key}: {text}")
    if not isinstance(value, Mapping):
        raise ConfigError(
            "wrong_type", f"{key}={value}: keys are needed; for example {key}.files=corpus/*.jsonl"
        )
    return key


def _main_set(given: str | None, names: list[str]) -> str | None:
    """Return the name of the validation set that val/loss is of: the first by default."""
    if given is None:
        return names[0] if names else None
    if given not in names:
        known = ", ".join(names) or "none is given"
        raise refuse(
            "unknown_option",
            "data.val_main",
            given,
            f"there is no such validation set; known: {known}",
        )
    return given


def _read_stages(
    stages: Sequence[Mapping[str, Any]], names: list[str], sequence_length: int
) -> dict[int, dict[str, float]]:
    """Return the weights by the first sequence of the run that they count for."""
    like = [{"from_tokens": 1000000, "weights": dict.fromkeys(names, 0.5)}]
    try:
        given_stages = convert_value(list[StageKnobs], stages, "data.stages", Knob("", like))
        weights_of = [
            {
                str(name): convert_value(float, weight, f"data.stages.{n}.weights.{name}", WEIGHT)
                for name, weight in given.weights.items()
            }
            for n, given in enumerate(given_stages)
        ]
    except ConfigError as error:
        text, way = str(error), f"for example {typed('data.stages', like)}"
        text += "" if way in text else f"; {way}"
        raise ConfigError(error.kind, text, error.key) from None
    found: dict[int, dict[str, float]] = {}
    for number, (given, weights) in enumerate(zip(given_stages, weights_of, strict=True)):
        key = f"data.stages.{number}"
        if set(weights) != set(names):
            text = f"each source needs a weight: {', '.join(names)}; 0 leaves it out"
            raise refuse("missing_value", f"{key}.weights", given.weights, text)
        start = -(-given.from_tokens // sequence_length)
        if not any(weights.values()):
            raise refuse(
                "out_of_range", f"{key}.weights", given.weights, "one weight must be above 0"
            )
        if found and start <= max(found):
            text = "stages stand in order; the one before begins there or later"
            raise refuse("out_of_range", f"{key}.from_tokens", given.from_tokens, text)
        found[start] = {name: weights[name] for name in names}
    return found


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
