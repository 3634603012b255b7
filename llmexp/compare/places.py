"""Find the places of runs where their losses are read: tokens, and how far their schedules have
come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmexp.compare.budgets import CLOSE
from llmexp.compare.figures import number, positions, rows_until
from llmexp.compare.records import Entry, Record


@dataclass(frozen=True)
class Place:
    """The place of a run where its loss is read."""

    tokens: float  # target tokens that it has trained on
    planned: float  # tokens of its whole budget
    grain: float  # tokens of one optimizer step
    decays: bool  # whether its learning rate depends on how far it has come

    @property
    def progress(self) -> float:
        """Share of its budget that it has used."""
        return self.tokens / self.planned


def place_of(record: Record, align: str, at: float | None, metric: str) -> Place | None:
    """Return where the run stands at the common position `at` (None: at its own end), in the row
    that the metric is read from: for a validation loss the last evaluation up to there. None where
    that is not known."""
    tokens = np.asarray(record.columns.get("tokens_seen", np.zeros(0)))
    where = positions(record, align)
    planned, grain = (
        number(record.facts.get("max_tokens")),
        number(record.facts.get("tokens_per_step")),
    )
    if not len(tokens) or len(where) != len(tokens):
        return None
    decays = planned is not None and not str(record.config.get("schedule._target_", "")).endswith(
        ".constant"
    )
    row = len(tokens) if at is None else rows_until(where, at)
    if not row:  # it has no row yet where losses are read
        if align != "tokens":
            return None
        return Place(float(at or 0), planned or float(at or 1), grain or 0.0, decays)
    if metric.startswith("val/"):
        evaluated = np.flatnonzero(np.isfinite(record.columns.get(metric, np.zeros(0))[:row]))
        row = int(evaluated[-1]) + 1 if len(evaluated) else row
    seen = float(tokens[row - 1])
    return Place(seen, planned or seen, grain or 0.0, decays)


def alike(a: Place, b: Place) -> bool:
    """Tell whether losses at these places may be compared: equal tokens, to a step, and equally far
    schedules."""
    if abs(a.tokens - b.tokens) > max(a.grain, b.grain):
        return False
    if a.decays and b.decays:
        return abs(a.progress - b.progress) <= CLOSE + max(p.grain / p.planned for p in (a, b))
    decaying = [p for p in (a, b) if p.decays]
    return all(
        p.progress > 1 - CLOSE or abs(a.planned - b.planned) <= max(a.grain, b.grain)
        for p in decaying
    )


def groups(entries: Sequence[Entry], places: dict[str, Place]) -> list[list[Entry]]:
    """Put entries of like budgets together, in the order given; `places` by the entries' names."""
    found: list[list[Entry]] = []
    for entry in entries:
        place = places.get(entry.name)
        for group in found:
            first = places.get(group[0].name)
            if place is None or first is None or alike(place, first):
                group.append(entry)
                break
        else:
            found.append([entry])
    return found
