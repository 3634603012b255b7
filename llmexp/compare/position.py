"""Find the position, in tokens, steps or seconds, at which the losses of several runs are compared.

A validation loss belongs to the position at which it was measured. So the runs are compared at the
last position at which each of them was evaluated, to a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmexp.compare.records import Record
from llmexp.compare.rows import elapsed
from llmexp.run.stages import recorded_stages, stage_at
from llmexp.system.text import number

ROWS = {"tokens": "tokens_seen", "steps": "step"}  # the key of the rows that an axis goes along


@dataclass(frozen=True)
class Position:
    """The position where losses are read, in tokens, steps or seconds."""

    at: float
    slack: float  # a validation loss counts that was measured at most so far before


def positions(record: Record, align: str) -> np.ndarray:
    """Return the position of each row in target tokens, steps, or seconds of training.

    Empty where it is not known; of a fork with what its parents had. Document masks hide other
    targets in each mixture: there it is in tokens read.
    """
    parent = record.parent
    if align == "time":
        own = elapsed(record.columns, number(parent.get("step")) or 0.0)
        return own + (time_before(record) or 0.0)
    facts, length = record.facts, record.facts.get("sequence_length")
    most = facts.get("max_tokens") if "stages" in facts or facts.get("real_batch_size") else None
    if align == "tokens" and length and most and record.config.get("batch.document_mask"):
        stages, steps = recorded_stages(facts), record.columns["step"].astype(int)
        at = np.array([stage_at(stages, step).sequences_at(step) for step in steps])
        own = (at - stages[0].first_sequence) * length
        return np.minimum((number(parent.get("tokens")) or 0.0) + own, most)
    return record.columns.get(ROWS[align], np.zeros(0))


def time_before(record: Record) -> float | None:
    """Return the seconds of training of a fork's parents, as far as it has their rows."""
    before = elapsed(record.before) if record.before else np.zeros(0)
    return float(before[-1]) if len(before) else None


def rows_until(where: np.ndarray, at: float) -> int:
    """Return how many rows stand at or before the position."""
    return int(np.searchsorted(where, at * (1 + 1e-9), side="right"))


def evaluations(record: Record, align: str) -> np.ndarray:
    """Return the positions at which the run has a validation loss."""
    where, values = positions(record, align), record.columns.get("val/loss", np.zeros(0))
    return where[: len(values)][np.isfinite(values[: len(where)])]


def begins_after(record: Record, align: str, at: float) -> bool:
    """Tell whether a fork has no row of its own up to the position."""
    return bool(record.parent) and not rows_until(positions(record, align), at)


def common_position(records: Sequence[Record], align: str, metric: str) -> Position | None:
    """Return where the metric of all runs is read; None where there is no such position.

    For a figure of validation it is the last position at which all runs that have evaluations were
    evaluated, to a step of the one with the longer steps. Over time, and for other figures, it is
    the end of the run that came no further.
    """
    places = [(positions(r, align), evaluations(r, align)) for r in records]
    ends = [float(np.nanmax(x)) if len(x) and x[-1] > 0 else np.inf for x, _ in places]
    if not np.isfinite(end := min(ends, default=np.inf)):
        return None
    if align == "time":
        return Position(end, end)
    # the length of an optimizer step, in what positions are counted in
    steps = [1.0 if align == "steps" else tokens_of_step(r) for r in records]
    if not metric.startswith(("val/", "final ", "best ")):
        return Position(end, max(steps))
    of_runs = [(x, step) for (_, x), step in zip(places, steps, strict=True) if len(x)]
    # runs without an evaluation so far
    most = min((e for e, (_, x) in zip(ends, places, strict=True) if not len(x)), default=np.inf)
    last = _last_common(of_runs, most)
    return last or (Position(end, 0.0) if np.isfinite(most) else None)


def tokens_of_step(record: Record) -> float:
    """Return the tokens of the longest steps of a run; 0 where they are not known."""
    per_step = number(record.facts.get("tokens_per_step")) or 0.0
    sizes = [stage["real_batch_size"] for stage in record.facts.get("stages") or ()]
    length = number(record.facts.get("sequence_length")) or 0.0
    return max([per_step, *(size * length for size in sizes)])


def _last_common(of_runs: Sequence[tuple[np.ndarray, float]], most: float) -> Position | None:
    """Return the last position up to `most` at which all runs were evaluated, to a step.

    None where there is none. `of_runs`: positions of evaluations, and the length of a step, of
    each run.
    """
    if not of_runs:
        return None
    several = np.unique(np.concatenate([where for where, _ in of_runs]))
    steps = np.array([step for _, step in of_runs])
    while count := int(np.searchsorted(several, most, side="right")):
        at = float(several[count - 1])
        rows = [rows_until(where, at) for where, _ in of_runs]
        if not all(rows):
            return None
        last = np.array([where[n - 1] for n, (where, _) in zip(rows, of_runs, strict=True)])
        if _alike(last, steps):
            return Position(at, at - float(last.min()))
        # the hindmost stays where it is until `most` falls below it: the others must come to it
        most = min(np.nextafter(at, -np.inf), float(last.min() + steps.max()))
    return None


def _alike(at: np.ndarray, steps: np.ndarray) -> bool:
    """Tell whether each two positions stand no further apart than the longer of their steps."""
    order = np.argsort(steps)
    at, steps = at[order], steps[order]  # each is held against those with shorter steps
    below, above = at - np.minimum.accumulate(at), np.maximum.accumulate(at) - at
    return bool(np.all(np.maximum(below, above) <= steps))
