"""Say what must be known beside the result of a comparison (notes), and what it rests on (why)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from llmexp import features
from llmexp.compare.budgets import common, equal
from llmexp.compare.figures import broken
from llmexp.compare.folding import varying
from llmexp.compare.position import evaluations, positions
from llmexp.compare.records import TWIN, Effect, Place, Record, Result, Setting, Verdict
from llmexp.compare.screened import mixed
from llmexp.compare.searching import searched
from llmexp.compare.target import UNITS, reached
from llmexp.run.budget import sized_by
from llmexp.runs.ledger import is_running
from llmexp.runs.rundir import how_to_resume
from llmexp.settings.labels import plural
from llmexp.settings.labels import short_value as value
from llmexp.system.text import amount, duration, first_of, listed

_LEFT_OUT = {
    "other task": "of another task",
    "rows lost": "with lost rows",
    "no config": "without a config.yaml that can be read",
    "no steps": "without steps",
}
_BATCH = {  # Result.batch, with the sizes
    "iso-batch": "real_batch_size is {} in all runs and only its cut into micro-batches, "
    "accumulation and ranks varies (iso-batch), so losses agree but for rounding.",
    "scaling": "real_batch_size varies, {} sequences, so at equal tokens the runs took different "
    "numbers of steps.",
    "mixed": "real_batch_size varies, {} sequences, and so does how it is cut into micro-batches.",
}
_FACTS = {  # of run.json, printed with its values where there are several
    "model": "The models differ: {}.",
    "eval_sequences": "The evaluations are over different numbers of sequences ({}), which adds to "
    "their differences.",
    "device_name": "The devices differ ({}), so rates and times do not compare.",
}


def notes_and_why(f: Result) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what must be known beside the result, and what it rests on.

    The first are short lines, the most important one first; the second are sentences.
    """
    differences = features.offered("compare", "differences")
    made_of = [line for say in differences for line in say(f.taking_part)]
    large = [_effect(e, f) for e in f.effects if _matters(e, f)]
    small = [_effect(e, f) for e in f.effects if not _matters(e, f)]
    of_features = features.offered("compare", "notes")
    first, beside, how = (
        [line for say in several for line in say(f)]
        for several in (
            (_looks, _budgets, reached, mixed, searched, _trunk, _rounding, _far, *of_features),
            (_left_out, _unequal_seeds, _planned),
            (_tokens, _where, _batch, _method, _halving),
        )
    )
    notes = (*first, *large[:2], *beside, *made_of[:2])
    return notes, (*how, *small, *_facts(f), *made_of[2:])


def _looks(f: Result) -> Iterator[str]:
    """Say why a sweep that decided by itself ended, and what it spent of a full grid of seeds."""
    if not f.looks or f.target:  # which the looks did not judge
        return
    last = f.looks[-1]
    runs = [r for r in f.runs if not r.config.get(TWIN)]
    settings = sum(any(r in runs for r in e.runs) for e in f.settings)
    seeds = listed([str(len(look.seeds)) for look in f.looks], len(f.looks))
    whole = settings * last.most
    ended = [r for r in runs if r.state == "finished"]  # what broke off cost less

    def cost(some: Sequence[Record], times: float = 1.0) -> str:
        tokens = sum(r.figures.get("own_tokens", r.figures.get("tokens_seen", 0.0)) for r in some)
        time = sum(r.figures.get("train_time", 0.0) for r in some)
        return f"{times * tokens:,.0f} tokens, {duration(times * time)}"

    yield (
        f"{plural(len(f.looks), 'look')}, at {seeds} seeds: {last.why}. "
        f"{plural(len(runs), 'run')}, {cost(runs)}; {last.most} seeds of all {settings} settings "
        f"are {whole} runs, {cost(ended, whole / max(1, len(ended)))}."
    )


def _budgets(f: Result) -> Iterator[str]:
    """Say how far each budget had come where losses are read.

    Name the sweep that would settle the question.
    """
    evaluated = [x for r in f.taking_part if len(x := evaluations(r, "tokens"))]
    if f.own_ends and evaluated:
        # the longest interval that is there, if the shortest run is as long
        every = int(min(max(x[0] for x in evaluated), min(x[-1] for x in evaluated)))
        yield f"train.eval_every_tokens={every} evaluates runs of all batches at like tokens."
    places = _places(f)
    shares = [f"{100 * p.progress:.0f}" for p in places.values()]
    if len(set(shares)) > 1:
        done = ", ".join(f"{s} % of {name}" for s, name in zip(shares, places, strict=True))
        if len(places) > 4:
            done = f"{shares[-1]} to {shares[0]} % of each run"
        yield f"Done where losses are read: {done}."
    if equal(round(p.planned) for p in places.values()):
        return
    if by := next(filter(None, (sized_by(r.config) for r in f.runs)), ""):
        yield f"The tokens of each run follow from {by} and its model: read it at its own end."
    elif any(key.startswith(("train.max_", "fork.step")) for r in f.runs for key in r.swept):
        yield (
            "The budget itself was swept: read each run at its own end, as points of a curve over "
            "tokens."
        )
    else:
        budget = common([p.spent for p in places.values()])
        yield f"To settle it: the same with train.max_tokens={budget} for every point."


def _places(f: Result) -> dict[str, Place]:
    """Return the place of each budget by its name, the shortest first; nothing where one lacks."""
    known = [g[0].place for g in f.budgets if g[0].place]
    if len(known) < max(2, len(f.budgets)):
        return {}
    named = zip(_names(f), known, strict=True)
    return dict(sorted(named, key=lambda pair: pair[1].planned))


def _names(f: Result) -> list[str]:
    """Name each group of budgets by the one key that sets them apart, else by its settings."""
    for key, short in f.names.items():
        values = [{value(r.values.get(key)) for r in group} for group in f.budgets]
        if all(len(v) == 1 for v in values) and len(set.union(*values)) == len(values):
            return [f"{short}={v.pop()}" for v in values]
    return [listed([r.label for r in group], 1) for group in f.budgets]


def _rounding(f: Result) -> Iterator[str]:
    if f.floor is not None and f.verdicts - {Verdict.ROUNDING}:
        size = f"differences of up to {amount(f.floor.size)}" if f.floor.size else "no difference"
        yield f"Rounding alone makes {size} here ({f.floor.source})."


def _far(f: Result) -> Iterator[str]:
    """Name seeds that are far off, and say where seeds multiply what settings do."""
    if f.far:
        names = [f"seed {seed} of {r.label} ({f.digits(r.seeds[seed])})" for r, seed in f.far]
        are = "is" if len(names) == 1 else "are"
        yield f"{first_of(names)} {are} far off what all other seeds tell."
    if f.multiplied:
        yield "Seeds move some settings more than others, so intervals are wider."


def _trunk(f: Result) -> Iterator[str]:
    """Say that seeds share what they go on from, where seeds of a setting are forks of one run."""
    several = [r.taking_part for r in f.ranked if len(r.seeds) > 1]
    trunks = [{run.parent.get("folder", "") for run in runs} for runs in several]
    if any(len(found) == 1 and "" not in found for found in trunks):
        yield "The seeds go on from one trunk, so what they show holds for this trunk only."
    elif any(1 < len(found) < len(runs) for found, runs in zip(trunks, several, strict=True)):
        yield "Several seeds go on from one trunk, so their spread is less than that of trunks."


def _matters(e: Effect, f: Result) -> bool:
    return e.difference.real and abs(e.difference.mean) >= f.negligible


def _effect(e: Effect, f: Result) -> str:
    short = f.names
    keys = varying([e for e in f.settings if not e.out], f.factors)
    others = " and ".join(short[key] for key in keys if key != e.key)
    amount = f"{e.difference.text}, averaged over {others} ({e.difference.basis})"
    name = short[e.key]
    if not e.difference.real:
        return f"{name}: undecided between {e.better} and {e.worse}, {amount}."
    if not _matters(e, f):
        return f"{name}: {e.better} is ahead of {e.worse} by too little to matter, {amount}."
    what = f"{name}: {e.better} is better than {e.worse}"
    if e.only is not None:
        where = f"at {listed(e.only)} only" if e.only else f"by an amount that depends on {others}"
        opposite = f", and worse at {listed(e.against)}" if e.against else ""
        return f"{what} {where}{opposite}; {amount}."
    against = f"; not at {' and '.join(e.against)}, where the pair itself counts"
    return f"{what} by {amount}{against if e.against else ''}."


def _left_out(f: Result) -> Iterator[str]:
    """Name the runs that take no part, by reason."""
    by_reason: dict[str, dict[Setting, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for e in f.settings:
        for r in e.runs:
            if r.out and r.rung is None and r.out != "trial":
                by_reason[_LEFT_OUT.get(r.out, r.out)][e].append(r)
    parts = []
    for why, found in by_reason.items():
        count = plural(sum(map(len, found.values())), "run")
        parts.append(f"{count} {why} ({listed([e.label_of(*runs) for e, runs in found.items()])})")
    if parts:
        yield f"Left out: {'; '.join(parts)}."


def _unequal_seeds(f: Result) -> Iterator[str]:
    """Say that means are over different sets of seeds, where some are."""
    several = [r for r in f.ranked if len(r.seeds) > 1]
    wanted = {seed for r in several for seed in r.seeds}
    # in the order of their numbers
    missing = {r.label: sorted(wanted - {*r.seeds}, key=lambda s: (len(s), s)) for r in several}
    lacking = [f"{label} lacks {listed(seeds)}" for label, seeds in missing.items() if seeds]
    if lacking and f.is_loss and not f.looks:
        yield f"The means are not over the same seeds: {listed(lacking)}."


def _planned(f: Result) -> Iterator[str]:
    left = {r.sweep: r.left for r in f.runs if r.sweep and r.left}
    for sweep, count in left.items():
        are = "is" if count == 1 else "are"
        way = "it is running" if is_running(sweep) else how_to_resume(sweep)
        yield f"{plural(count, 'run')} of the sweep {are} left to train: {way}"
    if f.mixed:
        yield "The tokenizers differ, so losses per token do not compare; bits per byte do."


def _tokens(f: Result) -> Iterator[str]:
    """Name the tokens of each budget, where they differ."""
    if places := _places(f):
        budgets = "; ".join(f"{name} {p.planned:,.0f}" for name, p in places.items())
        text = f"Tokens of the whole runs: {budgets}."
        if any(p.decays for p in places.values()):
            text += (
                " A learning rate that has not decayed yet leaves a loss higher than it will be."
            )
        yield text


def _where(f: Result) -> Iterator[str]:
    """Say where the losses are read, and who has no evaluation up to there."""
    runs = [r for r in f.taking_part if not broken(r)]
    own_end = not f.is_loss or f.key == "final val/loss"
    if own_end or f.align_at is None or len(runs) < 2:
        return
    ends = {round(float(p[-1]), 3) for r in runs if len(p := positions(r, f.align))}
    which = "where all runs end" if len(ends) == 1 else "where the first run ends"
    if f.key.startswith("val/") and f.align_at < min(ends):
        which = "the last position at which every run was evaluated"
    text = f"Losses are read at {f.position} {UNITS[f.align]}, {which}."
    late = f.align_at * (1 + 1e-9)
    without = [f.label_of(r) for r in runs if not (evaluations(r, f.align) <= late).any()]
    if without and any("val/loss" in r.columns for r in runs):
        have = "has" if len(without) == 1 else "have"
        text += f" {len(without)} of {len(runs)} runs {have} no evaluation up to there: "
        text += f"{listed(without)}."
    yield text


def _halving(f: Result) -> Iterator[str]:
    """Say which runs successive halving left out after which share of the steps.

    Say also how the best one stood to the last of them there.
    """
    rungs = sorted({r.rung for r in f.runs if r.rung is not None})
    if not rungs or not f.ranked:
        return
    out = []
    for share in rungs:
        last = [r for r in f.runs if r.rung == share]
        names = listed([f.label_of(r) for r in last])
        out.append(f"{names} after {100 * share:.3g} % of the steps")
    yield f"Successive halving left out {'; '.join(out)}."
    best = f.ranked[0].taking_part[0]
    known = [(*losses, f.label_of(r)) for r in last if (losses := _at_end_of(r, best))]
    if known and f.metric.better == "lower":
        theirs, ours, step, label = min(known)
        yield (
            f"At step {step:,.0f}, where the last were left out, {f.label_of(best)} had a val "
            f"loss of {f.digits(ours)}, and the best of these, {label}, {f.digits(theirs)}: what "
            "was left out may be as good."
        )


def _at_end_of(run: Record, other: Record) -> tuple[float, float, float] | None:
    """Return both val losses at the last evaluation of `run`, and its step; None: `other` lacks."""
    steps = evaluations(run, "steps")
    if not len(steps) or steps[-1] not in evaluations(other, "steps"):
        return None
    theirs, ours = (r.columns["val/loss"][r.columns["step"] == steps[-1]][0] for r in (run, other))
    return float(theirs), float(ours), float(steps[-1])


def _batch(f: Result) -> Iterator[str]:
    if f.batch not in _BATCH:
        return
    runs = [r for e in f.settings if not e.out for r in e.runs]
    stages = [stage for r in runs for stage in r.facts.get("stages") or [r.facts]]
    known = [size for s in stages if (size := s.get("real_batch_size")) is not None]
    sizes = [f"{size:,.0f}" for size in (min(known), max(known))] if known else ["?"]
    yield _BATCH[f.batch].format(" to ".join(dict.fromkeys(sizes)))


def _method(f: Result) -> Iterator[str]:
    """Say what the intervals mean, and what one seed cannot tell."""
    count, few = len(f.ranked), f.is_loss and Verdict.FEW_SEEDS in f.verdicts and not f.screen
    if any(r.difference for r in f.ranked):
        of = f" of all {count} settings" if count > 2 else ""
        small = f"; a difference under {f.negligible:g} does not matter" if f.is_loss else ""
        looks = ", over all looks together" if f.looks else ""
        yield f"Intervals are at 95 %{looks}, with the noise{of} over their seeds{small}."
    if few:
        which = "Runs of one seed" if all(len(r.seeds) < 2 for r in f.ranked) else "Few seeds"
        yield (
            f"{which} show what these runs did, not what the settings do: rounding and the "
            "order of the data move a loss as well. Only more seeds (train.seed=1,2,3) tell."
        )
    if f.floor is not None:
        yield (
            f"The floor of rounding, {amount(f.floor.size)}, is the largest difference in "
            f"{f.metric.title} among {f.floor.runs} runs that differ in rounding alone "
            f"({f.floor.source})."
        )
    elif few:
        yield (
            "What rounding makes was not measured; sweep.twins=1 trains the leading setting once "
            "more for that."
        )


def _facts(f: Result) -> Iterator[str]:
    for key, sentence in _FACTS.items():
        found = sorted({str(known) for r in f.taking_part if (known := r.facts.get(key))})
        if len(found) > 1 and not (f.mixed and key == "eval_sequences"):
            yield sentence.format(listed(found))
