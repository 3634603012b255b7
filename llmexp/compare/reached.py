"""Say how exactly it is known where runs reached a target, and how those count that did not."""

from __future__ import annotations

from collections.abc import Iterator

from llmexp.compare.records import REACHED, Result, listed
from llmexp.compare.target import UNITS, cap_of
from llmexp.settings.labels import plural
from llmexp.system.text import rounded


def reached(f: Result) -> Iterator[str]:
    """Say how exactly it is known where runs reached the target, and how the others count."""
    if f.target is None or not f.ranked:
        return
    unit, runs = UNITS[f.align], f.taking_part
    widths = [r.figures["target/by"] - r.figures["target/after"] for r in runs
              if "target/by" in r.figures]  # fmt: skip
    if widths:
        most = f"up to {rounded(max(widths))} {unit} apart"
        yield f"Between two evaluations, {most}, the target is placed by a straight line."
    if never := [f.label_of(r) for r in runs if r.figures.get(REACHED) == 0.0]:
        cap = rounded(cap_of(runs, f.align))
        yield (
            f"{len(never)} of {plural(len(runs), 'run')} never reached it ({listed(never)}); to "
            f"judge, all that had not by {cap} {unit}, where the first of them ends, count as if "
            "they had there."
        )
