"""Give a tracker the answer of a sweep."""

from __future__ import annotations

from collections.abc import Callable

from llmexp.compare.records import Comparison
from llmexp.compare.table import columns_in_full
from llmexp.tracker.answer import SweepAnswer
from llmexp.tracker.wandb import MARKS


def mirrored(c: Comparison, page: Callable[[Comparison], str]) -> SweepAnswer:
    """Return the answer with a verdict for each run; `page` makes the page."""
    full = columns_in_full(c)
    table = {"name": full.pop("name")}
    for part in ("mark", "difference", "half", "basis"):
        table[part] = [getattr(entry.standing, part) for entry in c.entries]
    table |= {"seeds": [len(entry.runs) for entry in c.entries]}
    table |= {"state": full.pop("state")} | {k: v for k, v in full.items() if k != "path"}
    marks = {}
    for entry in c.entries:
        standing = entry.standing
        for run in entry.runs:
            figures = (None, None) if run.out else (standing.difference, standing.half)
            values = (run.out or standing.mark or None, *figures)
            marks[run.path] = dict(zip(MARKS, values, strict=True))
    notes = "\n".join([c.headline, "", *(f"- {note}" for note in c.notes)])
    return SweepAnswer(notes.strip(), table, page(c), marks)
