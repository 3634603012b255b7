"""The result of a comparison in one line. The words follow from the verdicts (judging.py); nothing is judged here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmexp.compare import settings
from llmexp.compare.figures import shown
from llmexp.compare.judging import FEW, LOSSES, Effect, Floor, Judgement, Verdict, by_seed
from llmexp.compare.places import Place
from llmexp.compare.records import Column, Comparison, Entry
from llmexp.compare.statistics import seeds_needed


@dataclass(frozen=True)
class Findings:
    """What was found out about the entries that are ranked."""

    metric: Column
    ranked: tuple[Entry, ...]  # those with the metric, the leading one first
    judged: Mapping[str, Judgement]  # of all but the leading one, by name
    budgets: Sequence[Sequence[Entry]]  # the ranked ones, those of like budgets together
    places: Mapping[str, Place]  # where an entry stands when its loss is read, by name
    floor: Floor | None
    effects: Sequence[Effect]
    left_out: Mapping[int, str]  # why a run takes no part, by id
    negligible: float
    mixed: bool  # several tokenizers
    tasks: int  # validation texts

    @property
    def loss(self) -> str:
        """The metric's name in a sentence."""
        return self.metric.title


def headline(c: Comparison, f: Findings) -> str:
    """State the result in one line."""
    if not f.ranked or not f.metric.better:
        return _nothing_to_rank(c, f)
    if len(f.ranked) == 1:
        return _alone(c, f)
    if f.tasks > 1:
        return f"No ranking: the runs have {f.tasks} different validation texts, so their losses do not compare."
    if len(f.budgets) > 1:
        return _unequal(c, f)
    if f.metric.key not in LOSSES:
        first, second = f.ranked[:2]
        start = f"{first.label} has the {_extreme(f)} {f.loss}, {figure(first, f)}"
        return f"{start}; next is {second.label}, {figure(second, f)}."
    verdicts = [f.judged[e.name].verdict for e in f.ranked[1:]]
    if set(verdicts) == {Verdict.ROUNDING}:
        spread = abs(f.ranked[-1].figures[f.metric.key] - f.ranked[0].figures[f.metric.key])
        start = f"One computation, run {len(f.ranked)} ways: {f.loss} {figure(f.ranked[0], f)}"
        if not spread:
            return f"{start}, the same to the last bit."
        return f"{start} to {figure(f.ranked[-1], f)}. The spread of {spread:.2g} is what rounding makes."
    if Verdict.ONE_SEED in verdicts and not set(verdicts) & {Verdict.UNDECIDED, Verdict.WORSE}:
        return _one_seed(f)
    return _by_seeds(f)


def _nothing_to_rank(c: Comparison, f: Findings) -> str:
    if f.mixed and f.metric.key.endswith("/loss"):
        return "No ranking: the tokenizers differ, so losses per token do not compare, and no run has bits per byte."
    if not f.metric.better and f.ranked:
        return f"{f.metric.title}: no value of it is better than another, so the runs are only listed."
    return f"No ranking: no run that takes part has a {f.loss}."


def _alone(c: Comparison, f: Findings) -> str:
    entry = f.ranked[0]
    values = list(by_seed(entry, f.metric.key, f.left_out).values())
    shares = sorted({r.rung for e in c.entries for r in e.runs if r.rung is not None})
    if shares:
        out = sum(any(r.rung is not None for r in e.runs) for e in c.entries)
        ended = "won the successive halving" if entry.state == "finished" else "is left in the successive halving"
        when = " and ".join(f"{s:.3g}" for s in (100 * share for share in shares))
        many = f"{out} other{plural(out)} {'was' if out == 1 else 'were'} left out"
        return f"{entry.label} {ended}: {f.loss} {figure(entry, f)}; {many} after {when} % of the steps."
    if len(values) > 2:
        low, high = entry.intervals[f.metric.key]
        return (
            f"{entry.label}: {f.loss} {figure(entry, f)} ± {(high - low) / 2:.2g} over {len(values)} seeds (standard "
            f"deviation {np.std(values, ddof=1):.2g}, range {digits(min(values), f)} to {digits(max(values), f)})."
        )
    if len(values) == 2:
        return (
            f"{entry.label}: {f.loss} {digits(min(values), f)} and {digits(max(values), f)}. Two seeds are too few for "
            f"an interval; add {_more_seeds(entry)}."
        )
    return f"{entry.label}: {f.loss} {figure(entry, f)}, the only run that takes part."


def _more_seeds(entry: Entry) -> str:
    used = [s for r in entry.runs if isinstance(s := r.config.get(settings.SEED), int)]
    free = [s for s in range(1, 100) if s not in used]
    return f"{settings.SEED}=" + ",".join(map(str, free[:2]))


def _unequal(c: Comparison, f: Findings) -> str:
    """Give both readings: where all have come, and at each run's own end."""
    first = f.ranked[0]
    last = min(f.ranked, key=lambda e: e.figures.get("final val/loss", math.inf))
    start = "No ranking, the budgets differ. Lowest"
    if "final val/loss" not in last.figures:
        return f"{start} {f.loss}: {first.label}, {figure(first, f)}."
    end = digits(last.figures["final val/loss"], f)
    return (
        f"{start} val loss: {first.label} at equal {c.align} ({figure(first, f)}), {last.label} at its own end ({end})."
    )


def _one_seed(f: Findings) -> str:
    rivals = [e for e in f.ranked[1:] if f.judged[e.name].verdict == Verdict.ONE_SEED]
    lead = abs(f.judged[rivals[0].name].size)
    apart = f"{lead:.2g} below {rivals[0].label}" if lead else f"the same as {rivals[0].label}"
    seeds, rounding = f"{FEW} seeds each would begin to tell", ""
    if f.floor is not None:
        rounding = f" (rounding alone makes {f.floor.size:.2g})" if f.floor.size else ""
        seeds = _at_least(f.floor, lead)
    return (
        f"Undecided, one seed each: {f.ranked[0].label} has the lowest {f.loss}, {figure(f.ranked[0], f)}, "
        f"{apart}{rounding}; {seeds}."
    )


def _at_least(floor: Floor, size: float) -> str:
    """Say how many seeds tell such a difference if seeds spread no wider than rounding does."""
    needed = seeds_needed(floor.size, size)
    if needed is None:
        return "no affordable number of seeds would tell"
    return f"{max(FEW, needed)} seeds each are the least that would tell"


def _by_seeds(f: Findings) -> str:
    best, others = f.ranked[0], f.ranked[1:]
    with_verdict = {v: [e for e in others if f.judged[e.name].verdict == v] for v in Verdict}
    undecided = [e for e in others if f.judged[e.name].verdict in (Verdict.UNDECIDED, Verdict.ONE_SEED)]
    worse = len(with_verdict[Verdict.WORSE])
    rest = f" {worse} of the {len(others)} others {'is' if worse == 1 else 'are'} worse." if worse else ""
    if worse == len(others):
        nearest = min(others, key=lambda e: abs(f.judged[e.name].size))
        d = f.judged[nearest.name].difference
        assert d is not None
        return f"{best.label} is best: {f.loss} {figure(best, f)}, {d.text} {_side(f)} {nearest.label} ({d.basis})."
    if not undecided:
        alike = listed([best.label, *(e.label for e in others if f.judged[e.name].verdict != Verdict.WORSE)])
        return f"{alike} are best, {f.loss} {figure(best, f)}: they differ by nothing that matters.{rest}"
    first = f.judged[undecided[0].name]
    start = f"Undecided: {best.label} has the {_extreme(f)} {f.loss}, {figure(best, f)}, "
    if first.difference is None:
        return f"{start}but {undecided[0].label} has too few seeds to tell.{rest}"
    direction = _side(f) if first.size * sign(f) > 0 else f"{_side(f, other=True)}, over common seeds,"
    amount = f"{first.difference.text} {direction} {undecided[0].label} ({first.difference.basis})"
    return f"{start}{amount}; {_seeds_to_go(first)}.{rest}"


def _seeds_to_go(j: Judgement) -> str:
    if j.needed is None or j.difference is None:
        return "no affordable number of seeds would settle it"
    more = max(1, j.needed - j.difference.pairs)
    return f"{more} more seed{plural(more)} each would settle such a difference"


def sign(f: Findings) -> float:
    """Return 1 where lower is better, -1 where higher is."""
    return -1.0 if f.metric.better == "higher" else 1.0


def _side(f: Findings, other: bool = False) -> str:
    return "below" if (sign(f) > 0) != other else "above"


def _extreme(f: Findings) -> str:
    return "lowest" if sign(f) > 0 else "highest"


def digits(number: float, f: Findings) -> str:
    return shown(number, f.metric.digits)


def figure(entry: Entry, f: Findings) -> str:
    return digits(entry.figures[f.metric.key], f)


def plural(count: int) -> str:
    return "" if count == 1 else "s"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return `a, b and c`, or `a, b, c and 4 more`."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
