"""Find out what can be said of the runs that take part: budgets, who leads, verdicts, what rounding
makes, effects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmexp.compare import judging, places
from llmexp.compare.figures import LOSSES
from llmexp.compare.judging import Effect, Floor, Judgement, Verdict, all_pairs, by_seed
from llmexp.compare.places import Place
from llmexp.compare.records import Column, Comparison, Entry
from llmexp.compare.selection import task
from llmexp.compare.settings import TWIN


@dataclass(frozen=True)
class Findings:
    """The findings on the entries that take part."""

    metric: Column
    ranked: tuple[
        Entry, ...
    ]  # those with the metric, the leading one first; none where no order has a meaning
    without: tuple[Entry, ...]  # those that take part and have no such figure
    seeds: Mapping[
        str, Mapping[str, float]
    ]  # the metric of each ranked entry by seed, by the entry's name
    judged: Mapping[
        str, Judgement
    ]  # of all ranked but the leading one beside that of its budget, by name
    budgets: Sequence[
        Sequence[Entry]
    ]  # all that take part, those of like budgets together, the leading one's first
    leads: Mapping[
        str, Entry
    ]  # by the name of each ranked entry the one that it is held against: that of its budget
    places: Mapping[str, Place]  # where an entry stands when its loss is read, by name
    floor: Floor | None
    effects: Sequence[Effect]
    left_out: Mapping[int, str]  # why a run takes no part, by id
    negligible: float
    mixed: bool  # several tokenizers
    tasks: int  # validation texts

    @property
    def loss(self) -> str:
        """Return the metric's name in a sentence."""
        return self.metric.title

    @property
    def comparable(self) -> bool:
        """Tell whether all that take part have one budget and one validation text."""
        return len(self.budgets) < 2 and self.tasks < 2


def find_out(
    c: Comparison, metric: Column, left_out: Mapping[int, str], negligible: float, mixed: bool
) -> Findings:
    """Find out what can be said of the entries. `left_out`: why a run takes no part, by its id."""
    taking_part = [e for e in c.entries if any(id(r) not in left_out for r in e.runs)]
    ranked = [e for e in taking_part if metric.key in e.figures]
    without = [e for e in taking_part if metric.key not in e.figures]
    if (mixed and metric.key.endswith("/loss")) or not metric.better:
        ranked = []
    loss = metric.key in LOSSES
    sign = metric.sign
    seeds = {e.name: by_seed(e, metric.key, left_out) for e in ranked}
    level = all_pairs(len(ranked))
    first = (
        judging.leader(_contestants(ranked, seeds, sign), seeds, level, sign) if ranked else None
    )
    ordered = [e for e in ranked if e is first] + [e for e in ranked if e is not first]
    known = _places(c, taking_part, metric.key, left_out) if loss else {}
    groups = places.groups([*ordered, *without], known)
    tasks = len({task(r) for e in ranked for r in e.runs if id(r) not in left_out}) if loss else 1
    leads: dict[str, Entry] = {}
    judged: dict[str, Judgement] = {}
    for group in groups:  # those of one budget can be told apart among themselves
        members = [e for e in group if e.name in seeds]
        if not members:
            continue
        lead = (
            first
            if first in members
            else judging.leader(_contestants(members, seeds, sign), seeds, level, sign)
        )
        leads |= {e.name: lead for e in members}
        for other in members:
            if other is not first:
                judged[other.name] = _judged(
                    lead, other, seeds, level, negligible if loss else 0.0, sign
                )
    if tasks > 1:
        judged = dict.fromkeys(judged, Judgement(Verdict.TASK))
    group_of = {e.name: i for i, group in enumerate(groups) for e in group}
    keys = [key for key in c.factors if key != TWIN]
    effects = (
        judging.effects(metric.key, ranked, keys, left_out, group_of, negligible)
        if loss and tasks == 1
        else []
    )
    floor = judging.floor_of(ranked, metric.key, left_out) if loss else None
    return Findings(
        metric, tuple(ordered), tuple(without), seeds, judged, groups, leads, known, floor, effects,
        left_out,
        negligible, mixed, tasks,
    )  # fmt: skip


def _contestants(
    ranked: Sequence[Entry], seeds: Mapping[str, Mapping[str, float]], sign: float
) -> list[Entry]:
    """Return one entry for each computation: twins and repeats measure what rounding makes, and win
    nothing by it."""
    found: dict[object, list[Entry]] = {}
    for e in ranked:
        found.setdefault(e.computation, []).append(e)

    def weight(entry: Entry) -> tuple[int, bool, float]:
        values = seeds[entry.name]
        return (
            -len(values),
            bool(entry.values.get(TWIN)),
            sign * math.fsum(values.values()) / len(values),
        )

    return [min(entries, key=weight) for entries in found.values()]


def _judged(
    lead: Entry, other: Entry, seeds: Mapping[str, Mapping[str, float]], level: float,
    negligible: float, sign: float
) -> Judgement:  # fmt: skip
    if other is lead:
        return Judgement(Verdict.BUDGET)
    if lead.computation == other.computation:
        return judging.cuts(seeds[lead.name], seeds[other.name])
    return judging.judge(seeds[lead.name], seeds[other.name], level, negligible, sign)


def _places(
    c: Comparison, entries: Sequence[Entry], metric: str, left_out: Mapping[int, str]
) -> dict[str, Place]:
    """Return where each entry stands in the row that its metric is read from; the best and the last
    loss are read at the run's own end."""
    at = None if metric in ("final val/loss", "best val/loss") else c.align_at
    found = {}
    for e in entries:
        run = next(r for r in e.runs if id(r) not in left_out)
        if place := places.place_of(run, c.align, at, metric):
            found[e.name] = place
    return found
