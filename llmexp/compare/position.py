"""Find the position, in tokens, steps or seconds, at which the losses of several runs are compared.

A validation loss belongs to the position at which it was measured. So the runs are compared at the
last position at which each of them was evaluated, to a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from llmexp.compare.reading import elapsed
from llmexp.compare.records import Record
from llmexp.run.stages import recorded_stages, stage_at

ROWS = {"tokens": "tokens_seen", "steps": "step"}  # the key of the rows that an axis goes along


@dataclass(frozen=True)
class Position:
    """The position where losses are read, in tokens, steps or seconds."""

    at: float
    slack: float  # a validation loss counts that was measured at most so far before


_KNOWN: WeakKeyDictionary[Record, dict[str, np.ndarray]] = WeakKeyDictionary()


def positions(record: Record, align: str) -> np.ndarray:
    """Return the position after each step, as `_positions` finds it once."""
    known = _KNOWN.setdefault(record, {})
    if align not in known:
        known[align] = _positions(record, align)
    return known[align]


def _positions(record: Record, align: str) -> np.ndarray:
    """Return the position after each step in target tokens, steps, or seconds of training.

    Empty where it is not known; of a fork with what its parents had. Document masks hide other
    targets in each mixture: there it is in tokens read. Seconds are known at rows, and all steps
    between two take equally long.
    """
    if record.foreign:
        return record.steps.get(align, np.zeros(0))
    parent, steps = record.parent, np.arange(1.0, record.step + 1)
    begin = parent.get("step", 0)
    if align == "time":
        own = np.append(0.0, elapsed(record.columns, begin)) + (time_before(record) or 0.0)
        known = np.append(begin, record.columns["step"])
        return np.interp(steps, known, own) if len(own) == len(known) else np.zeros(0)
    facts, length = record.facts, record.facts.get("sequence_length")
    most = (facts.get("stages") or facts.get("real_batch_size")) and facts.get("max_tokens")
    if align == "tokens" and length and most and record.config.get("batch.document_mask"):
        stages = recorded_stages(facts)
        knots = [stage.first_step for stage in stages]  # linear in between
        knots.append(max(knots[-1], record.step))
        at = [stage_at(stages, step).sequences_at(step) for step in knots]
        own = (np.interp(steps, knots, at) - at[0]) * length
        return np.minimum(parent.get("tokens", 0) + own, most)
    return steps if align == "steps" else record.steps.get("tokens", steps)


def of_rows(record: Record, align: str) -> np.ndarray:
    """Return the position of each row, empty where it is not known."""
    where, steps = positions(record, align), record.columns["step"]
    if align == "steps" and not record.foreign:
        return steps
    return where[np.clip(steps.astype(int), 1, len(where)) - 1] if len(where) else where


def time_before(record: Record) -> float | None:
    """Return the seconds of training of a fork's parents, as far as it has their rows."""
    before = elapsed(record.before)
    return float(before[-1]) if len(before) else None


def until(where: np.ndarray, at: float) -> int:
    """Return how many steps, or rows, stand at or before the position."""
    return int(np.searchsorted(where, at * (1 + 1e-9), side="right"))


def common_rows(records: Sequence[Record], align: str, keys: Iterable[str]) -> dict[Record, Record]:
    """Return runs with those values of keys alone that are of rows at which all have one.

    A row counts where each other run that came as far has one, to a step; so does a run's last one.
    Else a run that is looked at more often would find a lower loss.
    """
    lengths = {tokens_of_step(r) for r in records}
    alike = len(lengths) == 1 and not any(r.foreign for r in records)
    axis = "steps" if align == "steps" or alike else "tokens"
    step = 1.0 if axis == "steps" else max(lengths, default=0.0) or 1.0
    found = {r: {**r.columns} for r in records}
    for key in keys:
        placed = (r for r in records if len(of_rows(r, axis)))
        known = {r: np.isfinite(r.columns.get(key, ())) for r in placed}
        known = {r: there for r, there in known.items() if there.any()}
        places = {r: np.round(of_rows(r, axis)[there] / step) for r, there in known.items()}
        several = {at.tobytes(): at for at in places.values()}.values()
        for r, at in places.items():
            kept = [np.isin(at, other) | (at > other[-1]) for other in several]
            known[r][known[r]] = np.all(kept, axis=0) | (at == at[-1])
            found[r][key] = np.where(known[r], r.columns[key], np.nan)
    return {r: replace(r, columns=columns) for r, columns in found.items()}


def evaluations(record: Record, align: str) -> np.ndarray:
    """Return the positions at which the run has a validation loss, or what is measured of it."""
    where, values = of_rows(record, align), record.columns.get(record.measured, np.zeros(0))
    return where[: len(values)][np.isfinite(values[: len(where)])]


def begins_after(record: Record, align: str, at: float) -> bool:
    """Tell whether a fork has no step of its own up to the position."""
    begin = record.parent.get("step", -1)  # of a fork 0 at least
    return until(positions(record, align), at) <= begin


def common_position(records: Sequence[Record], align: str, metric: str) -> Position | None:
    """Return where the metric of all runs is read; None where there is no such position.

    For a figure of validation it is the last position at which all runs that have evaluations were
    evaluated, to a step of the one with the longer steps. Over time, and for other figures, it is
    the end of the run that came no further.
    """
    ends = {r: float(x[-1]) for r in records if len(x := positions(r, align)) and x[-1] > 0}
    if not ends:
        return None
    end = min(ends.values())
    if align == "time":
        return Position(end, end)
    # the length of an optimizer step, in what positions are counted in
    steps = {r: 1.0 if align == "steps" else tokens_of_step(r) for r in records}
    measured = {r.measured for r in records}
    if metric not in measured and not metric.startswith(("val/", "final ", "best ")):
        return Position(end, max(steps.values()))
    seen = {r: at for r in records if len(at := evaluations(r, align))}
    # runs without an evaluation so far
    most = min((at for r, at in ends.items() if r not in seen), default=np.inf)
    otherwise = Position(end, 0.0) if np.isfinite(most) else None
    several = np.unique([at for where in seen.values() for at in where])
    lengths = np.array([steps[r] for r in seen])
    while count := int(np.searchsorted(several, most, side="right")):
        here = float(several[count - 1])
        before = [where[: until(where, here)] for where in seen.values()]
        if not all(map(len, before)):
            break
        last = np.array([where[-1] for where in before])
        # each two stand no further apart than the longer of their steps
        ends_of, longest = np.unique([last, lengths], axis=1)
        apart = np.abs(np.subtract.outer(ends_of, ends_of))
        if (apart <= np.maximum.outer(longest, longest)).all():
            return Position(here, here - float(last.min()))
        # the hindmost stays where it is until `most` falls below it: the others must come to it
        most = min(np.nextafter(here, -np.inf), float(last.min() + lengths.max()))
    return otherwise


def tokens_of_step(record: Record) -> float:
    """Return the tokens of the longest steps of a run; 0 where they are not known."""
    per_step = record.facts.get("tokens_per_step", 0.0)
    sizes = [stage["real_batch_size"] for stage in record.facts.get("stages") or ()]
    length = record.facts.get("sequence_length", 0)
    return max([per_step, *(size * length for size in sizes)])
