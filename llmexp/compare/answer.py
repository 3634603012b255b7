"""The result of a comparison in one line. The words follow from the verdicts (judging.py); nothing
is judged here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmexp.compare import budgets
from llmexp.compare.figures import LOSSES, shown, with_interval
from llmexp.compare.findings import Findings
from llmexp.compare.judging import FEW, Floor, Judgement, Verdict, all_pairs
from llmexp.compare.records import Comparison, Entry
from llmexp.compare.settings import SEED
from llmexp.compare.statistics import seeds_needed
from llmexp.labels import plural

SETTLED = {Verdict.SAME, Verdict.NEGLIGIBLE, Verdict.ROUNDING}  # no difference that matters


def headline(c: Comparison, f: Findings) -> str:
    """State the result in one line."""
    if not f.ranked:
        return _nothing_to_rank(f)
    if f.tasks > 1:
        return (
            f"No ranking: the runs have {f.tasks} different validation texts, so their losses "
            "do not compare."
        )
    if len(f.budgets) > 1:
        return _unequal(c, f)
    if len(f.ranked) == 1:
        return _alone(c, f)
    if f.metric.key not in LOSSES:
        first, second = f.ranked[:2]
        start = f"{first.label} has the {_extreme(f)} {f.loss}, {figure(first, f)}"
        return f"{start}; next is {second.label}, {figure(second, f)}."
    if {j.verdict for j in f.judged.values()} == {Verdict.ROUNDING}:
        return _one_computation(f)
    if all(len(seeds) == 1 for seeds in f.seeds.values()):
        return _one_seed(f)
    return _by_seeds(f)


def _nothing_to_rank(f: Findings) -> str:
    if not f.metric.better:
        return f"No ranking: neither a higher nor a lower figure of {f.loss} is better."
    if f.mixed and f.metric.key.endswith("/loss"):
        return "No ranking: the tokenizers differ, so losses per token do not compare."
    return f"No ranking: no run that takes part has a {f.loss}."


def _alone(c: Comparison, f: Findings) -> str:
    entry = f.ranked[0]
    out = [e for e in c.entries if e is not entry and any(r.rung is not None for r in e.runs)]
    if out:
        ended = (
            "won the successive halving"
            if entry.state == "finished"
            else "is left in the successive halving"
        )
        shares = sorted({100 * r.rung for e in out for r in e.runs if r.rung is not None})
        many = f"{plural(len(out), 'other')} {'was' if len(out) == 1 else 'were'} left out"
        when = " and ".join(f"{s:.3g}" for s in shares)
        return (
            f"{entry.label} {ended}: {f.loss} {figure(entry, f)}; {many} after {when} % of the "
            "steps."
        )
    only = (
        ", the only run with an evaluation there" if f.without else ", the only run that takes part"
    )
    return f"{entry.label}: {_seeds_of(entry, f)}{only if len(f.seeds[entry.name]) == 1 else ''}."


def _seeds_of(entry: Entry, f: Findings) -> str:
    """Give the metric of one setting: mean, interval, deviation and range over its seeds."""
    values = list(f.seeds[entry.name].values())
    low, high = digits(min(values), f), digits(max(values), f)
    if len(values) > 2:
        low_end, high_end = entry.intervals[f.metric.key]
        mean = with_interval(entry.figures[f.metric.key], (high_end - low_end) / 2, f.metric.digits)
        return (
            f"{f.loss} {mean} over {len(values)} seeds (standard deviation "
            f"{np.std(values, ddof=1):.2g}, range {low} to {high})"
        )
    if len(values) == 2:
        more = "the sweep plans more" if planned([entry]) else f"add {_more_seeds(entry)}"
        return f"{f.loss} {low} and {high}. Two seeds are too few for an interval; {more}"
    return f"{f.loss} {figure(entry, f)}"


def _more_seeds(entry: Entry) -> str:
    used = [s for r in entry.runs if isinstance(s := r.config.get(SEED), int)]
    free = [s for s in range(1, 100) if s not in used]
    return f"{SEED}=" + ",".join(map(str, free[:2]))


def planned(entries: Sequence[Entry]) -> dict[Path, int]:
    """Return how many seeds of these entries each sweep has still to train, for the sweeps that
    have."""
    found: Counter[Path] = Counter()
    for e in entries:
        found.update({r.sweep: r.planned for r in e.runs if r.sweep})
    return +found


def _one_computation(f: Findings) -> str:
    """Describe cuts of one batch, twins and repeats, which nothing but rounding sets apart."""
    first, last = (
        extreme(f.ranked, key=lambda e: e.figures[f.metric.key]) for extreme in (min, max)
    )
    if any(len(seeds) > 1 for seeds in f.seeds.values()):
        start = f"One computation, run {len(f.ranked)} ways: {_seeds_of(f.ranked[0], f)}"
        return start + (f"; rounding makes {f.floor.size:.2g} of it." if f.floor else ".")
    start = f"One computation, run {len(f.ranked)} ways: {f.loss} {figure(first, f)}"
    if f.floor is None:
        return (
            f"{start} to {figure(last, f)}, each with another seed, so seeds and rounding both "
            "make the spread."
        )
    if not f.floor.size:
        return f"{start}, the same to the last bit."
    return f"{start} to {figure(last, f)}. The spread of {f.floor.size:.2g} is what rounding makes."


def _unequal(c: Comparison, f: Findings) -> str:
    """Give both readings of runs with unequal budgets: where all have come, and at each run's own
    end."""
    if budgets.equal(round(p.planned) for p in f.places.values()):
        return (
            f"No ranking at equal {c.align}: the runs stand at other parts of their schedules "
            "there. --align tokens reads them at their ends."
        )
    first, start = f.ranked[0], "No ranking, the budgets differ. Lowest"
    if f.metric.key != "val/loss":
        return f"{start} {f.loss}: {first.label}, {figure(first, f)}."
    taking_part = [e for group in f.budgets for e in group]
    last = min(taking_part, key=lambda e: e.figures.get("final val/loss", math.inf))
    end = f"{last.label} at its own end ({digits(last.figures['final val/loss'], f)})"
    if f.without:
        return f"{start} val loss: {end}. At equal {c.align} not all have an evaluation."
    if last is first and last.figures["final val/loss"] == first.figures["val/loss"]:
        return f"{start} val loss: {end}."
    return f"{start} val loss: {first.label} at equal {c.align} ({figure(first, f)}), {end}."


def _one_seed(f: Findings) -> str:
    best = f.ranked[0]
    rivals = [e for e in f.ranked[1:] if f.judged[e.name].verdict == Verdict.FEW_SEEDS]
    lead = abs(f.judged[rivals[0].name].size or 0.0)
    apart = f"{lead:.2g} {_side(f)} {rivals[0].label}" if lead else f"the same as {rivals[0].label}"
    seeds, rounding = f"{FEW} seeds each would begin to tell", ""
    if f.floor is not None:
        rounding = f" (rounding alone makes {f.floor.size:.2g})" if f.floor.size else ""
        seeds = _at_least(f.floor, lead, len(f.ranked))
    start = (
        f"Undecided, one seed each: {best.label} has the {_extreme(f)} {f.loss}, {figure(best, f)}"
    )
    return f"{start}, {apart}{rounding}; {seeds}."


def _at_least(floor: Floor, size: float, count: int) -> str:
    """Say how many seeds tell such a difference if seeds spread no wider than rounding does."""
    needed = seeds_needed(floor.spread, size, all_pairs(count))
    if needed is None:
        return "no affordable number of seeds would tell"
    return f"{max(FEW, needed)} seeds each are the least that would tell"


def _by_seeds(f: Findings) -> str:
    best = f.ranked[0]
    verdict = {
        name: j.verdict for name, j in f.judged.items() if j.verdict != Verdict.ROUNDING
    }  # no other setting
    others = [e for e in f.ranked if e.name in verdict]
    worse = [e for e in others if verdict[e.name] == Verdict.WORSE]
    undecided = [e for e in others if verdict[e.name] in (Verdict.UNDECIDED, Verdict.BETTER)]
    few = [e for e in others if verdict[e.name] == Verdict.FEW_SEEDS]
    alike = [e for e in others if verdict[e.name] in SETTLED]
    rest = (
        f" {len(worse)} of the {len(others)} others {'is' if len(worse) == 1 else 'are'} worse."
        if worse
        else ""
    )
    if few:
        rest += f" Too few seeds to judge {listed([e.label for e in few])}."
    if undecided:
        return f"{_between(best, undecided[0], f)}.{rest}"
    if worse and not alike:
        nearest = min(worse, key=lambda e: abs(f.judged[e.name].size or 0.0))
        d = f.judged[nearest.name].difference
        assert d is not None
        is_best = "is best" if not few else "leads those with seeds"
        text = (
            f"{best.label} {is_best}: {f.loss} {figure(best, f)}, {d.text} {_side(f)} "
            f"{nearest.label} ({d.basis})."
        )
        return text + (rest if few else "")
    if alike:
        names = listed([best.label, *(e.label for e in alike)])
        lead = "are best" if worse and not few else "lead" if few else "are alike"
        return (
            f"{names} {lead}, {f.loss} {figure(best, f)}: they differ by nothing that "
            f"matters.{rest}"
        )
    counts = ", ".join(f"{e.label} {len(f.seeds[e.name])}" for e in f.ranked[:4])
    start = (
        f"Undecided: {best.label} has the {_extreme(f)} {f.loss} of those with most seeds, "
        f"{figure(best, f)}"
    )
    return f"{start}, but too few seeds are shared ({counts})."


def _between(best: Entry, other: Entry, f: Findings) -> str:
    """Say how the leading entry stands to one that is not decided, and what would decide it."""
    j = f.judged[other.name]
    assert j.difference is not None
    start = f"Undecided: {best.label} has the {_extreme(f)} {f.loss}, {figure(best, f)}"
    if other.figures[f.metric.key] * f.metric.sign < best.figures[f.metric.key] * f.metric.sign:
        start = f"Undecided: {best.label} leads over common seeds, {f.loss} {figure(best, f)}"
    side = _side(f, other=(j.size or 0.0) * f.metric.sign < 0)
    return (
        f"{start}, {j.difference.text} {side} {other.label} ({j.difference.basis}); "
        f"{_seeds_to_go(j)}"
    )


def _seeds_to_go(j: Judgement) -> str:
    if j.needed is None or j.difference is None:
        return "no affordable number of seeds would settle it"
    more = j.needed - j.difference.pairs
    if more < 1:
        return "more seeds would settle it"
    return f"{plural(more, 'more seed')} each would settle such a difference"


def _side(f: Findings, other: bool = False) -> str:
    return "below" if (f.metric.sign > 0) != other else "above"


def _extreme(f: Findings) -> str:
    return "lowest" if f.metric.sign > 0 else "highest"


def digits(number: float, f: Findings) -> str:
    """Return a number with the digits of the metric."""
    return shown(number, f.metric.digits)


def figure(entry: Entry, f: Findings) -> str:
    """Return the metric of an entry."""
    return digits(entry.figures[f.metric.key], f)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return `a, b and c`, or `a, b, c and 4 more`."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
