"""What a comparison comes to, in words: which setting is best, by how much, and whether the difference is real."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from llmexp.compare.figures import counts, number, positions, setting
from llmexp.compare.judging import EVALUATION, LOSSES, STEPS, effect, judge, same_batches, seeds_with, series_of
from llmexp.compare.records import Column, Comparison, Entry, Record
from llmexp.compare.statistics import RESOLUTION, Difference, series_difference

_ROUNDING = f"below {RESOLUTION:.4f}, which rounding alone can make"
_UNITS = {"tokens": "tokens", "steps": "steps", "time": "s"}


def sentences(c: Comparison, metric: Column, limiting: Record | None, mixed: bool) -> tuple[str, ...]:
    """The answer first, then what it rests on."""
    ranked = [e for e in c.entries if metric.key in e.figures and any(counts(r) for r in e.runs)]
    if mixed and metric.key.endswith("/loss"):
        ranked = []
    said: list[str] = []
    if len(ranked) > 1 and metric.better:
        said += _best(c, metric, ranked)
    elif len(ranked) == 1 and metric.better and any(r.rung is not None for e in c.entries for r in e.runs):
        won = (
            "won the successive halving" if ranked[0].state == "finished" else "is what successive halving goes on with"
        )
        said.append(f"{describe(ranked[0], c)} {won}: its {word(metric)} is {_shown(ranked[0], metric)}.")
    elif len(ranked) == 1 and metric.better:
        others = sum(metric.key in e.figures for e in c.entries) > 1  # of runs that broke off
        only = "the only finished run" if others else "the only run"
        said.append(f"{describe(ranked[0], c)} is {only} with a {word(metric)}: {_shown(ranked[0], metric)}.")
    if not mixed:
        said += _halving(c, metric, ranked)
    said += _where(c, metric, limiting)
    said += _batch(c)
    said += _caveats(c, metric, ranked, mixed)
    return tuple(said)


def word(metric: Column) -> str:
    """The metric's name in a sentence."""
    return "val loss" if "val/loss" in metric.key else metric.title.partition(" (")[0]


def describe(entry: Entry, c: Comparison) -> str:
    """The entry by what sets it apart: clip.max_norm=0.5 with batch.real_batch_size=8."""
    parts = [f"{key}={setting(entry.values.get(key))}" for key in c.factors]
    return " with ".join(parts) if entry.values and 0 < len(parts) <= 3 else entry.name


def _shown(entry: Entry, metric: Column) -> str:
    return f"{entry.figures[metric.key]:.{metric.digits}g}"


def _best(c: Comparison, metric: Column, ranked: Sequence[Entry]) -> list[str]:
    best, others = ranked[0], ranked[1:]
    direction = -1.0 if metric.better == "higher" else 1.0
    extreme = "highest" if metric.better == "higher" else "lowest"
    lead = abs(others[0].figures[metric.key] - best.figures[metric.key])
    level = 1 - 0.05 / len(others)  # Bonferroni: the best was picked by looking at all
    judged = [judge(best, other, metric.key, c, ranked, level) for other in others]
    text = (
        f"{describe(best, c)} has the {extreme} {word(metric)}, {_shown(best, metric)}; next is "
        f"{describe(others[0], c)}, {_shown(others[0], metric)}"
        + (f": {lead:.2g} {'less' if direction < 0 else 'more'}." if lead else ", the same.")
    )
    if judged[0] is None and (lead == 0 or (metric.key in LOSSES and lead <= RESOLUTION)):
        verdict = f"Indistinguishable: {'they are the same' if lead == 0 else f'the lead is {_ROUNDING}'}."
    else:
        verdict = _verdict(judged[0], direction, len(others))
    return [text, verdict, *_effects(c, metric, ranked), *_standing(c, metric, best, others, judged, direction)]


def _standing(
    c: Comparison,
    metric: Column,
    best: Entry,
    others: Sequence[Entry],
    judged: Sequence[tuple[Difference, str] | None],
    direction: float,
) -> list[str]:
    """Which of the others the best one is ahead of. What is called clearly behind also ranks behind all that is not
    known to be: one that is judged step by step may be known to be worse, and a worse one on other batches not."""
    if len(others) < 2:
        return []
    real = [j is not None and _real(j[0], direction) for j in judged]
    if all(real):
        return [f"It is clearly ahead of all {len(others)} others."]
    close = [
        metric.key in LOSSES and abs(o.figures[metric.key] - best.figures[metric.key]) <= RESOLUTION for o in others
    ]
    coarse = [not n and (j is None or j[0].method == EVALUATION) for j, n in zip(judged, close, strict=True)]
    last_open = max(i for i, r in enumerate(real) if not r)
    names = [describe(e, c) for e in others]
    amounts = [f" ({_amount(j[0])} in {j[1]})" if j else "" for j in judged]
    against = [j is not None and j[0].real and j[0].mean * direction < 0 for j in judged]
    turned = [n + amount for n, amount, x in zip(names, amounts, against, strict=True) if x]
    open_ = [not r and not x for r, x in zip(real, against, strict=True)]
    within = [n for n, r, o in zip(names, open_, coarse, strict=True) if r and not o]
    unknown = [e for e, r, o in zip(others, open_, coarse, strict=True) if r and o]
    little = [n + amount for n, amount, r in zip(names[:last_open], amounts, real, strict=False) if r]
    clear = names[last_open + 1 :]
    if not any(real) and not turned and not (within and unknown):
        return [f"None of the {len(others)} others can be told from the best."]
    said = []
    if within:
        said.append(f"Within noise of the best: {_listed(within)}.")
    if unknown:
        apart = not any(same_batches(x, y) for e in unknown for x in e.runs for y in best.runs)
        why = (
            f"From one seed each{', on other batches' if apart else ''},"
            if metric.key in LOSSES
            else "From these records"
        )
        said.append(f"{why} it cannot be told whether it is ahead of {_listed([describe(e, c) for e in unknown])}.")
    if turned:
        said.append(f"Not settled, as that comparison goes against the order: {_listed(turned)}.")
    if little:
        said.append(f"Behind it by little, yet by more than the noise of that pair: {_listed(little)}.")
    if clear:
        said.append(f"Clearly behind it: {_listed(clear)}.")
    return [" ".join(said)]


def _real(d: Difference, direction: float) -> bool:
    return d.real and d.mean * direction > 0


def _amount(d: Difference) -> str:
    return f"{abs(d.mean):.2g} ± {d.half:.2g}"


def _verdict(judged: tuple[Difference, str] | None, direction: float, comparisons: int) -> str:
    if judged is None:
        return "Whether that lead is real cannot be said from these records: run each setting with three seeds or more."
    d, what = judged
    several = f" over {comparisons} comparisons" if comparisons > 1 else ""
    amount = f"{_amount(d)} (95 %{several})"
    stepwise = "step by step on the same batches"
    if d.mean == 0 and d.half == 0:
        return f"Indistinguishable: {f'{stepwise} ' if d.method == STEPS else ''}their {what} is the same."
    if d.method == STEPS:
        basis = f"{stepwise} its train loss is {'lower' if d.mean > 0 else 'higher'} by {amount}"
        seeds = " That holds for these two runs; what other seeds would give, only other seeds tell."
    else:
        basis, seeds = f"the difference in {what} is {amount}, {d.method}", ""
        if d.method == EVALUATION:
            seeds = " That is from one seed each; what other seeds would give, only other seeds tell."
    if abs(d.mean) <= RESOLUTION and d.half < abs(d.mean):
        return f"Indistinguishable: {basis}, {_ROUNDING}."
    if not d.real:
        return f"Within noise, indistinguishable: {basis}."
    if d.mean * direction < 0:
        return f"Not settled: {basis}, against their order by the metric."
    return f"The difference is real: {basis}.{seeds}"


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _effects(c: Comparison, metric: Column, ranked: Sequence[Entry]) -> list[str]:
    """For each of several swept keys: what it does, averaged over the others, cell by cell."""
    if not 2 <= len(c.factors) <= 4 or metric.key not in LOSSES:
        return []
    said = []
    for key in c.factors:
        cells: dict[str, dict[tuple[str, ...], Entry]] = {}
        shown = {}
        for entry in ranked:
            rest = tuple(str(entry.values.get(k)) for k in c.factors if k != key)
            value = str(entry.values.get(key))
            shown[value] = setting(entry.values.get(key))
            cells.setdefault(value, {}).setdefault(rest, entry)
        pairs = list(itertools.combinations(cells, 2))
        level = 1 - 0.05 / max(1, len(pairs))
        effects = [(a, b, e) for a, b in pairs if (e := effect(cells[a], cells[b], metric.key, c, ranked, level))]
        if not effects:
            if any(len(cells[a].keys() & cells[b].keys()) > 1 for a, b in pairs):
                said.append(f"{key}: whether it makes a difference cannot be told from one seed each.")
            continue
        # The clearest one first: a large mean with a larger error says nothing.
        a, b, (d, what) = max(effects, key=lambda e: (e[2][0].real, abs(e[2][0].mean)))
        averaged = f"averaged over {' and '.join(k for k in c.factors if k != key)}"
        one = d.method in (STEPS, EVALUATION)
        iso = " (iso-batch, as it should)" if key.startswith("batch.") and c.batch == "iso-batch" else ""
        if d.real:
            better, worse = (shown[a], shown[b]) if d.mean > 0 else (shown[b], shown[a])
            said.append(
                f"{key}: {better} is better than {worse} by {_amount(d)} in {what}, {averaged}: real"
                f"{', for this one seed; what others would give, only others tell' if one else ''}."
            )
        elif d.mean == 0 and d.half == 0:
            said.append(f"{key} makes no difference{iso}: {what} is the same{', of one seed each' if one else ''}.")
        else:
            said.append(
                f"{key} makes no difference that can be told{iso}: at most {shown[a]} against {shown[b]}, "
                f"{_amount(d)} in {what}, {averaged}{', of one seed each' if one else ''}."
            )
    return said


def _halving(c: Comparison, metric: Column, ranked: Sequence[Entry]) -> list[str]:
    """Who was left out at which share of its steps, and how the best one stood to the last of them there."""
    shares: dict[float, list[Entry]] = {}
    for e in c.entries:
        rungs = [r.rung for r in e.runs if r.rung is not None]
        if rungs and not any(counts(r) for r in e.runs):
            shares.setdefault(max(rungs), []).append(e)
    if not shares:
        return []
    parts = [
        f"{len(shares[s])} after {100 * s:.3g} % of {'its' if len(shares[s]) == 1 else 'their'} steps "
        f"({_listed([describe(e, c) for e in shares[s]])})"
        for s in sorted(shares)
    ]
    out = sum(map(len, shares.values()))
    said = [f"Successive halving left out {out} of {len(c.entries)} settings: {', '.join(parts)}."]
    rivals = [(*there, e) for e in shares[max(shares)] if ranked and (there := _at_end_of(e, ranked[0]))]
    if rivals and metric.better == "lower":
        theirs, ours, step, rival = min(rivals, key=lambda r: r[0])
        text = (
            f"At step {step:,.0f}, where the last were left out, {describe(ranked[0], c)} had a val loss of "
            f"{ours:.{metric.digits}g}, and the best of these, {describe(rival, c)}, {theirs:.{metric.digits}g}: "
            + ("the same but for rounding." if abs(theirs - ours) <= RESOLUTION else f"{theirs - ours:+.2g}.")
        )
        series = series_of(ranked[0], rival, c)
        difference = series_difference(series, 1 - 0.05 / len(rivals)) if series is not None else None
        said.append(text)
        if difference:
            said.append(_verdict((difference, "train/loss"), 1.0, len(rivals)))
    return said


def _at_end_of(entry: Entry, other: Entry) -> tuple[float, float, float] | None:
    """The val losses of both at the last evaluation of `entry`, and its step; None where `other` had none there."""
    x, y = entry.runs[0].columns, next(r for r in other.runs if counts(r)).columns
    if "val/loss" not in x or "val/loss" not in y:
        return None
    known = np.flatnonzero(np.isfinite(x["val/loss"]))
    place = np.flatnonzero(y["step"] == x["step"][known[-1]]) if len(known) else known
    if not len(place) or not np.isfinite(y["val/loss"][place[0]]):
        return None
    return float(x["val/loss"][known[-1]]), float(y["val/loss"][place[0]]), float(x["step"][known[-1]])


def _where(c: Comparison, metric: Column, limiting: Record | None) -> list[str]:
    if metric.key not in LOSSES or metric.key == "final val/loss" or c.align_at is None or limiting is None:
        return []
    runs = [r for e in c.entries for r in e.runs if counts(r)]
    ends = {round(float(p[-1]), 3) for r in runs if len(p := positions(r, c.align))}
    if len(runs) < 2:
        return []
    at = f"{c.align_at:,.0f} {_UNITS[c.align]}"
    if len(ends) == 1:
        text = f"All runs are compared at equal {c.align}, {at}, where they end."
    else:
        text = (
            f"Losses are read at {at}, the last position that every unfailed run reached ({limiting.name} ends there)."
        )
    late, without = [], []
    for r in runs:
        place = positions(r, c.align)
        values = r.columns.get("val/loss", np.zeros(0))
        seen = place[: len(values)][np.isfinite(values) & (place[: len(values)] <= c.align_at * (1 + 1e-9))]
        if len(seen) == 0:
            without.append(r.name)
        elif seen[-1] < c.align_at * (1 - 1e-9):
            late.append((r.name, float(seen[-1])))
    if late and "val" in metric.key:
        name, last = min(late, key=lambda pair: pair[1])
        text += f" {len(late)} of {len(runs)} runs had their last evaluation before that, {name} at {last:,.0f}."
    if without and any("val/loss" in r.columns for r in runs):
        have = "has" if len(without) == 1 else "have"
        text += f" {len(without)} of {len(runs)} runs {have} no evaluation up to there: {_listed(without)}."
    return [text]


def _batch(c: Comparison) -> list[str]:
    sizes = {s for e in c.entries for r in e.runs if (s := number(r.facts.get("real_batch_size"))) is not None}
    span = f"{min(sizes):,.0f} to {max(sizes):,.0f}" if sizes else "?"
    texts = {
        "iso-batch": f"Iso-batch: real_batch_size is held at {span.partition(' ')[0]} sequences and only its cut into "
        "micro-batches, accumulation and ranks varies, so losses should agree but for rounding.",
        "scaling": f"Scaling: real_batch_size varies, {span} sequences, so at equal tokens the runs have taken "
        "different numbers of steps.",
        "mixed": f"real_batch_size varies ({span} sequences), and so does how it is cut into micro-batches.",
    }
    return [texts[c.batch]] if c.batch in texts else []


def _caveats(c: Comparison, metric: Column, ranked: Sequence[Entry], mixed: bool) -> list[str]:
    runs = [r for e in c.entries for r in e.runs]
    said = []
    if mixed:
        offered = "they are ordered by bits per byte" if metric.key == "val/bits_per_byte" else "they are not ranked"
        said.append(f"The tokenizers differ, so losses per token cannot be compared; {offered}.")
    if len(models := {str(m) for r in runs if (m := r.facts.get("model"))}) > 1:
        said.append(f"The models differ: {_listed(sorted(models))}.")
    prints = [r.facts.get("data_fingerprint") for r in runs]
    val = {repr([p.get(k) for k in ("val_files", "val_ratio", "seed")]) for p in prints if isinstance(p, dict)}
    sizes = {s for r in runs if (s := number(r.facts.get("eval_sequences"))) is not None}
    if not mixed and (len(val) > 1 or len(sizes) > 1):
        said.append("The validation text is not the same in all runs, so their val losses differ for that alone.")
    said += _seeds(c, metric, ranked)
    if len(devices := {str(d) for r in runs if (d := r.facts.get("device_name"))}) > 1:
        said.append(f"Not all ran on the same device ({_listed(sorted(devices))}): rates and times do not compare.")
    behind = {id(r) for e in c.entries if ranked and not any(counts(r) for r in e.runs) for r in e.runs}
    for state in ("failed", "cut", "preempted", "running", "queued"):
        found = [r for r in runs if r.state == state and r.rung is None]
        if found:
            many = f"{len(found)} of {len(runs)} runs {'is' if len(found) == 1 else 'are'} {state}"
            all_behind = all(id(r) in behind for r in found)
            said.append(
                f"{many}{', and ranked behind the others' if all_behind else ''}: {_listed([r.name for r in found])}."
            )
    for r in runs:
        if r.lost:
            place = " and ranks behind the others" if id(r) in behind else ""
            said.append(f"{r.name} {r.lost}: it has no say in this{place}.")
    return said


def _seeds(c: Comparison, metric: Column, ranked: Sequence[Entry]) -> list[str]:
    """That means are over unequal sets of seeds, where some are."""
    found = [(e, seeds_with(e, metric.key)) for e in ranked]
    wanted = set().union(*(seeds for _, seeds in found))
    lacking = [f"{describe(e, c)} lacks {_listed(sorted(wanted - seeds))}" for e, seeds in found if seeds < wanted]
    if not lacking or not any(len(seeds) > 1 for _, seeds in found):
        return []
    effects = ", effects are over those that both sides have" if len(c.factors) > 1 else ""
    return [f"The means are not over the same seeds ({_listed(lacking)}){effects}: run those too before you decide."]
