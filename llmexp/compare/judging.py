"""Judge how the settings stand to the best one of their budget.

Seeds are the only witnesses for settings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmexp.compare.evidence import alike, effects, floor_of, read_place, same_steps
from llmexp.compare.figures import task
from llmexp.compare.folding import varying
from llmexp.compare.inference import FEW, Difference, far_off
from llmexp.compare.looks import Level, Stood, stood
from llmexp.compare.records import TWIN, Result, Setting, Verdict
from llmexp.compare.spending import ALPHA, level_of
from llmexp.compare.statistics import seeds_needed
from llmexp.compare.target import cap_of, capped

NEGLIGIBLE = 0.002  # nats per token: what is known to be smaller is not worth a decision
SMALL = (Verdict.SAME, Verdict.NEGLIGIBLE)  # no difference that matters
RESOLUTION = 1e-9  # of a figure: what rounding makes of equal ones


def judge(f: Result) -> None:
    """Find out how the settings stand, and write it into them and into the result."""
    loss, sign = f.is_loss, f.metric.sign
    f.negligible = f.negligible if loss else 0.0
    cap = cap_of(f)
    rivals = [s for s in f.settings if not s.out]
    for s in rivals:
        _read_off(s, f, cap)
    f.without = [s for s in rivals if not s.seeds]
    ranked = [s for s in rivals if s.seeds]
    if (f.mixed and f.key.endswith("/loss")) or not f.metric.better:
        ranked = []
    groups = _by_budget(ranked)  # those of one budget can be compared among themselves
    share = 1 / max(1, sum(len(group) > 1 for group in groups))
    f.looks = f.runs[0].looks if f.sweep else ()
    leads = [_judge(f, group, share) for group in groups]
    first, standing = min(leads, key=lambda found: _order(found[0], sign), default=(None, None))
    f.ranked = sorted(ranked, key=lambda s: s is not first)
    f.budgets = _by_budget([*f.ranked, *f.without])
    f.tasks = len({task(r, f.key) for s in ranked for r in s.taking_part}) if loss else 1
    for s in f.ranked if f.tasks > 1 else ():
        s.verdict, s.size, s.difference = Verdict.TASK, None, None
    if first:
        first.verdict = None
    if loss:
        f.floor = floor_of(ranked, f.key)
        if standing and f.tasks == 1:
            f.effects = effects(ranked, varying(rivals, f.factors), standing.seen)
            f.multiplied = standing.seen.model.swing is not None
        members = standing.seen.members if standing else f.ranked[:1]
        found = far_off([r.seeds for r in members]) if f.tasks == 1 else []
        f.far = [(members[i], seed) for i, seed in found]
    for s in f.settings:
        s.mark = s.out or _mark(s, f)
    # those of one budget together, last those that are left out
    place = {s: number for number, group in enumerate(f.budgets) for s in group}
    f.settings = sorted(f.settings, key=lambda s: place.get(s, len(f.budgets)))


def _read_off(s: Setting, f: Result, cap: float) -> None:
    """Read the metric of a setting by seed, and where it stands there."""
    runs, metric = s.taking_part, f.key
    if f.target:
        s.seeds = capped(runs, metric, cap)
        s.capped = any(r.figures.get(metric, math.inf) > cap for r in runs if r.seed in s.seeds)
        return
    s.seeds = {r.seed: r.figures[metric] for r in runs if metric in r.figures}
    # The best and the last loss are read at the run's own end.
    at = None if metric in ("final val/loss", "best val/loss") else f.align_at
    measured = [r for r in runs if metric in r.figures] or runs
    places = [p for r in measured if (p := read_place(r, f.align, at, metric))]
    if f.is_loss and len(places) == len(measured):
        # of seeds the mean, as all that is printed of them
        tokens = math.fsum(p.tokens for p in places) / len(places)
        s.place = replace(places[0], tokens=tokens)


def _by_budget(rivals: Sequence[Setting]) -> list[list[Setting]]:
    """Put rivals of like budgets together, in the order given."""
    found: list[list[Setting]] = []
    for r in rivals:
        for group in found:
            first = group[0].place
            if r.place is None or first is None or alike(r.place, first):
                group.append(r)
                break
        else:
            found.append([r])
    return found


def _order(r: Setting, sign: float) -> tuple[bool, float]:
    """Put settings with several seeds first, and among these the better ones."""
    return len(r.seeds) < 2, sign * r.mean


def _judge(f: Result, group: Sequence[Setting], share: float) -> tuple[Setting, Stood | None]:
    """Judge rivals of one budget beside the best one, which is returned.

    `share`: what these rivals have of the chance of an error.

    Twins and repeats measure what rounding makes, and win nothing by it: one of each computation
    stands for all. So it does where figures are equal to the bit: a limit that clips nothing is
    no other setting, and no further witness of the noise.
    """
    sign = f.metric.sign
    same: dict[object, list[Setting]] = defaultdict(list)
    for i, r in enumerate(group):
        r.identity = next((o.identity for o in group[:i] if _equal(o, r)), r.computation)
        same[r.identity].append(r)

    def weight(r: Setting) -> tuple[int, bool, float]:
        return -len(r.seeds), bool(r.values.get(TWIN)), sign * r.mean

    candidates = [min(those, key=weight) for those in same.values()]
    levels: list[Level] = [(look.seeds, look.level * share) for look in f.looks]
    standing = stood(candidates, levels or [(None, ALPHA * share)], sign)
    lead = standing.lead if standing else min(candidates, key=lambda r: _order(r, sign))
    for other in group:
        other.capped = other.capped or lead.capped
        if other is lead:
            other.verdict = Verdict.BUDGET
        elif other.computation == lead.computation:
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
            other.size, other.verdict = d.mean, _verdict(d, worse, f.negligible, resolution)
        if other.capped:  # not known by how much
            other.size = other.difference = None
            if other.verdict == Verdict.SAME:
                other.verdict = Verdict.UNDECIDED
    return lead, standing


def _equal(a: Setting, b: Setting) -> bool:
    """Tell whether two settings compute the same.

    That is one computation but for rounding, or figures of several seeds, or the losses of all
    steps of one, that are equal to the bit.
    """
    if a.computation == b.computation:
        return True
    return a.seeds == b.seeds and (len(a.seeds) > 1 or same_steps([*a.taking_part, *b.taking_part]))


def _verdict(d: Difference, worse: bool, negligible: float, resolution: float) -> Verdict:
    """Return the verdict on a difference; one within `resolution` is none."""
    if worse and d.real and abs(d.mean) > resolution:
        return Verdict.WORSE if abs(d.mean) >= negligible else Verdict.NEGLIGIBLE
    if abs(d.mean) + d.half < max(negligible, resolution, 1e-12):
        return Verdict.SAME
    return Verdict.UNDECIDED


def _mark(s: Setting, f: Result) -> str:
    """Return the word for a setting that takes part."""
    if f.target and not f.reached:  # nothing tells settings apart that never get there
        return ""
    if s not in f.ranked:
        lacks = not s.seeds and f.ranked and "val" in f.key
        return "not evaluated" if lacks else ""
    if s.verdict is None:
        settled = f.verdicts <= {Verdict.WORSE, Verdict.ROUNDING, *SMALL}
        best = Verdict.WORSE in f.verdicts and settled and f.comparable and not f.without
        return ("best" if best else f.extreme) if len(f.ranked) > 1 else ""
    beside = [r for group in f.budgets if s in group for r in group if r.seeds]
    if s.verdict == Verdict.BUDGET and len(beside) > 1:
        return f"{f.extreme} of budget"
    return s.verdict.mark if f.is_loss or f.target else ""


def needed(other: Setting, f: Result) -> int | None:
    """Return the seeds a setting that would tell one from the leading one; None for too many.

    All that is printed or proposed has this number. Of single seeds it is the least, as if seeds
    spread no wider than rounding does. A sweep that had all of its looks is judged at the level
    that it has left at twice the seeds.
    """
    d, size = other.difference, max(abs(other.size or 0.0), f.negligible)
    if other.verdict == Verdict.FEW_SEEDS:
        count = len(f.ranked)
        least = seeds_needed(f.floor.spread, size, count, count - 1) if f.floor else FEW
        return least and max(FEW, least)
    if d is None or other.verdict != Verdict.UNDECIDED:
        return None
    if f.looks:
        level = level_of(2 * d.seeds, 2 * d.seeds, f.looks)
        d = replace(d, alpha=level or d.alpha)
    wanted = d.seeds_needed(size)
    return wanted and max(wanted, d.seeds + 1)
