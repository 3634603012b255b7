"""Judge how the entries stand to the best one of their budget.

Seeds are the only witnesses for settings.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmexp.compare.evidence import (
    Effect,
    Floor,
    Rival,
    Verdict,
    alike,
    effects,
    floor_of,
    read_place,
)
from llmexp.compare.figures import is_loss, task
from llmexp.compare.looks import Level, Stood, stood
from llmexp.compare.records import TWIN, Column, Comparison, Entry, Record, Standing
from llmexp.compare.settings import varying
from llmexp.compare.spending import ALPHA
from llmexp.compare.statistics import Difference
from llmexp.compare.target import REACHED, cap_of, capped
from llmexp.runs.ledger import Look
from llmexp.system.text import shown

NEGLIGIBLE = 0.002  # nats per token: what is known to be smaller is not worth a decision
SMALL = (Verdict.SAME, Verdict.NEGLIGIBLE)  # no difference that matters
RESOLUTION = 1e-9  # of a figure: what rounding makes of equal ones


@dataclass(frozen=True)
class Findings:
    """The findings of a comparison, from which answer and notes are written."""

    c: Comparison
    metric: Column
    # Those with the metric, the leading one first; none where no order has a meaning.
    ranked: Sequence[Rival]
    without: Sequence[Rival]  # those that take part and have no such figure
    # All that take part, those of like budgets together, the leading one's first.
    budgets: Sequence[Sequence[Rival]]
    floor: Floor | None
    effects: Sequence[Effect]
    negligible: float
    mixed: bool  # several tokenizers
    tasks: int  # validation texts
    limiting: Record | None  # the run that came no further than where losses are read
    looks: Sequence[Look]  # of a sweep that decided by itself how many seeds it trained

    @property
    def is_loss(self) -> bool:
        return is_loss(self.metric.key)

    @property
    def comparable(self) -> bool:
        """Tell whether all that take part have one budget and one validation text."""
        return len(self.budgets) < 2 and self.tasks < 2

    @property
    def reached(self) -> bool:
        """Tell whether any run reaches the target; the leading setting has one then."""
        return any(r.entry.figures.get(REACHED) for r in self.ranked[:1])

    @property
    def apart(self) -> bool:
        """Tell whether each loss is read at its run's own end, as there is no common position."""
        forks = any(r.parent for r in self.c.taking_part)
        return self.metric.key.startswith("val/") and self.c.align_at is None and not forks

    @property
    def extreme(self) -> str:
        return "lowest" if self.metric.sign > 0 else "highest"

    @property
    def verdicts(self) -> set[Verdict]:
        return {r.verdict for r in self.ranked if r.verdict}

    def those(self, *verdicts: Verdict) -> list[Rival]:
        return [r for r in self.ranked if r.verdict in verdicts]

    def digits(self, number: float) -> str:
        """Return a number with the digits of the metric."""
        return shown(number, self.metric.digits)

    def figure(self, rival: Rival) -> str:
        return self.digits(rival.entry.figures[self.metric.key])


def find_out(
    c: Comparison, metric: Column, negligible: float, mixed: bool, limiting: Record | None
) -> Findings:
    """Find out what the entries show."""
    loss, sign = is_loss(metric.key), metric.sign
    negligible = negligible if loss else 0.0
    cap = cap_of(c.taking_part, c.align)
    rivals = [_rival(c, e, metric.key, cap) for e in c.entries if not e.out]
    ranked = [r for r in rivals if r.seeds]
    without = [r for r in rivals if not r.seeds]
    if (mixed and metric.key.endswith("/loss")) or not metric.better:
        ranked = []
    groups = _by_budget(ranked)  # those of one budget can be compared among themselves
    share = 1 / max(1, sum(len(group) > 1 for group in groups))
    sweeps = {r.sweep for r in c.runs}
    looks = c.runs[0].looks if len(sweeps) == 1 else ()
    leads = [_judge(group, looks, share, negligible, sign) for group in groups]
    first, standing = min(leads, key=lambda found: _order(found[0], sign), default=(None, None))
    ordered = sorted(ranked, key=lambda r: r is not first)
    budgets = _by_budget([*ordered, *without])
    keys = varying([r.entry for r in rivals], c.factors)
    taking_part = [r for rival in ranked for r in rival.entry.taking_part]
    tasks = len({task(r, metric.key) for r in taking_part}) if loss else 1
    for rival in ordered if tasks > 1 else ():
        rival.verdict, rival.size, rival.difference = Verdict.TASK, None, None
    if first:
        first.verdict = None
    return Findings(
        c=c,
        metric=metric,
        ranked=ordered,
        without=without,
        budgets=budgets,
        floor=floor_of(ranked, metric.key) if loss else None,
        effects=effects(ranked, keys, standing, sign) if standing and loss and tasks == 1 else [],
        negligible=negligible,
        mixed=mixed,
        tasks=tasks,
        limiting=limiting,
        looks=looks,
    )


def _rival(c: Comparison, entry: Entry, metric: str, cap: float) -> Rival:
    runs = entry.taking_part
    if c.target:
        seeds = capped(runs, metric, cap)
        late = any(r.figures.get(metric, math.inf) > cap for r in runs if r.seed in seeds)
        return Rival(entry, seeds, capped=late)
    seeds = {r.seed: r.figures[metric] for r in runs if metric in r.figures}
    # The best and the last loss are read at the run's own end.
    at = None if metric in ("final val/loss", "best val/loss") else c.align_at
    if not is_loss(metric):
        return Rival(entry, seeds)
    measured = [r for r in runs if metric in r.figures] or runs
    places = [p for r in measured if (p := read_place(r, c.align, at, metric))]
    if len(places) < len(measured):
        return Rival(entry, seeds)
    # of seeds the mean, as all that is printed of them
    tokens = math.fsum(p.tokens for p in places) / len(places)
    return Rival(entry, seeds, replace(places[0], tokens=tokens))


def _by_budget(rivals: Sequence[Rival]) -> list[list[Rival]]:
    """Put rivals of like budgets together, in the order given."""
    found: list[list[Rival]] = []
    for r in rivals:
        for group in found:
            first = group[0].place
            if r.place is None or first is None or alike(r.place, first):
                group.append(r)
                break
        else:
            found.append([r])
    for i, group in enumerate(found):
        for r in group:
            r.budget = i
    return found


def _order(r: Rival, sign: float) -> tuple[bool, float]:
    """Put settings with several seeds first, and among these the better ones."""
    return len(r.seeds) < 2, sign * r.mean


def _judge(
    group: Sequence[Rival], looks: Sequence[Look], share: float, negligible: float, sign: float
) -> tuple[Rival, Stood | None]:
    """Judge rivals of one budget beside the best one, which is returned.

    `looks`: those of a sweep that decided by itself; `share` of their levels is for these rivals.
    `sign`: -1 where the higher figure is better.

    Twins and repeats measure what rounding makes, and win nothing by it: one of each computation
    stands for all. So it does where figures are equal to the bit: a limit that clips nothing is
    no other setting, and no further witness of the noise.
    """
    same: dict[object, list[Rival]] = defaultdict(list)
    known: dict[object, object] = {}  # the identity of a computation, and of figures over seeds
    for r in group:
        figures = frozenset(r.seeds.items()) if len(r.seeds) > 1 else r.entry.computation
        first = known.get(figures, r.entry.computation)
        r.identity = known.setdefault(r.entry.computation, first)
        known.setdefault(figures, r.identity)
        same[r.identity].append(r)

    def weight(r: Rival) -> tuple[int, bool, float]:
        return -len(r.seeds), bool(r.entry.values.get(TWIN)), sign * r.mean

    candidates = [min(those, key=weight) for those in same.values()]
    levels: list[Level] = [(look.seeds, look.level * share) for look in looks]
    standing = stood(candidates, levels or [(None, ALPHA * share)], sign)
    lead = standing.lead if standing else min(candidates, key=lambda r: _order(r, sign))
    for other in group:
        if other is lead:
            other.verdict = Verdict.BUDGET
        elif other.entry.computation == lead.entry.computation:
            shared = sorted(lead.seeds.keys() & other.seeds.keys())
            other.verdict = Verdict.ROUNDING
            apart = [other.seeds[s] - lead.seeds[s] for s in shared]
            other.size = float(np.mean(apart)) if shared else None
        elif other.identity == lead.identity:
            other.verdict, other.size = Verdict.SAME, 0.0
        elif standing is None or other.identity not in standing.found:
            other.verdict, other.size = Verdict.FEW_SEEDS, other.mean - lead.mean
        else:
            d, worse = standing.found[other.identity]
            other.difference = d
            resolution = RESOLUTION * max(abs(lead.mean), abs(other.mean))
            other.size, other.verdict = d.mean, _verdict(d, worse, negligible, resolution)
        if other.verdict == Verdict.SAME and (lead.capped or other.capped):
            other.verdict = Verdict.UNDECIDED  # not known by how much
    return lead, standing


def _verdict(d: Difference, worse: bool, negligible: float, resolution: float) -> Verdict:
    """Return the verdict on a difference; one within `resolution` is none."""
    if worse and d.real and abs(d.mean) > resolution:
        return Verdict.WORSE if abs(d.mean) >= negligible else Verdict.NEGLIGIBLE
    if abs(d.mean) + d.half < max(negligible, resolution, 1e-12):
        return Verdict.SAME
    return Verdict.UNDECIDED


def standings(f: Findings) -> tuple[Entry, ...]:
    """Mark each entry: best, same, worse, undecided, or why it is left out.

    Those of one budget stand together.
    """
    rivals = {r.entry: r for r in (*f.ranked, *f.without)}
    found: list[list[Entry]] = [[] for _ in (*f.budgets, "left out")]
    for e in f.c.entries:
        r = rivals.get(e)
        standing = _standing(r, f) if r else Standing(e.out)
        found[r.budget if r else -1].append(replace(e, standing=standing))
    return tuple(itertools.chain(*found))


def _standing(r: Rival, f: Findings) -> Standing:
    if f.c.target and not f.reached:  # nothing tells settings apart that never get there
        return Standing("")
    if not r.seeds:
        return Standing("not evaluated" if f.ranked and "val" in f.metric.key else "")
    if r.verdict is None:
        settled = f.verdicts <= {Verdict.WORSE, Verdict.ROUNDING, *SMALL}
        best = Verdict.WORSE in f.verdicts and settled and f.comparable and not f.without
        return Standing("best" if best else f.extreme) if len(f.ranked) > 1 else Standing("")
    if r.verdict == Verdict.BUDGET and sum(r.budget == other.budget for other in f.ranked) > 1:
        return Standing(f"{f.extreme} of budget")
    mark = r.verdict.mark if f.is_loss or f.c.target else ""
    if r.capped or f.ranked[0].capped:
        return Standing(mark)  # by how much is not known
    if r.difference is None:
        return Standing(mark, r.size)
    return Standing(mark, r.size, r.difference.half, r.difference.basis)
