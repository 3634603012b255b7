"""Tell what the rules of clipping did, each by what it clips: steps, units, tensors or heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmexp.compare.records import Record, Setting
from llmexp.settings.clipping import BY_NORM, MOVING
from llmexp.settings.labels import short_value

# In the order in which a table of rules shows them.
CLIP_COLUMNS = ("clipped_share", "clip limit", "clipped_heads")
_LIMITS = {"norm": "max_norm", "value": "max_value", "adaptive": "ratio", "update": "threshold"}
_UNITS = {"adaptive": "units", "update": "tensors"}  # of rules that clip no whole steps
_NAMES = {"grad_entry_max": "largest entry", "attention_logit_max": "largest logit"}


def looked_at(record: Record) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield what the rules of a run look at, its limit, and what status.json has of it.

    That is the share that was clipped, quantiles, and a table of other limits. The norm is first.
    """
    if clip := record.status.get("clip", {}):
        by_steps = _kind(record) in ("none", "per_group", *BY_NORM)
        yield "norm", *((_limit(record), clip) if by_steps else ("", {**clip, "share": None}))
    for key, found in clip.get("measures", {}).items():
        name, _, pattern = key.partition("/")
        if name == "clip_limit":  # of the norm, and has none itself
            yield "moving limit", "", {"quantiles": found.get("quantiles")}
            continue
        words = f"norm of {pattern}" if pattern else _NAMES.get(name, name)
        yield words, _text(found.get("limit")), found


def clip_columns(settings: Sequence[Setting]) -> dict[str, tuple[str, list[str], list[Any]]]:
    """Return title, texts and values of columns that say in words what was clipped.

    There are none where all rules are of a fixed norm: the share of steps says it all.
    """
    found: dict[str, tuple[str, list[str], list[Any]]] = {}
    runs = [r for e in settings for r in e.runs]
    if any(_kind(r) not in ("norm", "none") for r in runs):
        units = [_UNITS.get(_kind(e.runs[0]), "steps") for e in settings]
        shares = [_share(*pair) for pair in zip(settings, units, strict=True)]
        texts = [percent(*pair) for pair in zip(shares, units, strict=True)]
        limits = [_limit(e.runs[0]) for e in settings]
        found[CLIP_COLUMNS[0]] = ("clipped", texts, shares)
        found[CLIP_COLUMNS[1]] = ("limit", limits, limits)
    if any(r.config.get("clip.qk_limit") for r in runs):
        shares = [_share(e, "heads") for e in settings]
        found[CLIP_COLUMNS[2]] = ("heads clipped", [percent(s) for s in shares], shares)
    return found


def percent(share: float | None, units: str = "") -> str:
    if share is None:
        return ""
    text = f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"
    return f"{text} {units}".rstrip()


def _share(setting: Setting, what: str) -> float | None:
    """Return the mean share that was clipped of a setting's steps, units, tensors or heads."""
    if what == "steps":
        return setting.figures.get("clipped_share")
    measured = [r.status.get("clip", {}).get("measures", {}) for r in setting.runs]
    shares = [one.get(what, {}).get("share") for one in measured]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _kind(record: Record) -> str:
    return str(record.config.get("clip.kind", "norm"))


def _limit(record: Record) -> str:
    """Return the limit of a run's rule as text, empty where it has none."""
    kind = _kind(record)
    if key := _LIMITS.get(kind):
        return _text(record.config.get(f"clip.{key}"))
    return "moving" if kind in MOVING else "by group" if kind == "per_group" else ""


def _text(limit: Any) -> str:
    return "" if limit is None else short_value(limit)
