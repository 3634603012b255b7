"""Say what must be known beside the result of a comparison (notes), and what it rests on (why)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from llmexp.compare.answer import listed, planned
from llmexp.compare.budgets import Spent, common, equal
from llmexp.compare.evidence import Effect, Place, Verdict, same_batches, stepwise
from llmexp.compare.figures import counts, evaluations, number, positions
from llmexp.compare.judging import Findings
from llmexp.compare.provenance import differences
from llmexp.compare.records import Record
from llmexp.labels import plural, short_keys
from llmexp.labels import shown as value
from llmexp.rundir import how_to_resume

UNITS = {"tokens": "tokens", "steps": "steps", "time": "s"}
_LEFT_OUT = {
    "other task": "of another task",
    "rows lost": "with lost rows",
    "no rows": "without rows",
}


def notes(f: Findings) -> tuple[str, ...]:
    """Return short lines, the most important one first."""
    lines = _budgets(f)
    if f.floor is not None and f.verdicts - {Verdict.ROUNDING}:
        size = f"differences of up to {f.floor.size:.2g}" if f.floor.size else "no difference"
        lines.append(f"Rounding alone makes {size} here ({f.floor.source}).")
    lines += [_effect(e, f) for e in f.effects if _matters(e, f)][:2]
    lines += _left_out(f) + _unequal_seeds(f)
    for sweep, count in planned(f.ranked).items():
        are = "is" if count == 1 else "are"
        lines.append(
            f"{plural(count, 'more run')} of these settings {are} planned: {how_to_resume(sweep)}"
        )
    if f.mixed:
        lines.append("The tokenizers differ, so losses per token do not compare; bits per byte do.")
    return (*lines, *differences(_taking_part(f))[:2])


def why(f: Findings) -> tuple[str, ...]:
    """Return what the result rests on, in sentences."""
    lines = _tokens(f) + _where(f) + _batch(f) + _method(f) + _steps(f) + _halving(f)
    lines += [_effect(e, f) for e in f.effects if not _matters(e, f)]
    runs = f.c.runs
    if len(models := {str(m) for r in runs if (m := r.facts.get("model"))}) > 1:
        lines.append(f"The models differ: {listed(sorted(models))}.")
    if len(_facts(_taking_part(f), "eval_sequences")) > 1 and not f.mixed:
        lines.append(
            "The evaluations are over different numbers of sequences, which adds to their "
            "differences."
        )
    if len(devices := {str(d) for r in runs if (d := r.facts.get("device_name"))}) > 1:
        lines.append(
            f"The devices differ ({listed(sorted(devices))}), so rates and times do not compare."
        )
    return (*lines, *differences(_taking_part(f))[2:])


def _facts(runs: Sequence[Record], key: str) -> set[float]:
    return {size for r in runs if (size := number(r.facts.get(key))) is not None}


def _taking_part(f: Findings) -> list[Record]:
    return [r for e in f.c.entries for r in e.taking_part]


def _budgets(f: Findings) -> list[str]:
    """Say how far each budget had come where losses are read, and name the sweep that would settle
    the question."""
    places = _places(f)
    if not places:
        return []
    shares = [f"{100 * p.progress:.0f}" for p in places.values()]
    lines = []
    if len(set(shares)) > 1 and len(places) > 4:
        lines = [f"Losses are read at {shares[-1]} to {shares[0]} % of the whole runs."]
    elif len(set(shares)) > 1:
        names = _joined(list(places))
        lines = [f"Losses are read at {', '.join(shares)} % of the whole runs ({names})."]
    if equal(round(p.planned) for p in places.values()):
        return lines
    return [*lines, _settles(f, list(places.values()))]


def _places(f: Findings) -> dict[str, Place]:
    """Return the place of each of several budgets by its name, the shortest first; nothing where
    one is not known."""
    if len(f.budgets) < 2:
        return {}
    found = [(n, g[0].place) for n, g in zip(_names(f), f.budgets, strict=True)]
    known = [(name, place) for name, place in found if place is not None]
    known.sort(key=lambda pair: pair[1].planned)
    return dict(known) if len(known) == len(found) else {}


def _joined(names: Sequence[str]) -> str:
    """Return `accum=1, 2, 4` for accum=1, accum=2, accum=4."""
    keys = {name.partition("=")[0] for name in names}
    if len(keys) > 1 or any(name.count("=") != 1 for name in names):
        return listed(names)
    return f"{keys.pop()}=" + ", ".join(name.partition("=")[2] for name in names)


def _names(f: Findings) -> list[str]:
    """Name each group of budgets by the one key that tells them apart, else by its first entry."""
    for key, short in short_keys(f.c.factors).items():
        values = [{value(r.entry.values.get(key)) for r in group} for group in f.budgets]
        if all(len(v) == 1 for v in values) and len(set.union(*values)) == len(values):
            return [f"{short}={v.pop()}" for v in values]
    return [listed([r.label for r in group], 1) for group in f.budgets]


def _settles(f: Findings, places: Sequence[Place]) -> str:
    if any(key.startswith("train.max_") for r in f.c.runs for key in r.swept):
        return (
            "The budget itself was swept: read each run at its own end, as points of a curve "
            "over tokens."
        )
    steps = [max(1, round(p.planned / (p.grain or p.planned))) for p in places]
    spent = [Spent({}, round(p.planned), n) for p, n in zip(places, steps, strict=True)]
    return f"To settle it: the same with train.max_tokens={common(spent)} for every point."


def _matters(e: Effect, f: Findings) -> bool:
    return e.difference.real and abs(e.difference.mean) >= f.negligible


def _effect(e: Effect, f: Findings) -> str:
    short = short_keys(f.c.factors)
    others = " and ".join(name for key, name in short.items() if key != e.key)
    amount = f"{e.difference.text}, averaged over {others} ({e.difference.basis})"
    name = short[e.key]
    if not e.difference.real:
        return f"{name}: undecided between {e.better} and {e.worse}, {amount}."
    if not _matters(e, f):
        return f"{name}: {e.better} is ahead of {e.worse} by too little to matter, {amount}."
    against = ""
    if e.against:
        against = f"; not at {e.against}, where the pair itself counts, as it shows the opposite"
    return f"{name}: {e.better} is better than {e.worse} by {amount}{against}."


def _left_out(f: Findings) -> list[str]:
    """Name the runs that take no part, by reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for r in f.c.runs:
        if r.out and r.rung is None:
            by_reason[r.out].append(f.c.label_of(r))
    parts = [
        f"{plural(len(names), 'run')} {_LEFT_OUT.get(reason, reason)} ({listed(names)})"
        for reason, names in by_reason.items()
    ]
    return [f"Left out: {'; '.join(parts)}."] if parts else []


def _unequal_seeds(f: Findings) -> list[str]:
    """Say that means are over different sets of seeds, where some are."""
    several = [r for r in f.ranked if len(r.seeds) > 1]
    wanted = {seed for r in several for seed in r.seeds}
    lacking = []
    for r in several:
        if missing := sorted(wanted - r.seeds.keys(), key=_number):
            lacking.append(f"{r.label} lacks {listed(missing)}")
    if not lacking or not f.is_loss:
        return []
    return [f"The means are not over the same seeds: {listed(lacking)}."]


def _number(seed: str) -> tuple[int, str]:
    return (int(seed), "") if seed.isdecimal() else (0, seed)


def _tokens(f: Findings) -> list[str]:
    """Name the tokens of each budget, where they differ."""
    places = _places(f)
    if not places:
        return []
    budgets = "; ".join(f"{name} {p.planned:,.0f}" for name, p in places.items())
    text = f"Tokens of the whole runs: {budgets}."
    if any(p.decays for p in places.values()):
        text += " A learning rate that has not decayed yet leaves a loss higher than it will be."
    if any(k.startswith("batch.") for k in f.c.factors):
        text += " experiment=accumulation_scaling is a sweep over accumulation at equal tokens."
    return [text]


def _where(f: Findings) -> list[str]:
    """Say where the losses are read, and who had no evaluation just there."""
    c, read_at = f.c, f.c.align_at
    runs = [r for r in _taking_part(f) if counts(r)]
    own_end = not f.is_loss or f.metric.key == "final val/loss"
    if own_end or read_at is None or f.limiting is None or len(runs) < 2:
        return []
    at = f"{read_at:,.0f} {UNITS[c.align]}"
    if len({round(float(p[-1]), 3) for r in runs if len(p := positions(r, c.align))}) == 1:
        text = f"Losses are read at {at}, where all runs end."
    else:
        limiting = c.label_of(f.limiting)
        text = f"Losses are read at {at}, which every run reached ({limiting} ends there)."
    seen = {r: evaluations(r, c.align) for r in runs}
    last = {r: float(x[x <= read_at * (1 + 1e-9)].max(initial=0.0)) for r, x in seen.items()}
    late = [r for r in runs if 0 < last[r] < read_at * (1 - 1e-9)]
    without = [c.label_of(r) for r in runs if not last[r]]
    if late and "val" in f.metric.key:
        first = min(late, key=last.__getitem__)
        text += (
            f" {len(late)} of {len(runs)} runs had their last evaluation before that, "
            f"{c.label_of(first)} at {last[first]:,.0f}."
        )
    if without and any("val/loss" in r.columns for r in runs):
        have = "has" if len(without) == 1 else "have"
        text += (
            f" {len(without)} of {len(runs)} runs {have} no evaluation up to there: "
            f"{listed(without)}."
        )
    return [text]


def _halving(f: Findings) -> list[str]:
    """Say which runs successive halving left out after which share of the steps, and how the best
    one stood to the last of them there."""
    shares: dict[float, list[Record]] = defaultdict(list)
    for r in f.c.runs:
        if r.rung is not None:
            shares[r.rung].append(r)
    if not shares or not f.ranked:
        return []
    out = [
        f"{listed([f.c.label_of(r) for r in shares[s]])} after {100 * s:.3g} % of the steps"
        for s in sorted(shares)
    ]
    lines = [f"Successive halving left out {'; '.join(out)}."]
    best = f.ranked[0].entry.taking_part[0]
    rivals = [(*there, r) for r in shares[max(shares)] if (there := _at_end_of(r, best))]
    if rivals and f.metric.better == "lower":
        theirs, ours, step, rival = min(rivals, key=lambda found: found[0])
        lines.append(
            f"At step {step:,.0f}, where the last were left out, {f.c.label_of(best)} had a val "
            f"loss of {f.digits(ours)}, and the best of these, {f.c.label_of(rival)}, "
            f"{f.digits(theirs)}: what was left out may be as good."
        )
    return lines


def _at_end_of(run: Record, other: Record) -> tuple[float, float, float] | None:
    """Return the val losses of both at the last evaluation of `run`, and its step; None where
    `other` had none."""
    steps = evaluations(run, "steps")
    if not len(steps) or steps[-1] not in evaluations(other, "steps"):
        return None
    step = steps[-1]
    theirs, ours = (r.columns["val/loss"][r.columns["step"] == step][0] for r in (run, other))
    return float(theirs), float(ours), float(step)


def _batch(f: Findings) -> list[str]:
    sizes = _facts([r for e in f.c.entries if not e.out for r in e.runs], "real_batch_size")
    low, high = (f"{min(sizes):,.0f}", f"{max(sizes):,.0f}") if sizes else ("?", "?")
    span = f"{low} to {high}" if sizes else "?"
    texts = {
        "iso-batch": f"real_batch_size is {low} in all runs and only its cut into micro-batches, "
        "accumulation and ranks varies (iso-batch), so losses agree but for rounding.",
        "scaling": f"real_batch_size varies, {span} sequences, so at equal tokens the runs took "
        "different numbers of steps.",
        "mixed": f"real_batch_size varies, {span} sequences, and so does how it is cut into "
        "micro-batches.",
    }
    return [texts[f.c.batch]] if f.c.batch in texts else []


def _method(f: Findings) -> list[str]:
    """Say what the intervals mean, and what one seed cannot tell."""
    lines: list[str] = []
    count, few = len(f.ranked), f.is_loss and Verdict.FEW_SEEDS in f.verdicts
    if any(r.difference for r in f.ranked):
        together, small = "", ""
        if count > 2:
            pairs = count * (count - 1) // 2
            together = f", over the {pairs} pairs of {count} settings together"
        if f.is_loss:
            small = f"; a difference under {f.negligible:g} does not matter"
        lines.append(f"Intervals are at 95 % over seeds{together}{small}.")
    if few:
        lines.append(
            "Runs of one seed show what these runs did, not what the settings do: rounding and the "
            "order of the data move a loss as well. Only more seeds (train.seed=1,2,3) tell."
        )
    if f.floor is not None:
        size = f.floor.size
        spread = f.digits(size) if size >= 1 else f"{size:.2g}"
        lines.append(
            f"The floor of rounding, {spread}, is the largest difference in {f.metric.title} among "
            f"{f.floor.runs} runs that differ in rounding alone ({f.floor.source})."
        )
    elif few:
        lines.append(
            "What rounding makes was not measured; sweep.twins=1 trains the leading setting once "
            "more for that."
        )
    return lines


def _steps(f: Findings) -> list[str]:
    """Compare the first two of one seed step by step, where they trained on the same batches."""
    rivals = [r for r in f.those(Verdict.FEW_SEEDS) if r.budget == f.ranked[0].budget]
    pair = [*f.ranked[:1], *rivals[:1]]
    if len(pair) < 2 or not f.is_loss or any(len(r.entry.runs) > 1 for r in pair):
        return []
    (best, a), (rival, b) = ((r.label, r.entry.runs[0]) for r in pair)
    d = stepwise(a, b, f.c.align, f.c.align_at, f.level)
    if d is None:
        reason = "other batches"
        if same_batches(a, b):
            reason = "too few steps, or steps too alike, for an interval"
        return [f"{best} and {rival} are not compared step by step: {reason}."]
    side = "above" if d.mean > 0 else "below"
    return [
        f"Step by step on the same batches, the train loss of {rival} is {d.text} {side} that of "
        f"{best}: a statement about these two runs only."
    ]
