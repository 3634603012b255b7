"""The knobs of data=corpus, checked: its sources, validation sets and stages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmexp.data.places import Answers, match_places
from llmexp.data.source import TRAIN, Source
from llmexp.settings.values import refuse, typed

TAKEN = {TRAIN: "the training split", "ema": "the average of the weights (train.ema)"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
PLACE_KEYS = ("files", "hf", "split", "text_key")


def check_kinds(val: Any, stages: Any) -> None:
    if not isinstance(val, Mapping):
        raise refuse("data.val", val, "named sets are needed", "{}")
    if not isinstance(stages, Sequence) or isinstance(stages, str):
        raise refuse("data.stages", stages, "a list is needed", "[]")


def read_sources(
    sections: Mapping[str, Any], shares: Sequence[tuple[str, float]], skip: bool, answers: Answers
) -> dict[str, Source]:
    """Return the sources, each with its weight, or all without. Raises ValueError."""
    if not isinstance(sections, Mapping) or not sections:
        example = "data.sources.web.files=corpus/*.jsonl"
        raise ValueError(f"data.sources: name one source at least; for example {example}")
    found: dict[str, Source] = {}
    for name, value in sections.items():
        key = f"data.sources.{name}"
        section = _section(key, name, value, (*PLACE_KEYS, "weight"))
        weight = section.get("weight")
        if weight == 0 and not isinstance(weight, bool):
            weight = 0.0  # leaves the source out
        elif weight is not None:
            weight = _number(f"{key}.weight", weight, "from 0", "0.5")
        source = _source(key, section, answers)
        found[name] = replace(source, shares=tuple(shares), weight=weight, skip_bad=skip)
    weights = {name: source.weight for name, source in found.items()}
    missing = [name for name, weight in weights.items() if weight is None]
    if missing and len(missing) < len(found):
        way = "give all sources a weight, or none (then each counts by its tokens)"
        text = f"the other sources have weights, this one has none; {way}"
        raise ValueError(f"data.sources.{missing[0]}.weight: {text}")
    if not missing and not any(weights.values()):
        raise refuse(f"data.sources.{next(iter(found))}.weight", 0, "all weights are 0", 1)
    return found


def read_validation(
    sections: Mapping[str, Any], skip: bool, answers: Answers
) -> tuple[dict[str, Source], list[tuple[str, float]]]:
    """Return the validation sets with files of their own, and the shares of the others."""
    held_out, shares = {}, []
    for name, value in sections.items():
        key = f"data.val.{name}"
        section = _section(key, name, value, (*PLACE_KEYS, "share"))
        if name in TAKEN:
            raise ValueError(f"{key}: is the name of {TAKEN[name]}; choose another one")
        if (share := section.get("share")) is None:
            held_out[name] = replace(_source(key, section, answers), skip_bad=skip)
            continue
        if len(section) > 1:
            text = "a validation set is a share of the sources, or has files of its own"
            other = next(k for k in section if k != "share")
            raise ValueError(f"{key}: has share and {other}; {text}")
        shares.append((name, _number(f"{key}.share", share, "above 0 and below 1", "0.01")))
    if (total := sum(share for _, share in shares)) >= 1:
        raise ValueError(f"data.val: the shares add up to {total:g}; nothing is left to train on")
    return held_out, shares


def _section(key: str, name: Any, value: Any, known: Sequence[str]) -> dict[str, Any]:
    if NAME.fullmatch(str(name)) is None:
        raise ValueError(f"{key}: a name has letters, digits, - and _, at most 40; for example web")
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}={value}: keys are needed; for example {key}.files=corpus/*.jsonl")
    for found in value:
        if found not in known:
            raise ValueError(f"{key}.{found}: there is no such key; known: {', '.join(known)}")
    return {str(found): item for found, item in value.items() if item is not None}


def _source(key: str, section: Mapping[str, Any], answers: Answers) -> Source:
    text_key = section.get("text_key", "text")
    if not isinstance(text_key, str) or not text_key:
        raise refuse(f"{key}.text_key", text_key, "the name of a field is needed", "text")
    if ("files" in section) == ("hf" in section):
        example = f"{key}.files=corpus/*.jsonl"
        raise ValueError(f"{key}: either files or hf is needed; for example {example}")
    if "hf" in section:
        split = str(section.get("split", TRAIN))
        return Source(f"{key}.hf", text_key, hf=str(section["hf"]), split=split)
    if "split" in section:
        raise refuse(f"{key}.split", section["split"], "belongs to hf, and the source has files")
    places = match_places(f"{key}.files", section["files"], answers)
    return Source(f"{key}.files", text_key, tuple(places))


def _number(key: str, value: Any, what: str, example: str) -> float:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not 0 < value < (1 if "below 1" in what else float("inf")):
        raise refuse(key, value, f"a number {what} is needed", example)
    return float(value)


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
    found: dict[int, dict[str, float]] = {}
    stages_like = [{"from_tokens": 1000000, "weights": dict.fromkeys(names, 0.5)}]
    example = f"for example {typed('data.stages', stages_like)}"
    for number, stage in enumerate(stages):
        key = f"data.stages[{number}]"
        if not isinstance(stage, Mapping) or set(stage) != {"from_tokens", "weights"}:
            raise refuse(key, stage, f"from_tokens and weights are needed; {example}")
        tokens, weights = stage["from_tokens"], stage["weights"]
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            text = f"a whole number above 0 is needed; {example}"
            raise refuse(f"{key}.from_tokens", tokens, text)
        if not isinstance(weights, Mapping) or set(weights) != set(names):
            text = f"each source needs a weight: {', '.join(names)}; 0 leaves it out"
            raise refuse(f"{key}.weights", weights, text)
        checked = dict.fromkeys(names, 0.0)
        for name in names:
            if weights[name] != 0:
                checked[name] = _number(f"{key}.weights.{name}", weights[name], "from 0", "0.5")
        start = -(-tokens // sequence_length)
        if not any(checked.values()):
            raise refuse(f"{key}.weights", weights, "one weight must be above 0")
        if found and start <= max(found):
            text = "stages stand in order; the one before begins there or later"
            raise refuse(f"{key}.from_tokens", tokens, text)
        found[start] = checked
    return found
