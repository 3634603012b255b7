"""Say the result of a comparison in one line.

The words follow from the verdicts (judging.py); nothing is judged here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmexp.compare import budgets
from llmexp.compare.columns import alone, figure_text, half_width
from llmexp.compare.evidence import same_steps
from llmexp.compare.inference import FEW
from llmexp.compare.judging import RESOLUTION, SMALL
from llmexp.compare.records import REACHED, TWIN, Result, Setting, Verdict, labels
from llmexp.compare.screened import screen_line
from llmexp.compare.spending import level_of
from llmexp.compare.statistics import seeds_needed
from llmexp.compare.target import UNITS_IN_WORDS, cap_of, nobody
from llmexp.settings.labels import plural
from llmexp.system.text import amount


def headline(f: Result) -> str:
    """State the result in one line."""
    if not f.ranked:
        return _nothing_to_rank(f)
    if f.target:
        return _to_target(f)
    if f.screen:
        return screen_line(f, f.screen)
    if f.tasks > 1:
        texts = f"{f.tasks} different validation texts"
        return f"No ranking: the runs have {texts}, so their losses do not compare."
    if len(f.budgets) > 1:
        return _unequal(f)
    if len(f.ranked) == 1:
        return _won(f) or _alone(f)
    if not f.is_loss:
        return _by_figure(f)
    if f.verdicts == {Verdict.ROUNDING}:
        twins = all(r.values.get(TWIN) for r in f.ranked[1:])
        return (_won(f) if twins else "") or _one_computation(f)
    single = all(len(r.seeds) == 1 for r in f.ranked)
    return _one_seed(f) if single and f.those(Verdict.FEW_SEEDS) else _by_seeds(f)


def _nothing_to_rank(f: Result) -> str:
    if not f.metric.better:
        return f"No ranking: neither a higher nor a lower figure of {f.metric.title} is better."
    if f.mixed and f.key.endswith("/loss"):
        return "No ranking: the tokenizers differ, so losses per token do not compare."
    return f"No ranking: no run that takes part has a {f.metric.title}."


def _to_target(f: Result) -> str:
    """Say who reaches the target first, and how surely."""
    best, others = f.ranked[0], f.ranked[1:]
    if not f.reached:
        return nobody(f)
    key, unit = f.key, UNITS_IN_WORDS[f.align]
    worse, few = f.those(Verdict.WORSE), f.those(Verdict.FEW_SEEDS)
    undecided = f.those(Verdict.UNDECIDED)
    cap = cap_of(f)
    at_cap = [r for r in (*few, *undecided) if best.capped and r.figures.get(REACHED)]
    tied = [r for r in at_cap if abs(r.mean - best.mean) <= RESOLUTION * cap]

    def when(r: Setting) -> str:
        if key in r.figures:
            return f"after {alone(r, f.metric)} {unit}"
        return f"in {round(r.figures[REACHED] * len(r.seeds))} of {len(r.seeds)} runs"

    if tied:
        return (
            f"Undecided: {labels((best, *tied))} reach {f.target} behind {f.digits(cap)} {unit}, "
            "where the first run that never does ends: "
            f"{best.label} {when(best)}, {tied[0].label} {when(tied[0])}."
        )
    level = [r for r in others if r.size is not None and abs(r.size) <= RESOLUTION * best.mean]
    equal = [r for r in level if r not in undecided]
    near = next((r for r in (*undecided, *few, *worse, *others) if r not in equal), None)
    first = "first, " if near and near not in level else ""
    verb, together = ("reach", "together, ") if equal else ("reaches", "")
    start = f"{labels((best, *equal))} {verb} {f.target} {first}{together}{when(best)}"
    if near:
        start += _beside(near, when(near), near in level)
    if undecided:
        return f"Undecided: {start}; {_seeds_to_go(undecided[0], f)}."
    if few:
        seeds = "one seed each" if all(len(r.seeds) == 1 for r in f.ranked) else "too few seeds"
        return f"Undecided, {seeds}: {start}; {FEW} seeds each would begin to tell."
    if worse:
        return f"{start}. {_of_others(len(worse), len(others) - len(equal), 'slower')}"
    return f"{start}.{' Rounding makes the difference.' if near else ''}"


def _beside(near: Setting, when: str, level: bool) -> str:
    """Say how far behind the first setting another one reaches a target, where that is known."""
    if near.size is None:
        return f"; {near.label} {when}"
    size, side = (0.0, "from") if level else (near.size, "before")
    basis = f" ({near.basis})" if near.basis else ""
    return f", {amount(size, near.half)} {side} {near.label}{basis}"


def _of_others(count: int, others: int, what: str) -> str:
    """Return `2 of the 3 others are worse.`."""
    if count == others:
        return f"The other is {what}." if others == 1 else f"All {others} others are {what}."
    return f"{count} of the {others} others {'is' if count == 1 else 'are'} {what}."


def _leads(f: Result, of: str = "") -> str:
    """Return `accum=1 has the lowest val loss, 2.6`."""
    best = f.ranked[0]
    return f"{best.label} has the {f.extreme} {f.metric.title}{of}, {alone(best, f.metric)}"


def _by_items(f: Result) -> str:
    """Tell whether the items of a task tell the first two models apart.

    The errors of both count as if they had answered other items: at most that wide where both err
    on the same.
    """
    first, second = f.ranked[:2]
    halves = [half for e in (first, second) if (half := half_width(e, f.metric))]
    if len(halves) < 2:
        return ""
    apart = abs(first.figures[f.key] - second.figures[f.key])
    verb = "tell" if apart > math.hypot(*halves) else "do not tell"
    size = amount(apart, math.hypot(*halves))
    return f"; the items {verb} these models apart, {size} between them"


def _by_figure(f: Result) -> str:
    """Name the setting that leads by a figure that is no loss, or all that do, and the next."""
    best, key = f.ranked[0], f.key
    equal = [r for r in f.ranked if r.figures[key] == best.figures[key]]
    rest = f.ranked[len(equal) :]
    following = f"; next is {rest[0].label}, {alone(rest[0], f.metric)}" if rest else ""
    if len(equal) == 1:
        return f"{_leads(f)}{following}{_by_items(f)}."
    what = f.extreme if rest else "same"
    return f"{labels(equal)} have the {what} {f.metric.title}, {alone(best, f.metric)}{following}."


def _won(f: Result) -> str:
    """Name the setting that successive halving left in; empty where there was none, or a search."""
    only, others = f.ranked[0], [e for e in f.settings if e not in f.ranked]
    out = [e for e in others if any(r.rung is not None for r in e.runs)]
    if not out or any(r.trial for e in out for r in e.runs):
        return ""
    ended = all(r.state == "finished" for r in only.runs if r.rung is None)
    verb = "won" if ended else "is left in"
    shares = sorted({100 * r.rung for e in out for r in e.runs if r.rung is not None})
    when = " and ".join(f"{s:.3g}" for s in shares)
    were = "was" if len(out) == 1 else "were"
    size = f.floor.size if f.floor else 0.0
    rounding = f" Rounding alone makes {amount(size)}." if size else ""
    return (
        f"{only.label} {verb} the successive halving: {f.metric.title} {alone(only, f.metric)}; "
        f"{plural(len(out), 'other')} {were} left out after {when} % of the steps.{rounding}"
    )


def _alone(f: Result) -> str:
    only, why = f.ranked[0], "with an evaluation there" if f.without else "that takes part"
    more = f", the only run {why}" if len(only.seeds) == 1 else ""
    return f"{only.label}: {_over_seeds(only, f)}{more}."


def _over_seeds(r: Setting, f: Result) -> str:
    """Give the metric of one setting: mean, interval, deviation and range over its seeds."""
    values = list(r.seeds.values())
    low, high = f.digits(min(values)), f.digits(max(values))
    if len(values) == 1:
        return f"{f.metric.title} {alone(r, f.metric)}"
    if len(values) == 2:
        return f"{f.metric.title} {low} and {high}. Two seeds are too few for an interval"
    return (
        f"{f.metric.title} {figure_text(r, f.metric)} over {len(values)} seeds "
        f"(standard deviation {np.std(values, ddof=1):.2g}, range {low} to {high})"
    )


def _one_computation(f: Result) -> str:
    """Describe cuts of one batch, twins and repeats, which nothing but rounding sets apart."""
    start = f"One computation, run {len(f.ranked)} ways: "
    if any(len(r.seeds) > 1 for r in f.ranked):
        rounding = f"; rounding makes {amount(f.floor.size)} of it" if f.floor else ""
        return f"{start}{_over_seeds(f.ranked[0], f)}{rounding}."
    figures = [r.figures[f.key] for r in f.ranked]
    low, high = f.digits(min(figures)), f.digits(max(figures))
    start += f"{f.metric.title} {low}"
    if f.floor is None:
        both = "each with another seed, so seeds and rounding both make the spread"
        return f"{start} to {high}, {both}."
    if not f.floor.size:
        if same_steps([r for rival in f.ranked for r in rival.taking_part]):
            return f"{start}, the same to the last bit."
        return f"{start} in each, but other losses differ, so rounding does move these runs."
    return f"{start} to {high}. The spread of {amount(f.floor.size)} is what rounding makes."


def _unequal(f: Result) -> str:
    """Give both readings of runs with unequal budgets.

    They are those where all have come, and at each run's own end.
    """
    rivals = [r for group in f.budgets for r in group]
    equal = budgets.equal(round(r.place.planned) for r in rivals if r.place)
    if equal and not f.own_ends:
        there = "the runs stand at other parts of their schedules there"
        then = "Aligned by tokens, they are read at their ends"
        return f"No ranking at equal {f.align}: {there}. {then}."
    first = f.ranked[0]
    start = "No ranking, the budgets differ. Lowest"
    if equal:
        start = f"No ranking: the runs were never all evaluated at equal {f.align}. Lowest"
    if f.key != "val/loss":
        return f"{start} {f.metric.title}: {first.label}, {alone(first, f.metric)}."
    start += " val loss:"
    ends = {r: r.figures.get("final val/loss", math.inf) for r in rivals}
    last = min(ends, key=ends.__getitem__)
    end = f"{last.label} at its own end ({f.digits(ends[last])})"
    if f.without or (f.own_ends and not equal):
        return f"{start} {end}. At equal {f.align} not all have an evaluation."
    if last is first and ends[last] == first.figures["val/loss"]:
        return f"{start} {end}."
    return f"{start} {first.label} at equal {f.align} ({alone(first, f.metric)}), {end}."


def _one_seed(f: Result) -> str:
    rival, equal = f.those(Verdict.FEW_SEEDS)[0], f.those(Verdict.SAME)
    lead, wanted = abs(rival.size or 0.0), needed(rival, f)
    apart = f"{amount(lead)} {_side(f)}" if lead else "the same as"
    seeds, rounding = f"{wanted} seeds each would begin to tell", ""
    if floor := f.floor:
        rounding = f" (rounding alone makes {amount(floor.size)})" if floor.size else ""
        seeds = f"{wanted} seeds each are the least that would tell"
        seeds = seeds if wanted else "no affordable number of seeds would tell"
    leads = _leads(f)
    if equal:
        names = labels((f.ranked[0], *equal))
        leads = f"{names} computed the same, {f.metric.title} {alone(f.ranked[0], f.metric)}"
    return f"Undecided, one seed each: {leads}, {apart} {rival.label}{rounding}; {seeds}."


def _by_seeds(f: Result) -> str:
    best = f.ranked[0]
    worse, few = f.those(Verdict.WORSE), f.those(Verdict.FEW_SEEDS)
    alike, undecided = f.those(*SMALL), f.those(Verdict.UNDECIDED)
    others = len(worse) + len(few) + len(undecided)
    if undecided:  # the headline names one of the settings that are alike to the best, or none
        others += len(alike)
    rest = f" {_of_others(len(worse), others, 'worse')}" if worse else ""
    if few:
        rest += f" Too few seeds to judge {labels(few)}."
    if undecided:
        return f"{_between(best, undecided[0], f)}.{rest}"
    if alike:
        lead = "lead, alike" if few else "are best, alike" if worse else "are alike"
        if len(best.seeds) == 1:
            lead = "computed the same,"
        names = labels((best, *alike))
        return f"{names} {lead} {_within(alike)}: {f.metric.title} {alone(best, f.metric)}.{rest}"
    if worse:
        nearest = min(worse, key=lambda r: abs(r.size or 0.0))
        assert nearest.difference is not None
        lead = "leads those with seeds" if few else "is best"
        figure = alone(best, f.metric)
        return (
            f"{best.label} {lead}: {f.metric.title} {figure}, {nearest.difference.text} "
            f"{_side(f)} {nearest.label} ({nearest.difference.basis}).{rest if few else ''}"
        )
    counts = ", ".join(f"{r.label} {len(r.seeds)}" for r in f.ranked[:4])
    lead = _leads(f, " of those with most seeds")
    return f"Undecided: {lead}, but too few seeds are shared ({counts})."


def _within(alike: Sequence[Setting]) -> str:
    """Say how far settings that are alike can be from the leading one."""
    ends = [abs(r.difference.mean) + r.difference.half for r in alike if r.difference]
    return f"to within {max(ends):.2g}" if max(ends, default=0.0) > 1e-12 else "to the last bit"


def _between(best: Setting, other: Setting, f: Result) -> str:
    """Say how the leading setting stands to one that is not decided, and what would decide it."""
    assert other.difference is not None
    ours, theirs = (f.metric.sign * r.figures[f.key] for r in (best, other))
    lead = _leads(f)
    if theirs < ours:
        lead = f"{best.label} leads over common seeds, {f.metric.title} {alone(best, f.metric)}"
    side = _side(f, other=(other.size or 0.0) * f.metric.sign < 0)
    beside = f"{other.difference.text} {side} {other.label} ({other.difference.basis})"
    return f"Undecided: {lead}, {beside}; {_seeds_to_go(other, f)}"


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


def _seeds_to_go(other: Setting, f: Result) -> str:
    wanted, before = needed(other, f), ""
    if f.looks and not f.target:  # which the looks did not judge
        before = f.looks[-1].why
        if not f.looks[-1].is_last:
            return before or "the sweep has not come to its end"
        before += "; "
    if other.capped:
        return f"{before}longer runs would tell"
    if other.difference is None or wanted is None:
        return f"{before}no affordable number would"
    return f"{before}{plural(wanted - other.difference.seeds, 'more seed')} each would tell"


def _side(f: Result, other: bool = False) -> str:
    return "below" if (f.metric.sign > 0) != other else "above"
