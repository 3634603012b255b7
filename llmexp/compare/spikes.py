"""Say which settings spiked, where their runs have recorded it (`metrics.spikes`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from llmexp.compare.records import Record, Result, Setting
from llmexp.settings.labels import plural
from llmexp.system.text import as_dict, number

MOST = 3  # settings in a line


def spikes_of(record: Record) -> dict[str, float]:
    """Return the number of spikes, and the tokens until the loss was back; empty if unknown."""
    found = as_dict(record.status.get("spikes"))
    known = {key: number(found.get(key)) for key in ("spikes", "spike_tokens")}
    return {key: value for key, value in known.items() if value is not None}


def rose_first(setting: Setting) -> tuple[str, int] | None:
    """Return the module that rose first most often in most runs, and how many these are."""
    spikes = (as_dict(record.status.get("spikes")) for record in setting.runs)
    modules = (as_dict(found.get("rose_first")).get("module") for found in spikes)
    return next(iter(Counter(map(str, filter(None, modules))).most_common(1)), None)


def spiked(f: Result) -> Iterator[str]:
    """Tell the spikes of each setting that has any, those of the most spikes first."""
    spiky = [e for e in f.settings if e.figures.get("spikes")]
    spiky.sort(key=lambda e: -e.figures["spikes"])
    parts = []
    for e in spiky[:MOST]:
        several = len(e.runs) > 1
        part = f"{e.label} {e.figures['spikes']:.3g}{' a run' * several}"
        if tokens := e.figures.get("spike_tokens"):
            part += f", {tokens:,.0f} tokens until the loss was back"
        if first := rose_first(e):
            part += f", {first[0]} rose first most often"
            part += f" in {first[1]} of {plural(len(e.runs), 'run')}" * several
        parts.append(part)
    if parts:
        rest = f"; and {len(spiky) - MOST} more settings" * (len(spiky) > MOST)
        yield f"Spikes: {'; '.join(parts)}{rest}."
