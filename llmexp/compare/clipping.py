"""Tell what the rules of clipping did, each by what it clips: steps, units, tensors or heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmexp.compare.records import Record
from llmexp.settings.clipping import BY_NORM

_LIMITS = {"norm": "max_norm", "value": "max_value", "adaptive": "ratio", "update": "threshold"}
_UNITS = {"adaptive": "units", "update": "tensors"}  # of rules that clip no whole steps
_NAMES = {"grad_entry_max": "largest entry", "attention_logit_max": "largest logit"}
_NAMES["clip_limit"] = "moving limit"  # of the norm, and has none itself


def clipped(record: Record) -> dict[str, float | None]:
    """Return the shares that were clipped: of what the rule of the run clips, and of heads."""
    measures = record.status.get("clip", {}).get("measures", {})
    heads = {"clipped_heads": measures.get("heads", {}).get("share")}
    units = _UNITS.get(_kind(record))
    return heads | ({"clipped_share": measures.get(units, {}).get("share")} if units else {})


def looked_at(record: Record) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield what the rules of a run look at, its limit, and what status.json has of it.

    That is the share that was clipped, quantiles, and a table of other limits. The norm is first.
    """
    kind, clip = _kind(record), record.status.get("clip", {})
    if clip:
        by_steps = kind in ("none", "per_group", *BY_NORM)
        limit = record.config.get(f"clip.{_LIMITS.get(kind)}") if by_steps else None
        yield "norm", limit, clip if by_steps else {**clip, "share": None}
    for key, found in clip.get("measures", {}).items():
        name, _, pattern = key.partition("/")
        words = f"norm of {pattern}" if pattern else _NAMES.get(name, name)
        if name == "clip_limit":
            found = {"quantiles": found.get("quantiles", {})}
        yield words, found.get("limit"), found


def _kind(record: Record) -> str:
    return str(record.config.get("clip.kind", "norm"))
