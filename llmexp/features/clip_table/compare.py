from __future__ import annotations

from llmexp.compare.records import Column, Record
from llmexp.config.clipping import ClipRule
from llmexp.config.sections import CLIP_RULES
from llmexp.system.text import number

COLUMNS = (
    Column("clip_fraction", "share clipped", "", 3),
    Column("clipped_heads", "heads clipped", "", 3),
)


def figures(record: Record) -> dict[str, float | None]:
    """Return the shares that were clipped: of what the rule of the run clips, and of heads."""
    measures, units = record.status.get("clip", {}).get("measures", {}), declared(record).units
    whole = {"share": number(record.summary.get("clip_fraction"))}
    found = {"clip_fraction": measures.get(units, {}) if units else whole}
    found["clipped_heads"] = measures.get("heads", {})
    return {key: one.get("share") for key, one in found.items()}


def declared(record: Record) -> ClipRule:
    """Return the rule of a run; one that is not known clips steps."""
    return CLIP_RULES.get(str(record.config.get("clip.kind", "norm")), ClipRule())
