"""Say the result of a comparison in one line of one shape.

`STATUS: leaders, figure, distance to the nearest other one (basis); what is missing.` The words
follow from the verdicts (judging.py); nothing is judged here.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from llmexp.compare.budgets import equal
from llmexp.compare.figures import course
from llmexp.compare.judging import SMALL, THIRD_SEED, needed, same_steps, unmoved
from llmexp.compare.position import common_rows
from llmexp.compare.records import (
    REACHED,
    Result,
    Setting,
    Verdict,
    alone,
    figure_text,
    half_width,
    labels,
)
from llmexp.config.labels import plural, short_value
from llmexp.system.text import amount


def headline(f: Result) -> str:
    """State the result in one line."""
    if why := _no_order(f):
        return f"No ranking: {why}."
    if f.screen:
        told = [_knob(f, key) for key in f.screen.found]
        size = f"{plural(len(f.screen.knobs), 'knob')} in {plural(f.screen.runs, 'run')}"
        largest = _knob(f, next(iter(f.screen.knobs)))
        return f"Effects of {size}: {'; '.join(told) or f'none is sure; the largest: {largest}'}."
    best, *others = f.ranked
    if f.judged or f.target:
        lead, near = [best, *f.those(*SMALL)], runner_up(f)
        one = ", one seed each" * all(len(r.seeds) == 1 for r in f.ranked)
        unsettled = near and near.verdict != Verdict.WORSE
        status = f"Undecided{one}" if unsettled else "Best" if near else "Alike"
    else:
        lead = [r for r in f.ranked if r.figures[f.key] == best.figures[f.key]]
        near = next((r for r in others if r not in lead), None)
        status = f.extreme.capitalize() if near else "Same"
    if len(lead) == 1 and not near:
        return f"{_single(f)}."
    figure = f"{f.metric.title} {_figure(f, best)}"
    within = max((abs(r.size or 0.0) + (r.half or 0.0) for r in lead), default=0.0)
    alike = f"alike to within {within:.2g}" if within > 1e-12 else "alike to the last bit"
    parts = [labels(lead), figure, *[alike] * (len(lead) > 1), *([_apart(f, near)] if near else [])]
    marks = Counter(r.mark for r in others if r not in (near, *lead) and r.mark)
    rest = f" Others: {', '.join(f'{n} {mark}' for mark, n in marks.items())}." * bool(marks)
    return f"{status}: {', '.join(filter(None, parts))}{_missing(f, near)}.{rest}"


def runner_up(f: Result) -> Setting | None:
    """Return the setting that the headline holds against the leading one; None where all is alike.

    It is the best of those that are undecided, else the one that is worse by least.
    """
    worse = sorted(f.those(Verdict.WORSE), key=lambda r: abs(r.size or 0.0))
    open_ = [*f.those(Verdict.UNDECIDED), *f.those(Verdict.FEW_SEEDS)]
    return next(iter([*open_, *worse]), None)


def _no_order(f: Result) -> str:
    """Say why nothing leads; empty where something does."""
    if not f.ranked:
        if not f.metric.better:
            return f"neither a higher nor a lower {f.metric.title} is better"
        if f.mixed and f.key.endswith("/loss"):
            return "the tokenizers differ, so losses per token do not compare"
        return f"no run that takes part has a {f.metric.title}"
    if f.target:
        return "" if f.reached else f"no run reaches {f.target}{_nearest_miss(f)}"
    if f.tasks > 1:
        return f"the runs have {f.tasks} different validation texts, so losses do not compare"
    if len(f.budgets) < 2:
        return ""
    why, first = "the budgets differ", f.ranked[0]
    if equal(round(g[0].place.planned) for g in f.budgets if g[0].place):
        why = f"at equal {f.align} their schedules are at different places"
        if f.own_ends:
            why = f"the runs were never all evaluated at equal {f.align}"
    own = f.align_at is None or f.key in ("final val/loss", "best val/loss")
    at = "at its own end" if own else f"at equal {f.align}"
    ends = {
        r: y for g in f.budgets for r in g if (y := r.figures.get("final val/loss")) is not None
    }
    last = min(ends, key=ends.__getitem__, default=None)
    then = ""
    if last and f.key == "val/loss" and ends[last] != first.figures[f.key]:
        then = f", at its own end {last.label}, {f.digits(ends[last])}"
    return (
        f"{why}; {f.extreme} {at} is {first.label}, {f.metric.title} {alone(first, f.metric)}{then}"
    )


def _nearest_miss(f: Result) -> str:
    """Say how close the best run came to a target that none reaches."""
    assert f.target is not None
    sign, found = f.target.sign, list[tuple[float, str]]()
    for r, counted in common_rows(f.taking_part, f.align, [f.target.key]).items():
        if len(seen := course(counted, f.target.key)[1]):
            found.append((float(np.min(sign * seen)), f.label_of(r)))
    size, label = min(found, default=(0.0, ""))
    return f"; the nearest was {sign * size:.5g}, of {label}" if found else ""


def _single(f: Result) -> str:
    """Describe the one setting that is ranked, or the one computation that was run several ways."""
    best, values = f.ranked[0], list(f.ranked[0].seeds.values())
    halved = any(r.rung is not None for r in f.runs) and not any(r.trial for r in f.runs)
    several = len(f.ranked) > 1
    status = "Only computation" if several else "Only setting"
    status = "Left in by the successive halving" if halved else status
    text = f"{status}: {labels(f.ranked)}, {f.metric.title} {_figure(f, best)}"
    if len(values) == 2:
        text += f" ({' and '.join(map(f.digits, sorted(values)))}; two seeds have no interval)"
    elif len(values) > 2:
        low, high, spread = f.digits(min(values)), f.digits(max(values)), np.std(values, ddof=1)
        text += f" over {len(values)} seeds (standard deviation {spread:.2g}, {low} to {high})"
    if f.floor and f.floor.size:
        return f"{text}, of which rounding makes {amount(f.floor.size)}"
    if f.floor and (several or halved):
        same = same_steps([r for s in f.ranked for r in s.taking_part])
        return f"{text}, {'the same to the last bit' if same else 'though other losses differ'}"
    return text + ", each with another seed, so seeds and rounding both count" * several


def _figure(f: Result, s: Setting) -> str:
    if f.key not in s.figures:  # not all of its runs reach the target
        return f"in {round(s.figures[REACHED] * len(s.seeds))} of {len(s.seeds)} runs"
    return figure_text(s, f.metric) if len(f.ranked) == 1 else alone(s, f.metric)


def _apart(f: Result, other: Setting) -> str:
    """Say how far the leading setting is from another one."""
    if not f.judged and not f.target:
        first = f.ranked[0]
        halves = [half for s in (first, other) if (half := half_width(s, f.metric))]
        apart, half = abs(first.figures[f.key] - other.figures[f.key]), math.hypot(*halves)
        told = "" if apart > half else "not "
        items = f", {told}significant over the items, {amount(apart, half)} between them"
        return f"then {other.label}, {alone(other, f.metric)}{items * (len(halves) > 1)}"
    if other.size is None:
        return f"then {other.label}, {_figure(f, other)}"
    single = all(len(s.seeds) == 1 for s in f.ranked)
    few = "too few seeds" * (other.verdict == Verdict.FEW_SEEDS)
    basis = f" ({other.basis or few})" * (not single and bool(other.basis or few))
    if not other.size and not other.half:
        return f"the same as {other.label}{basis}"
    side = "below" if other.size >= 0 else "above"
    return f"{amount(other.size, other.half)} {side} {other.label}{basis}"


def _missing(f: Result, near: Setting | None) -> str:
    """Say what would decide between the leading setting and another one."""
    if near is None or near.verdict not in (Verdict.UNDECIDED, Verdict.FEW_SEEDS):
        return ""
    if not f.judged and not f.target:
        return ""
    before = ""
    if f.looks and not f.target:  # which the looks did not judge
        before = f"; {f.looks[-1].why or 'the sweep has not come to its end'}"
        if not f.looks[-1].is_last:
            return before
    if near.early:
        return f"{before}; only evaluations before the first would decide"
    if near.capped:
        return f"{before}; longer runs would decide"
    if not f.target and unmoved(f.ranked):
        return f"{before}; figures that no seed moves decide nothing"
    if f.far:  # which the spread is of
        return before
    return f"{before}; {_seeds(f, near)}"


def _seeds(f: Result, near: Setting) -> str:
    """Say how many seeds would decide."""
    wanted, d = needed(near, f), near.difference
    if not wanted:
        return "no affordable number of seeds would decide"
    if d and d.vague:
        return THIRD_SEED
    if near.verdict == Verdict.FEW_SEEDS:
        if f.floor:
            return f"{wanted} seeds each would decide at the earliest"
        return f"2 shared or {wanted} unshared seeds each are the fewest that can decide"
    more = plural(wanted - d.seeds if d else wanted, "more seed")
    return f"about {more} each would decide a difference of this size (80 % power)"


def _knob(f: Result, key: str) -> str:
    """Return what a knob of a screen does."""
    assert f.screen is not None
    c, better = f.screen.knobs[key], f.screen.better(key, f.metric.sign)
    worse = next(level for level in f.screen.levels[key] if level is not better)
    does = "lowers" if f.metric.sign > 0 else "raises"
    side = f"{f.names[key]}={short_value(better)} instead of {short_value(worse)}"
    return f"{side} {does} {f.metric.title} by {amount(c.effect, c.half)}"
