from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from llmexp.compare.records import Column, Record, Result, Setting, alone
from llmexp.config.labels import plural
from llmexp.system.text import first_of

COLUMNS = (
    Column("spikes", "spikes", "lower"),
    Column("spike_tokens", "tokens in spikes", "lower"),
)
SPIKY = 3  # settings whose spikes are told


def figures(record: Record) -> dict[str, float | None]:
    """Return the figures of a run that its columns show."""
    found = record.status.get("spikes", {})
    return {column.key: found.get(column.key) for column in COLUMNS}


def notes(f: Result) -> Iterator[str]:
    """Tell the spikes of each setting that has any, those of the most spikes first."""
    spiky = [e for e in f.settings if e.figures.get("spikes")]
    spiky.sort(key=lambda e: -e.figures["spikes"])
    parts, columns = [], {k.key: k for k in f.columns}
    for e in spiky:
        several = len(e.runs) > 1
        part = f"{e.label} {alone(e, columns['spikes'])}{' a run' * several}"
        if e.figures.get("spike_tokens"):
            part += f", {alone(e, columns['spike_tokens'])} tokens until the loss was back"
        if first := rose_first_most(e):
            part += f", {first[0]} rose first most often"
            part += f" in {first[1]} of {plural(len(e.runs), 'run')}" * several
        parts.append(part)
    if parts:
        yield f"Spikes: {first_of(parts, SPIKY, '; ')}."


def values(setting: Setting, shown: dict[str, Any]) -> dict[str, Any]:
    """Return what `--json` has of a setting besides its figures; `shown`: those of all settings."""
    first = rose_first_most(setting)
    return {"rose_first": first[0] if first else None} if "spikes" in shown else {}


def rose_first_most(setting: Setting) -> tuple[str, int] | None:
    """Return the module that rose first most often in most runs, and how many these are."""
    spikes = (record.status.get("spikes", {}) for record in setting.runs)
    modules = (found.get("rose_first", {}).get("module") for found in spikes)
    return next(iter(Counter(filter(None, modules)).most_common(1)), None)
