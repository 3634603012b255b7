"""Say what must be known beside the result of a comparison (notes), and what it rests on (why)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmexp.compare.answer import digits, listed, planned
from llmexp.compare.budgets import Spent, common, equal
from llmexp.compare.figures import LOSSES, counts, number, positions
from llmexp.compare.findings import Findings
from llmexp.compare.judging import Effect, Verdict, all_pairs, same_batches, stepwise
from llmexp.compare.places import Place
from llmexp.compare.provenance import differences
from llmexp.compare.records import Comparison, Record
from llmexp.labels import plural, short_keys
from llmexp.labels import shown as value
from llmexp.rundir import how_to_resume

UNITS = {"tokens": "tokens", "steps": "steps", "time": "s"}


def notes(c: Comparison, f: Findings) -> tuple[str, ...]:
    """Return short lines, the most important one first."""
    said: list[str] = []
    if len(f.budgets) > 1:
        said += _budgets(c, f)
    if f.floor is not None and any(j.verdict != Verdict.ROUNDING for j in f.judged.values()):
        size = f"differences of up to {f.floor.size:.2g}" if f.floor.size else "no difference"
        said.append(f"Rounding alone makes {size} here ({f.floor.source}).")
    said += [_effect(c, e, f) for e in f.effects if _matters(e, f)][:2]
    said += _left_out(c, f)
    said += _unequal_seeds(f)
    said += [
        f"{plural(count, 'more run')} of these settings {'is' if count == 1 else 'are'} planned: "
        f"{how_to_resume(sweep)}"
        for sweep, count in planned(f.ranked).items()
    ]
    if f.mixed:
        said.append("The tokenizers differ, so losses per token do not compare; bits per byte do.")
    return (*said, *differences(_taking_part(c, f))[:2])


def why(c: Comparison, f: Findings, limiting: Record | None) -> tuple[str, ...]:
    """Return what the result rests on, in sentences."""
    said = (
        _tokens(c, f)
        + _where(c, f, limiting)
        + _batch(c)
        + _method(c, f)
        + _steps(c, f)
        + _halving(c, f)
    )
    said += [_effect(c, e, f) for e in f.effects if not _matters(e, f)]
    runs = [r for e in c.entries for r in e.runs]
    if len(models := {str(m) for r in runs if (m := r.facts.get("model"))}) > 1:
        said.append(f"The models differ: {listed(sorted(models))}.")
    sizes = {
        s
        for r in runs
        if id(r) not in f.left_out and (s := number(r.facts.get("eval_sequences"))) is not None
    }
    if len(sizes) > 1 and not f.mixed:
        said.append(
            "The evaluations are over different numbers of sequences, which adds to their "
            "differences."
        )
    if len(devices := {str(d) for r in runs if (d := r.facts.get("device_name"))}) > 1:
        said.append(
            f"The devices differ ({listed(sorted(devices))}), so rates and times do not compare."
        )
    return (*said, *differences(_taking_part(c, f))[2:])


def _taking_part(c: Comparison, f: Findings) -> list[Record]:
    return [r for e in c.entries for r in e.runs if id(r) not in f.left_out]


def _budgets(c: Comparison, f: Findings) -> list[str]:
    """Say how far each budget had come where losses are read, and name the sweep that would settle
    the question."""
    found = _places(c, f)
    if not found:
        return []
    names, places = zip(*found, strict=True)
    shares = [f"{100 * p.progress:.0f}" for p in places]
    if len(set(shares)) == 1:
        said = []
    elif len(names) > 4:
        said = [f"Losses are read at {shares[-1]} to {shares[0]} % of the whole runs."]
    else:
        said = [f"Losses are read at {', '.join(shares)} % of the whole runs ({_joined(names)})."]
    return said if equal(round(p.planned) for p in places) else [*said, _settles(c, places)]


def _places(c: Comparison, f: Findings) -> list[tuple[str, Place]]:
    """Return the name and the place of each group of budgets, the shortest first."""
    found = [(n, f.places.get(g[0].name)) for n, g in zip(_names(c, f), f.budgets, strict=True)]
    known = [(name, place) for name, place in found if place is not None]
    return sorted(known, key=lambda pair: pair[1].planned) if len(known) == len(found) else []


def _joined(names: Sequence[str]) -> str:
    """Return `accum=1, 2, 4` for accum=1, accum=2, accum=4."""
    keys = {name.partition("=")[0] for name in names}
    if len(keys) > 1 or any(name.count("=") != 1 for name in names):
        return listed(names)
    return f"{keys.pop()}=" + ", ".join(name.partition("=")[2] for name in names)


def _names(c: Comparison, f: Findings) -> list[str]:
    """Name each group of budgets by the one key that tells them apart, else by its first entry."""
    short = short_keys(c.factors)
    for key in c.factors:
        values = [{value(e.values.get(key)) for e in group} for group in f.budgets]
        if all(len(v) == 1 for v in values) and len(set.union(*values)) == len(values):
            return [f"{short[key]}={next(iter(v))}" for v in values]
    return [listed([e.label for e in group], 1) for group in f.budgets]


def _settles(c: Comparison, places: Sequence[Place]) -> str:
    if any(key.startswith("train.max_") for e in c.entries for r in e.runs for key in r.swept):
        return (
            "The budget itself was swept: read each run at its own end, as points of a curve "
            "over tokens."
        )
    tokens = common(
        [
            Spent({}, round(p.planned), max(1, round(p.planned / (p.grain or p.planned))))
            for p in places
        ]
    )
    return f"To settle it: the same with train.max_tokens={tokens} for every point."


def _matters(e: Effect, f: Findings) -> bool:
    return e.difference.real and abs(e.difference.mean) >= f.negligible


def _effect(c: Comparison, e: Effect, f: Findings) -> str:
    short = short_keys(c.factors)
    name = short[e.key]
    others = " and ".join(short[k] for k in c.factors if k != e.key)
    amount = f"{e.difference.text}, averaged over {others} ({e.difference.basis})"
    if not e.difference.real:
        return f"{name}: undecided between {e.a} and {e.b}, {amount}."
    if not _matters(e, f):
        return f"{name}: {e.a} is ahead of {e.b} by too little to matter, {amount}."
    against = (
        f"; not at {e.against}, where the pair itself counts, as it shows the opposite"
        if e.against
        else ""
    )
    return f"{name}: {e.a} is better than {e.b} by {amount}{against}."


def _left_out(c: Comparison, f: Findings) -> list[str]:
    """Name the runs that take no part, by reason."""
    by_reason: dict[str, list[str]] = {}
    for e in c.entries:
        for r in e.runs:
            if id(r) in f.left_out and r.rung is None:
                name = e.label if len(e.runs) == 1 else r.name
                by_reason.setdefault(f.left_out[id(r)], []).append(name)
    words = {
        "other task": "of another task",
        "rows lost": "with lost rows",
        "no rows": "without rows",
    }
    parts = [
        f"{plural(len(names), 'run')} {words.get(reason, reason)} ({listed(names)})"
        for reason, names in by_reason.items()
    ]
    return [f"Left out: {'; '.join(parts)}."] if parts else []


def _unequal_seeds(f: Findings) -> list[str]:
    """Say that means are over different sets of seeds, where some are."""
    several = [(e, set(f.seeds[e.name])) for e in f.ranked if len(f.seeds[e.name]) > 1]
    wanted = set().union(*(seeds for _, seeds in several))
    lacking = [
        f"{e.label} lacks {listed(sorted(wanted - seeds, key=_number))}"
        for e, seeds in several
        if seeds < wanted
    ]
    if not lacking or f.metric.key not in LOSSES:
        return []
    return [f"The means are not over the same seeds: {listed(lacking)}."]


def _number(seed: str) -> tuple[int, str]:
    return (int(seed), "") if seed.isdecimal() else (0, seed)


def _tokens(c: Comparison, f: Findings) -> list[str]:
    """Name the tokens of each budget, where they differ."""
    if len(f.budgets) < 2 or not (found := _places(c, f)):
        return []
    said = (
        f"Tokens of the whole runs: {'; '.join(f'{name} {p.planned:,.0f}' for name, p in found)}."
    )
    if any(p.decays for _, p in found):
        said += " A learning rate that has not decayed yet leaves a loss higher than it will be."
    if any(k.startswith("batch.") for k in c.factors):
        said += " experiment=accumulation_scaling is a sweep over accumulation at equal tokens."
    return [said]


def _where(c: Comparison, f: Findings, limiting: Record | None) -> list[str]:
    """Say where the losses are read, and who had no evaluation just there."""
    if (
        f.metric.key not in LOSSES
        or f.metric.key == "final val/loss"
        or c.align_at is None
        or limiting is None
    ):
        return []
    runs = [r for e in c.entries for r in e.runs if counts(r) and id(r) not in f.left_out]
    if len(runs) < 2:
        return []
    ends = {round(float(p[-1]), 3) for r in runs if len(p := positions(r, c.align))}
    at = f"{c.align_at:,.0f} {UNITS[c.align]}"
    if len(ends) == 1:
        said = f"Losses are read at {at}, where all runs end."
    else:
        said = (
            f"Losses are read at {at}, which every run reached ({_label(c, limiting)} ends there)."
        )
    late, without = [], []
    for r in runs:
        where = positions(r, c.align)
        values = r.columns.get("val/loss", np.zeros(0))
        seen = where[: len(values)][
            np.isfinite(values) & (where[: len(values)] <= c.align_at * (1 + 1e-9))
        ]
        if len(seen) == 0:
            without.append(_label(c, r))
        elif seen[-1] < c.align_at * (1 - 1e-9):
            late.append((_label(c, r), float(seen[-1])))
    if late and "val" in f.metric.key:
        name, last = min(late, key=lambda pair: pair[1])
        said += (
            f" {len(late)} of {len(runs)} runs had their last evaluation before that, {name} "
            f"at {last:,.0f}."
        )
    if without and any("val/loss" in r.columns for r in runs):
        have = "has" if len(without) == 1 else "have"
        said += (
            f" {len(without)} of {len(runs)} runs {have} no evaluation up to there: "
            f"{listed(without)}."
        )
    return [said]


def _halving(c: Comparison, f: Findings) -> list[str]:
    """Say which runs successive halving left out after which share of the steps, and how the best
    one stood to the last of them there."""
    shares: dict[float, list[Record]] = {}
    for r in (r for e in c.entries for r in e.runs if r.rung is not None):
        shares.setdefault(r.rung or 0.0, []).append(r)
    if not shares or not f.ranked:
        return []
    out = [
        f"{listed([_label(c, r) for r in shares[s]])} after {100 * s:.3g} % of the steps"
        for s in sorted(shares)
    ]
    said = [f"Successive halving left out {'; '.join(out)}."]
    best = next(r for r in f.ranked[0].runs if id(r) not in f.left_out)
    rivals = [(*there, r) for r in shares[max(shares)] if (there := _at_end_of(r, best))]
    if rivals and f.metric.better == "lower":
        theirs, ours, step, rival = min(rivals, key=lambda found: found[0])
        said.append(
            f"At step {step:,.0f}, where the last were left out, {_label(c, best)} had a val loss "
            f"of {digits(ours, f)}, and the best of these, {_label(c, rival)}, "
            f"{digits(theirs, f)}: what was left out may be as good."
        )
    return said


def _at_end_of(run: Record, other: Record) -> tuple[float, float, float] | None:
    """Return the val losses of both at the last evaluation of `run`, and its step; None where
    `other` had none."""
    x, y = run.columns, other.columns
    if "val/loss" not in x or "val/loss" not in y:
        return None
    known = np.flatnonzero(np.isfinite(x["val/loss"]))
    place = np.flatnonzero(y["step"] == x["step"][known[-1]]) if len(known) else known
    if not len(place) or not np.isfinite(y["val/loss"][place[0]]):
        return None
    return (
        float(x["val/loss"][known[-1]]),
        float(y["val/loss"][place[0]]),
        float(x["step"][known[-1]]),
    )


def _label(c: Comparison, run: Record) -> str:
    entry = next(e for e in c.entries if any(r is run for r in e.runs))
    return entry.label if len(entry.runs) == 1 else run.name


def _batch(c: Comparison) -> list[str]:
    runs = [r for e in c.entries if not e.standing.mark for r in e.runs]
    sizes = {s for r in runs if (s := number(r.facts.get("real_batch_size"))) is not None}
    span = f"{min(sizes):,.0f} to {max(sizes):,.0f}" if sizes else "?"
    said = {
        "iso-batch": f"real_batch_size is {span.partition(' ')[0]} in all runs and only its cut "
        "into micro-batches, accumulation and ranks varies (iso-batch), so losses "
        "agree but for rounding.",
        "scaling": f"real_batch_size varies, {span} sequences, so at equal tokens the runs took "
        "different numbers of steps.",
        "mixed": f"real_batch_size varies, {span} sequences, and so does how it is cut into "
        "micro-batches.",
    }
    return [said[c.batch]] if c.batch in said else []


def _method(c: Comparison, f: Findings) -> list[str]:
    """Say what the intervals mean, and what one seed cannot tell."""
    said: list[str] = []
    verdicts = {j.verdict for j in f.judged.values()}
    if any(j.difference for j in f.judged.values()):
        pairs = len(f.ranked) * (len(f.ranked) - 1) // 2
        together = (
            f", over the {pairs} pairs of {len(f.ranked)} settings together" if pairs > 1 else ""
        )
        small = (
            f"; a difference under {f.negligible:g} does not matter"
            if f.metric.key in LOSSES
            else ""
        )
        said.append(f"Intervals are at 95 % over seeds{together}{small}.")
    if Verdict.FEW_SEEDS in verdicts and f.metric.key in LOSSES:
        said.append(
            "Runs of one seed show what these runs did, not what the settings do: rounding and the "
            "order of the data move a loss as well. Only more seeds (train.seed=1,2,3) tell."
        )
    if f.floor is not None:
        spread = f"{digits(f.floor.size, f)}" if f.floor.size >= 1 else f"{f.floor.size:.2g}"
        said.append(
            f"The floor of rounding, {spread}, is the largest difference in {f.loss} among "
            f"{f.floor.runs} runs that differ in rounding alone ({f.floor.source})."
        )
    elif Verdict.FEW_SEEDS in verdicts and f.metric.key in LOSSES:
        said.append(
            "What rounding makes was not measured; sweep.twins=1 trains the leading setting once "
            "more for that."
        )
    return said


def _steps(c: Comparison, f: Findings) -> list[str]:
    """Compare the first two of one seed step by step, where they trained on the same batches."""
    few = [e for e in f.ranked[1:] if f.judged[e.name].verdict == Verdict.FEW_SEEDS]
    rivals = [e for e in few if f.leads[e.name] is f.ranked[0]]
    if not rivals or f.metric.key not in LOSSES:
        return []
    if any(len(e.runs) > 1 for e in (f.ranked[0], rivals[0])):
        return []
    d = stepwise(f.ranked[0], rivals[0], c, all_pairs(len(f.ranked)))
    if d is None:
        same = same_batches(f.ranked[0].runs[0], rivals[0].runs[0])
        reason = "too few steps, or steps too alike, for an interval" if same else "other batches"
        return [
            f"{f.ranked[0].label} and {rivals[0].label} are not compared step by step: {reason}."
        ]
    side = "above" if d.mean > 0 else "below"
    return [
        f"Step by step on the same batches, the train loss of {rivals[0].label} is {d.text} {side} "
        f"that of {f.ranked[0].label}: a statement about these two runs only."
    ]
