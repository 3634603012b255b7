"""Select the runs that take part in a comparison; the others are left out and named with the
reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from llmexp.compare.figures import DEAD, counts, positions
from llmexp.compare.records import Record

APART = (
    "other task",
    "too short",
)  # why a run is left out that is none of the family of the others
MOVE_VALIDATION = (
    "data._target_",
    "data.files",
    "data.train_files",
    "data.val_files",
    "data.val_ratio",
    "data.seed",
)
# share of the median length below which a run of another sweep says nothing about the others
SHORT = 0.1


def left_out(records: Sequence[Record], align: str) -> dict[int, str]:
    """Return the runs that take no part, by their id, with the reason as a word or two.

    Runs that broke off, lost rows or were left out by successive halving never take part. Those
    that are unfinished do only while fewer than two runs have finished. A run of another validation
    text, or far shorter than the others and not of their sweep, would spoil the comparison of the
    rest.
    """
    reasons = {id(r): _broken(r) for r in records if not counts(r)}
    alive = [r for r in records if id(r) not in reasons]
    if sum(r.state == "finished" for r in alive) >= 2:
        reasons |= {id(r): r.state for r in alive if r.state != "finished"}
        alive = [r for r in alive if r.state == "finished"]
    tasks = Counter(task(r) for r in alive)
    ranked = tasks.most_common(2)
    if len(ranked) > 1 and ranked[0][1] > max(1, ranked[1][1]):
        reasons |= {id(r): APART[0] for r in alive if task(r) != ranked[0][0]}
        alive = [r for r in alive if id(r) not in reasons]
    return reasons | {id(r): APART[1] for r in _short(alive, align)}


def _broken(record: Record) -> str:
    if record.rung is not None:
        return f"out at {record.rung:.0%}"
    if record.state in DEAD:
        return record.state
    return "rows lost" if record.lost else "no rows"


def task(record: Record) -> str:
    """Return what the validation loss is measured on: the files, else all of the data section but
    what the sweep of the run varies and cannot move that text."""
    prints = record.facts.get("data_fingerprint")
    prints = prints if isinstance(prints, dict) else {}
    swept = [key for key in record.swept if key.startswith("data.") and key not in MOVE_VALIDATION]
    if prints.get("val_files"):
        found: object = prints["val_files"]
    else:
        found = sorted(
            (k, repr(v)) for k, v in record.config.items()
            if k.startswith("data.") and k not in (*swept, "data.cache_dir", "data.max_tokens")
        )  # fmt: skip
    return repr(found)


def _short(alive: Sequence[Record], align: str) -> list[Record]:
    """Find runs far shorter than the others, which their sweep does not make so on purpose, or that
    have just begun."""
    ends = {id(r): float(x[-1]) for r in alive if len(x := positions(r, align))}
    if len(ends) < 3:
        return []
    median = float(np.median(list(ends.values())))
    # One that ends before the others are first evaluated would leave nothing of them to read.
    first = float(
        np.median([f for r in alive if (f := _first_evaluation(r, align)) is not None] or [0.0])
    )
    short = [r for r in alive if ends.get(id(r), 0.0) < max(SHORT * median, min(first, median))]
    few = {id(r) for r in short}
    usual = {r.sweep for r in alive if id(r) not in few}
    begun = [r for r in short if r.state != "finished" and ends.get(id(r), 0.0) < SHORT * median]
    return begun + [
        r for r in short if r.state == "finished" and (r.sweep is None or r.sweep not in usual)
    ]


def _first_evaluation(record: Record, align: str) -> float | None:
    where, values = positions(record, align), record.columns.get("val/loss", np.zeros(0))
    known = np.flatnonzero(np.isfinite(values[: len(where)]))
    return float(where[known[0]]) if len(known) else None
