from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmexp.compare.document import Cell, Row, Section
from llmexp.compare.page import number_cells, runs
from llmexp.compare.records import Record, Result
from llmexp.features.clip_table.compare import declared
from llmexp.system.text import shown

NAMES = {
    "grad_entry_max": "largest entry",
    "attention_logit_max": "largest logit",
    "clip_limit": "moving limit",  # of the norm, and has none itself
}


def section(c: Result) -> Section:
    """Return how often each run was clipped, and how often other limits would have clipped it."""
    found = [(*run, seen) for run in runs(c) for seen in looked_at(run[2])]
    most = max((len(seen.get("table", ())) for *_, (_, _, seen) in found), default=0)
    heads = ["Run", "Measure", "Limit", "Share clipped", "Median", "90 %", "99 %"]
    rows = []
    for colour, name, _, (what, limit, seen) in found:
        at = [seen.get("quantiles", {}).get(q) for q in ("50", "90", "99")]
        cells = [Cell(what), *number_cells(limit, seen.get("share"), *at)]
        for other in seen.get("table", ()):
            cells.append(Cell(": ".join(shown(other[key], 3) for key in ("limit", "share"))))
        rows.append(Row(colour, name, cells))
    text = (
        "Shares of steps, or of units, tensors or heads, that were clipped. Those at other limits "
        "are for the norms that the run has seen; under another limit it would have trained "
        "differently."
    )
    heads += ["At another limit"] * most
    return Section("clip", "Gradient clipping", (), heads, rows, text, folded=True)


def looked_at(record: Record) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield what the rules of a run look at, its limit, and what status.json has of it.

    That is the share that was clipped, quantiles, and a table of other limits. The norm is first.
    """
    rule, clip = declared(record), record.status.get("clip", {})
    if clip and rule.by_steps:
        yield "norm", record.config.get(f"clip.{rule.limit}"), clip
    elif clip:
        yield "norm", None, {**clip, "share": None}
    for key, found in clip.get("measures", {}).items():
        name, _, pattern = key.partition("/")
        words = f"norm of {pattern}" if pattern else NAMES.get(name, name)
        if name == "clip_limit":
            found = {"quantiles": found.get("quantiles", {})}
        yield words, found.get("limit"), found
