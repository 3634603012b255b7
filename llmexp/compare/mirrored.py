"""Give a tracker the answer of a sweep."""

from __future__ import annotations

from collections.abc import Callable

from llmexp.compare.records import Result
from llmexp.compare.table import columns_in_full
from llmexp.tracker.answer import SweepAnswer
from llmexp.tracker.wandb import MARKS


def mirrored(c: Result, page: Callable[[Result], str]) -> SweepAnswer:
    """Return the answer with a verdict for each run; `page` makes the page."""
    full = columns_in_full(c)
    table = {"name": full.pop("name")}
    for s in c.settings:
        row = {"mark": s.mark, "difference": s.apart, "half": s.half, "basis": s.basis}
        for head, value in (row | {"seeds": len(s.runs)}).items():
            table.setdefault(head, []).append(value)
    table |= {"state": full.pop("state")} | {k: v for k, v in full.items() if k != "path"}
    marks = {}
    for s in c.settings:
        for run in s.runs:
            figures = (None, None) if run.out else (s.apart, s.half)
            values = (run.out or s.mark or None, *figures)
            marks[run.path] = dict(zip(MARKS, values, strict=True))
    notes = "\n".join([c.headline, "", *(f"- {note}" for note in c.notes)])
    return SweepAnswer(notes.strip(), table, page(c), marks)
