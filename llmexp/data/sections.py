"""The knobs of data=corpus, checked: its sources, validation sets and stages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmexp.data.remote import RemoteCache, match_places
from llmexp.data.work import TRAIN, Source
from llmexp.settings.convert import convert_section, convert_value
from llmexp.settings.values import ConfigError, Knob, knob, refuse, typed

TAKEN = {TRAIN: "the training split", "ema": "the average of the weights (train.ema)"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
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


def read_sources(
    sections: Mapping[str, Any],
    shares: Sequence[tuple[str, float]],
    skip: bool,
    remote: RemoteCache,
) -> list[Source]:
    """Return the sources, each with its weight, or all without. Raises ConfigError."""
    if not isinstance(sections, Mapping) or not sections:
        example = "data.sources.web.files=corpus/*.jsonl"
        raise ConfigError(f"data.sources: name one source at least; for example {example}")
    found = []
    for name, value in sections.items():
        key = _key("data.sources", name, value)
        given = convert_section(SourceKnobs, value, f"{key}.")
        source = _source(name, key, given, skip, remote)
        found.append(replace(source, shares=tuple(shares), weight=given.weight))
    weights = {source.name: source.weight for source in found}
    missing = [name for name, weight in weights.items() if weight is None]
    if missing and len(missing) < len(found):
        way = "give all sources a weight, or none (then each counts by its tokens)"
        text = f"the other sources have weights, this one has none; {way}"
        raise ConfigError(f"data.sources.{missing[0]}.weight: {text}")
    if not missing and not any(weights.values()):
        raise refuse(f"data.sources.{found[0].name}.weight", 0, "all weights are 0", 1)
    return found


def read_validation(
    sections: Mapping[str, Any], skip: bool, remote: RemoteCache
) -> tuple[list[Source], list[tuple[str, float]]]:
    """Return the validation sets with files of their own, and the shares of the others."""
    if not isinstance(sections, Mapping):
        raise refuse("data.val", sections, "named sets are needed", "{}")
    held_out, shares = [], []
    for name, value in sections.items():
        key = _key("data.val", name, value)
        given = convert_section(ValidationKnobs, value, f"{key}.")
        if name in TAKEN:
            raise ConfigError(f"{key}: is the name of {TAKEN[name]}; choose another one")
        if given.share is None:
            held_out.append(replace(_source(name, key, given, skip, remote), held_out=True))
            continue
        if other := next((k for k, v in vars(given).items() if k != "share" and v is not None), ""):
            text = "a validation set is a share of the sources, or has files of its own"
            raise ConfigError(f"{key}: has share and {other}; {text}")
        shares.append((name, given.share))
    if (total := sum(share for _, share in shares)) >= 1:
        raise ConfigError(f"data.val: the shares add up to {total:g}; nothing is left to train on")
    return held_out, shares


def _key(parent: str, name: Any, value: Any) -> str:
    """Return the key of a named section. Raises ConfigError for a wrong name, or no section."""
    key = f"{parent}.{name}"
    if NAME.fullmatch(str(name)) is None:
        text = "a name has letters, digits, - and _, at most 40; for example web"
        raise ConfigError(f"{key}: {text}")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value}: keys are needed; for example {key}.files=corpus/*.jsonl")
    return key


def _source(name: str, key: str, given: PlaceKnobs, skip: bool, remote: RemoteCache) -> Source:
    plain = bool(given.plain)
    source = Source(name, key, given.text_key or "text", skip_bad=skip, plain=plain)
    if (given.files is None) == (given.hf is None):
        example = f"{key}.files=corpus/*.jsonl"
        raise ConfigError(f"{key}: either files or hf is needed; for example {example}")
    if plain and (other := "hf" if given.hf else "text_key" if given.text_key else ""):
        raise refuse(f"{key}.plain", True, f"does nothing beside {other}; leave one of them out")
    if given.hf is not None:
        return replace(source, key=f"{key}.hf", hf=given.hf, split=given.split or TRAIN)
    if given.split is not None:
        raise refuse(f"{key}.split", given.split, "belongs to hf, and the source has files")
    left = list[str]()
    places = match_places(f"{key}.files", given.files, remote, left)
    return replace(source, key=f"{key}.files", files=tuple(places), left_out=tuple(left))


def main_set(given: str | None, names: list[str]) -> str | None:
    """Return the name of the validation set that val/loss is of: the first by default."""
    if given is None:
        return names[0] if names else None
    if given not in names:
        known = ", ".join(names) or "none is given"
        raise refuse("data.val_main", given, f"there is no such validation set; known: {known}")
    return given


def read_stages(
    stages: Sequence[Mapping[str, Any]], names: list[str], sequence_length: int
) -> dict[int, dict[str, float]]:
    """Return the weights by the first sequence of the run that they count for."""
    like = [{"from_tokens": 1000000, "weights": dict.fromkeys(names, 0.5)}]
    try:
        given_stages: list[StageKnobs] = convert_value(
            list[StageKnobs], stages, "data.stages", Knob("", like)
        )
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
        raise ConfigError(text, error.key, error.code) from None
    found: dict[int, dict[str, float]] = {}
    for number, (given, weights) in enumerate(zip(given_stages, weights_of, strict=True)):
        key = f"data.stages.{number}"
        if set(weights) != set(names):
            text = f"each source needs a weight: {', '.join(names)}; 0 leaves it out"
            raise refuse(f"{key}.weights", given.weights, text)
        start = -(-given.from_tokens // sequence_length)
        if not any(weights.values()):
            raise refuse(f"{key}.weights", given.weights, "one weight must be above 0")
        if found and start <= max(found):
            text = "stages stand in order; the one before begins there or later"
            raise refuse(f"{key}.from_tokens", given.from_tokens, text)
        found[start] = {name: weights[name] for name in names}
    return found
