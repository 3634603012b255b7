"""Judge how the settings stand to the best one of their budget.

Seeds are the only witnesses for settings.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np

from llmexp.compare.alpha_spending import ALPHA, level_of
from llmexp.compare.budgets import CLOSE
from llmexp.compare.figures import cap_of, task
from llmexp.compare.folding import batch_cut, varying
from llmexp.compare.inference import FEW, Difference, Model, far_off
from llmexp.compare.looks import Seen, Stood, stood
from llmexp.compare.position import of_rows, positions, tokens_of_step, until
from llmexp.compare.records import (
    REACHED,
    TWIN,
    Effect,
    Floor,
    Place,
    Record,
    Result,
    Setting,
    Verdict,
)
from llmexp.compare.statistics import seeds_needed
from llmexp.config.labels import short_label
from llmexp.config.labels import short_value as value
from llmexp.optim.schedule import DECAYS

NEGLIGIBLE = 0.002  # nats per token: what is known to be smaller is not worth a decision
SMALL = (Verdict.SAME, Verdict.NEGLIGIBLE)  # no difference that matters
RESOLUTION = 1e-9  # of a figure: what rounding makes of equal ones
EVIDENCE = 9  # significant digits from which on equal figures of a table are no chance
THIRD_SEED = "a third seed each would tell how many it takes"
MOST_NEEDED = 20  # seeds a setting that are said to be needed, or five times those that are there


def judge(f: Result) -> None:
    """Find out how the settings stand, and write it into them and into the result."""
    loss, sign = f.judged, f.metric.sign
    f.min_effect = f.min_effect if loss else 0.0
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
    tasks = {task(r, f.key) for s in ranked for r in s.taking_part if not r.foreign}
    f.tasks = len(tasks) if loss and tasks else 1
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
    if f.looks and f.ranked and len(f.budgets) == 1:  # who leads over shared seeds stands first
        lead = f.ranked[0].computation
        f.settings = sorted(f.settings, key=lambda s: s.computation != lead)


def _read_off(s: Setting, f: Result, cap: float) -> None:
    """Read the metric of a setting by seed, and where it stands there.

    Runs that have not reached a target where the first that never does ends count as if they had.
    """
    runs, key = s.taking_part, f.key
    having = [r for r in runs if key in r.figures or (f.target and r.figures.get(REACHED) == 0.0)]
    s.seeds = {r.seed: min(r.figures.get(key, cap), cap) for r in having}
    s.capped = any(r.figures.get(key, math.inf) > cap for r in having)
    s.early = any(r.figures.keys() & {"target/by", "target/after"} == {"target/by"} for r in having)
    # The best and the last loss are read at the run's own end.
    at = None if key in ("final val/loss", "best val/loss") else f.align_at
    places = [p for r in having or runs if (p := read_place(r, f.align, at, key))]
    if f.judged and len(places) == len(having or runs):
        # of seeds the mean, as all that is printed of them
        s.place = replace(places[0], tokens=math.fsum(p.tokens for p in places) / len(places))


def _by_budget(rivals: Sequence[Setting]) -> list[list[Setting]]:
    """Put rivals of like budgets together, in the order given."""
    found: list[list[Setting]] = []
    for r in rivals:
        near = (g for g in found if not (r.place and g[0].place) or alike(r.place, g[0].place))
        if group := next(near, None):
            group.append(r)
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
    same = defaultdict(list)
    alike: dict[object, list[int]] = defaultdict(list)  # the numbers of those that may be equal
    for i, r in enumerate(group):
        keys = (r.computation, frozenset(r.seeds.items()))
        near = (group[j] for j in sorted({j for key in keys for j in alike[key]}))
        r.identity = next((o.identity for o in near if _equal(o, r)), r.computation)
        same[r.identity].append(r)
        for key in keys:
            alike[key].append(i)
    candidates = [
        min(those, key=lambda r: (-len(r.seeds), bool(r.values.get(TWIN)), sign * r.mean))
        for those in same.values()
    ]
    levels = [(look.seeds, look.level * share) for look in f.looks]
    standing = stood(candidates, levels or [(None, ALPHA * share)], sign)
    lead = standing.lead if standing else min(candidates, key=lambda r: _order(r, sign))
    still = not f.target and unmoved(group)
    for other in group:
        other.capped |= lead.capped
        if other is lead:
            other.verdict = Verdict.BUDGET
        elif other.computation == lead.computation:
            shared = sorted(lead.seeds.keys() & other.seeds)
            apart = [other.seeds[s] - lead.seeds[s] for s in shared]
            other.verdict, other.size = Verdict.ROUNDING, float(np.mean(apart)) if apart else None
        elif other.identity == lead.identity:
            other.verdict, other.size = Verdict.SAME, 0.0
        elif standing is None or other.identity not in standing.found:
            other.verdict, other.size = Verdict.FEW_SEEDS, other.mean - lead.mean
        else:
            d, worse = standing.found[other.identity]
            if f.foreign and not f.target:
                d = _rounded(d, [*lead.seeds.values(), *other.seeds.values()], still)
            other.difference = None if still and d.real else d
            resolution = RESOLUTION * max(abs(lead.mean), abs(other.mean))
            other.size = d.mean if abs(d.mean) > resolution else 0.0
            other.verdict = _verdict(d, worse and not still, f.min_effect, resolution)
        early = other.early and other.identity != lead.identity
        if other.capped or early:  # not known by how much
            other.size = other.difference = None
            if other.verdict in (Verdict.SAME, *[Verdict.WORSE] * early):
                other.verdict = Verdict.UNDECIDED
    return lead, standing


def unmoved(settings: Sequence[Setting]) -> bool:
    """Tell whether no figure of a table moves over seeds, as if these had not been applied."""
    several = [s for s in settings if len(s.seeds) > 1 and s.runs[0].foreign]
    return bool(several) and all(len({*s.seeds.values()}) == 1 for s in several)


def _decimal(y: float) -> Decimal:
    return Decimal(repr(y)).normalize()


def _rounded(d: Difference, values: Sequence[float], still: bool) -> Difference:
    """Return a difference with what the rounding of a table's figures adds to its error.

    Where all seeds were rounded to one figure (`still`) they were rounded the same way, so that its
    interval is a whole unit of the last digit.
    """
    decimals = max(-int(_decimal(y).as_tuple().exponent) for y in values)
    if decimals >= 10:
        return d
    unit = 10.0**-decimals
    d = replace(d, error=math.hypot(d.error, unit / math.sqrt(6 * d.seeds)))
    return replace(d, error=d.error * max(1.0, unit / d.half)) if still else d


def _equal(a: Setting, b: Setting) -> bool:
    """Tell whether two settings compute the same.

    That is one computation but for rounding, or figures of several seeds, or the losses of all
    steps of one, that are equal to the bit. Figures of a table with few digits may be rounded.
    """
    if a.computation == b.computation:
        return True
    if a.seeds != b.seeds:
        return False
    runs = [*a.taking_part, *b.taking_part]
    if any(r.foreign for r in runs):
        digits = max(len(_decimal(y).as_tuple().digits) for y in a.seeds.values())
        return len(a.seeds) > 1 and digits >= EVIDENCE and not a.early
    return (len(a.seeds) > 1 and not a.early) or same_steps(runs)


def _verdict(d: Difference, worse: bool, min_effect: float, resolution: float) -> Verdict:
    """Return the verdict on a difference; one within `resolution` is none.

    A difference is small only where its whole interval is, however small its estimate.
    """
    small = d.bound < max(min_effect, resolution, 1e-12)
    if worse and d.real and abs(d.mean) > resolution:
        return Verdict.NEGLIGIBLE if small else Verdict.WORSE
    return Verdict.SAME if small else Verdict.UNDECIDED


def _mark(s: Setting, f: Result) -> str:
    """Return the word for a setting that takes part."""
    if f.target and not f.reached:  # nothing tells settings apart that never get there
        return ""
    if s not in f.ranked:
        lacks = not s.seeds and f.ranked and ("val" in f.key or f.measured)
        return "not evaluated" if lacks else ""
    if s.verdict is None:
        settled = f.verdicts <= {Verdict.WORSE, Verdict.ROUNDING, *SMALL}
        best = Verdict.WORSE in f.verdicts and settled and f.comparable and not f.without
        return ("best" if best else f.extreme) if len(f.ranked) > 1 else ""
    if s.verdict == Verdict.BUDGET:
        beside = [r for group in f.budgets if s in group for r in group if r.seeds]
        if len(beside) > 1:
            return f"{f.extreme} of budget"
    return s.verdict.mark if f.judged or f.target else ""


def needed(other: Setting, f: Result) -> int | None:
    """Return the seeds a setting that would tell one from the leading one; None for too many.

    All that is printed or proposed has this number. Of single seeds it is the least, as if seeds
    spread no wider than rounding does; with one degree of freedom it is the least that tells how
    far seeds spread. A sweep that had all of its looks is judged at the level that it has left at
    twice the seeds.
    """
    if other.early:
        return None
    d, size = other.difference, max(abs(other.size or 0.0), f.min_effect)
    if other.verdict == Verdict.FEW_SEEDS:
        count = len(f.ranked)
        least = seeds_needed(f.floor.spread, size, count, count - 1) if f.floor else FEW
        return least and max(FEW, least)
    if d is None or other.verdict != Verdict.UNDECIDED:
        return None
    if d.vague:
        return FEW
    if f.looks:
        d = replace(d, alpha=level_of(2 * d.seeds, 2 * d.seeds, f.looks) or d.alpha)
    wanted = d.seeds_needed(size)
    most = max(MOST_NEEDED, 5 * d.seeds)
    return max(wanted, d.seeds + 1) if wanted and wanted <= most else None


def read_place(record: Record, align: str, at: float | None, metric: str) -> Place | None:
    """Return where the run stands when the metric is read, None where that is not known.

    It is read at the common position `at` (None: at the run's own end), a validation loss in the
    last evaluation up to there. Of a run of others nobody knows its schedule, so that it may decay
    to its end; where its tokens are not known, they are steps.
    """
    tokens, where = positions(record, "tokens"), positions(record, align)
    if record.foreign and not len(tokens):
        tokens = where
    if not len(tokens) or len(where) != len(tokens):
        return None
    planned = float(tokens[-1]) if record.foreign else record.facts.get("max_tokens")
    decays = planned is not None and (record.foreign or decays_at_last(record.config))
    step = len(tokens) if at is None else until(where, at)
    if step > record.parent.get("step", 0):
        seen = float(tokens[step - 1])
    elif align == "tokens":  # it has no step yet where losses are read
        seen = float(at or 0)
    else:
        return None
    if metric in record.columns and (metric.startswith("val/") or metric == record.measured):
        known = np.isfinite(record.columns[metric]) & (record.columns["step"] <= step)
        rows = tokens if record.foreign else of_rows(record, "tokens")
        seen = float(max(rows[known], default=seen))
    return Place(seen, planned or seen or 1.0, tokens_of_step(record), decays)


def decays_at_last(config: Mapping[str, Any]) -> bool:
    """Return whether the rate falls to the end of the budget, and so depends on it."""
    if str(config.get("schedule._target_", "")).endswith(".constant"):
        return False
    if DECAYS.keys[0] not in config:  # linear, cosine, or a schedule of the user's
        return True
    return any(config.get(key) is not None and config[key] != 0 for key in DECAYS.keys)


def alike(a: Place, b: Place) -> bool:
    """Tell whether losses at these places may be compared.

    The tokens must be equal to a step, and the schedules equally far.
    """
    step = max(a.grain, b.grain)
    if abs(a.tokens - b.tokens) > step:
        return False
    if a.decays and b.decays:
        return abs(a.progress - b.progress) <= CLOSE + max(a.grain / a.planned, b.grain / b.planned)
    ended = all(p.progress > 1 - CLOSE for p in (a, b) if p.decays)
    return ended or abs(a.planned - b.planned) <= step


def floor_of(rivals: Sequence[Setting], metric: str) -> Floor | None:
    """Measure what rounding makes, from runs of one computation and one seed.

    None where there are no two.
    """
    alike = defaultdict(list)
    for setting in rivals:
        for run in setting.taking_part:
            if metric in run.figures:
                alike[setting.computation, run.seed].append(run)
    sets = [runs for runs in alike.values() if len(runs) > 1]
    if not sets:
        return None
    values = [np.array([r.figures[metric] for r in runs]) for runs in sets]
    variance = sum(len(v) * float(v.var()) for v in values) / sum(len(v) - 1 for v in values)
    twins = any(r.config.get(TWIN) for runs in sets for r in runs)
    cuts = any(len(set(map(batch_cut, runs))) > 1 for runs in sets)
    source = " and ".join(["twins"] * twins + ["cuts of one batch"] * cuts) or "repeats"
    size = max(float(np.ptp(v)) for v in values)
    return Floor(size, math.sqrt(2 * variance), sum(map(len, sets)), source)


def effects(rivals: Sequence[Setting], keys: Sequence[str], seen: Seen) -> list[Effect]:
    """Judge for each of several keys the two of its values that differ most in the loss.

    Differences are averaged over the cells of the other keys.
    """
    keys, found = [key for key in keys if key != TWIN], list[Effect]()
    for key in keys if 2 <= len(keys) <= 4 else ():
        cells: dict[str, dict[str, int]] = defaultdict(dict)
        for r in (r for r in rivals if r.identity in seen.number):
            rest = short_label({k: r.values.get(k) for k in keys if k != key})
            cells[value(r.values.get(key))].setdefault(rest, seen.number[r.identity])
        alpha = seen.level / len(keys)
        pairs = itertools.combinations(cells, 2)
        known = filter(None, (_effect(key, *pair, cells, seen.model, alpha) for pair in pairs))
        found += sorted(known, key=lambda e: (e.difference.real, abs(e.difference.mean)))[-1:]
    return found


def _effect(
    key: str, a: str, b: str, cells: Mapping[str, Mapping[str, int]], model: Model, alpha: float
) -> Effect | None:
    """Judge two values of a key over the cells of the other keys where both were trained.

    `cells`: the number of a setting by the values of the key, and of the other keys. Where the
    difference varies over them by more than noise does, name those where it holds.
    """
    ones, others = cells[a], cells[b]
    both = [c for c in ones if c in others and ones[c] != others[c]]
    if len(both) < 2:
        return None

    def over(*chosen: str, sign: float = 1.0) -> np.ndarray:
        weights = np.zeros(len(model.variances))
        for cell in chosen:
            weights[others[cell]] += sign / len(chosen)
            weights[ones[cell]] -= sign / len(chosen)
        return weights

    d = model.contrast(over(*both), len(cells), alpha)
    single = {cell: model.contrast(over(cell), 2, alpha / len(both)) for cell in both}
    low, high = (pick(both, key=lambda c: single[c].mean) for pick in (min, max))
    apart = model.contrast(over(high) + over(low, sign=-1.0), len(both), alpha)
    shown = {cell: (one.mean > 0) == (d.mean > 0) for cell, one in single.items() if one.real}
    holds, against = ([cell for cell in shown if shown[cell] is way] for way in (True, False))
    better, worse = (a, b) if d.mean > 0 else (b, a)
    interacts = abs(apart.mean) > apart.half
    return Effect(key, better, worse, d, tuple(against), tuple(holds) if interacts else None)


def same_steps(runs: Sequence[Record]) -> bool:
    """Tell whether the runs agree to the last bit in the losses of all steps that they share.

    Those are of training at each step, and of validation where several were evaluated.
    """
    first, *others = runs
    for other in others:
        a, b = (r.steps["train/loss"][: min(first.step, other.step)] for r in (first, other))
        _, at, there = np.intersect1d(
            first.columns["step"], other.columns["step"], assume_unique=True, return_indices=True
        )
        keys = (key for key in first.columns if key in other.columns and key.startswith("val/"))
        apart = (first.columns[key][at] - other.columns[key][there] for key in keys)
        if not np.array_equal(a, b, equal_nan=True) or any(map(np.any, map(np.nan_to_num, apart))):
            return False
    return True
