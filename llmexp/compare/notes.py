"""Say what must be known beside the result of a comparison (notes), and what it rests on (why).

A note is `Name: facts.`; one without facts is not said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from llmexp import features
from llmexp.compare.budgets import common, equal
from llmexp.compare.figures import UNITS, broken, cap_of
from llmexp.compare.folding import varying
from llmexp.compare.headline import headline, runner_up
from llmexp.compare.judging import SMALL, unmoved
from llmexp.compare.position import evaluations, positions
from llmexp.compare.records import (
    REACHED,
    TWIN,
    Effect,
    Place,
    Record,
    Result,
    Setting,
    Verdict,
    figure_text,
)
from llmexp.compare.screening import importances, spelled
from llmexp.config.knobs import SEED
from llmexp.config.labels import plural
from llmexp.folders.ledger import is_running
from llmexp.folders.rundir import how_to_resume
from llmexp.run.budget import sized_by
from llmexp.system.text import Note, amount, duration, first_of, listed, said

_BATCH = {
    "iso-batch": "only the micro-batch layout varies, so losses agree but for rounding",
    "scaling": "so at equal tokens the runs took different numbers of steps",
    "mixed": "and the micro-batch layout varies, too",
}
_FACTS = {  # of run.json, said with their values where there are several
    "model": "Models",
    "eval_sequences": "Sequences of an evaluation, which adds to differences",
    "device_name": "Devices, so rates and times do not compare",
}


def with_words(f: Result) -> Result:
    """Return the comparison with what was found out, in words."""
    differences = features.offered("compare", "differences")
    made_of = [line for say in differences for line in say(f.taking_part)]
    large = [_effect(f, e) for e in f.effects if _matters(e, f)]
    small = [_effect(f, e) for e in f.effects if not _matters(e, f)]
    of_features = [text for say in features.offered("compare", "notes") for text in say(f)]
    first, then = said(_notes(f)), said([*large[:2], *_beside(f)])
    notes = (*first, *of_features, *then, *made_of[:2])
    why = (*said([*_why(f), *small]), *made_of[2:])
    return replace(f, headline=headline(f), notes=notes, why=why)


def _notes(f: Result) -> Iterator[Note]:
    """Yield what must be known beside the result, the most important first."""
    if f.looks and not f.target:
        runs = [r for r in f.runs if not r.config.get(TWIN)]
        settings, last = {s for s in f.settings for r in s.runs if r in runs}, f.looks[-1]
        tokens, seconds = (
            sum(next((r.figures[k] for k in keys if k in r.figures), 0.0) for r in runs)
            for keys in (("own_tokens", "tokens_seen"), ("train_time",))
        )
        cost = f"{plural(len(runs), 'run')}, {tokens:,.0f} tokens, {duration(seconds)}"
        seeds = listed([str(len(look.seeds)) for look in f.looks], len(f.looks))
        yield (
            "Interim analyses",
            f"{seeds} seeds each, {last.why}; {cost}; all settings with {last.most} seeds are "
            f"{last.most * len(settings)} runs",
        )
    yield from _of_budgets(f)
    yield "Not checked", _unknown(f)
    yield "Target", _of_target(f)
    yield from _of_knobs(f)
    several = [r.taking_part for r in f.ranked if len(r.seeds) > 1]
    trunks = [{run.parent.get("folder", "") for run in runs} for runs in several]
    if any(len(found) == 1 and "" not in found for found in trunks):
        yield "Trunk", "all seeds fork from one run, so they speak for it alone"
    elif any(1 < len(found) < len(runs) for found, runs in zip(trunks, several, strict=True)):
        yield "Trunks", "several seeds fork from one run, so they vary less than independent runs"
    if f.floor and f.verdicts - {Verdict.ROUNDING}:
        size = f"differences of up to {amount(f.floor.size)}" if f.floor.size else "no difference"
        yield "Rounding", f"alone makes {size} ({f.floor.source})"
    far = [f"seed {seed} of {r.label} ({f.digits(r.seeds[seed])})" for r, seed in f.far]
    yield "Outlying seeds", first_of(far)
    if f.multiplied:
        yield "Seeds", "matter more at some settings than at others, so intervals are wider"


def _beside(f: Result) -> Iterator[Note]:
    """Yield what takes no part, or was not trained yet."""
    out: dict[str, dict[Setting, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for s in f.settings:
        for r in s.runs:
            if r.out and r.rung is None and r.out != "trial":
                out[r.out][s].append(r)
    parts = [
        f"{why} ({listed([s.label_of(*runs) for s, runs in found.items()])})"
        for why, found in out.items()
    ]
    ended = (s for found in out.values() for s, runs in found.items() if runs[0].foreign)
    if any(s.taking_part for s in ended):
        parts.append("settings are judged by their other seeds alone")
    yield "Left out", "; ".join(parts)
    several = [s for s in f.ranked if len(s.seeds) > 1 and f.judged and not f.looks]
    if not f.target and f.judged and unmoved(f.ranked):
        yield (
            "Seeds",
            "each setting has one figure for all of its seeds, so they were not applied, lines "
            "were copied, or rounding hides what they move",
        )
    named = {r.seed for s in several for r in s.taking_part if r.named_seed}
    wanted = {seed for s in several for seed in s.seeds if seed in named}
    # in the order of their numbers
    missing = {s.label: sorted(wanted - {*s.seeds}, key=lambda s: (len(s), s)) for s in several}
    short = {label: seeds for label, seeds in missing.items() if seeds}
    lacking = [f"{k} lacks seed{'s' * (len(s) > 1)} {listed(s)}" for k, s in short.items()]
    if len(several) > 1 and sum(len(s.seeds) for s in several) == len({*wanted}):
        yield "Seeds are not shared", "settings are judged as independent runs"
    else:
        most = max((len(s.seeds) for s in several), default=0)
        fewer = any(s.difference and s.difference.most < most for s in several)
        how = "are over shared seeds" if fewer else "are corrected for what seeds move"
        away = ", so they are not those of the means" * _off_means(several)
        text = f"; differences {how}{away}" * bool(lacking and (fewer or away))
        yield "Means over unequal seeds", (listed(lacking) + text) or _unequal(f)
    for sweep, count in {r.sweep: r.left for r in f.runs if r.sweep and r.left}.items():
        way = "the sweep is running" if is_running(sweep) else how_to_resume(sweep)
        yield "Left to train", f"{plural(count, 'run')}; {way}"
    if f.mixed:
        yield "Tokenizers differ", "losses per token do not compare, bits per byte do"


def _off_means(settings: Sequence[Setting]) -> bool:
    """Tell whether a difference is not that of the means that are printed."""
    lead = next((s for s in settings if s.verdict is None), None)
    pairs = [(s.size, s.mean - lead.mean) for s in settings if lead and s.difference]
    return any(size is not None and abs(size - d) > 1e-9 * (1 + abs(d)) for size, d in pairs)


def _unequal(f: Result) -> str:
    """Say why a setting behind the leading one has the better mean, where it has other seeds."""
    if not (f.looks and f.ranked and f.judged) or f.target:
        return ""
    lead, *others = f.ranked
    sign, key = f.metric.sign, f.key
    before = [
        s
        for s in others
        if {*s.seeds} != {*lead.seeds} and sign * s.figures[key] < sign * lead.figures[key]
    ]
    counts = [f"{s.label} has {plural(len(s.seeds), 'seed')}" for s in (lead, *before)]
    return f"{listed(counts)}; differences are over those that both have" * bool(before)


def _places(f: Result) -> dict[str, Place]:
    """Return the place of each budget by its name, the shortest first; nothing where one lacks."""
    known = [g[0].place for g in f.budgets if g[0].place]
    if len(known) < max(2, len(f.budgets)):
        return {}
    names = [listed([s.label for s in group], 1) for group in f.budgets]
    return dict(sorted(zip(names, known, strict=True), key=lambda pair: pair[1].planned))


def _of_budgets(f: Result) -> Iterator[Note]:
    """Say how far each budget had come where losses are read, and what would settle it."""
    evaluated = [x for r in f.taking_part if len(x := evaluations(r, "tokens"))]
    if f.own_ends and evaluated and not f.foreign:
        # the longest interval that is there, if the shortest run is as long
        every = int(min(max(x[0] for x in evaluated), min(x[-1] for x in evaluated)))
        yield "Evaluations of all batches at like tokens", f"train.eval_every_tokens={every}"
    places = _places(f)
    shares = [f"{100 * p.progress:.0f} % of {name}" for name, p in places.items()]
    if len({share.split()[0] for share in shares}) > 1:
        yield "Done where losses are read", first_of(shares, 4)
    if equal(round(p.planned) for p in places.values()):
        return
    if f.foreign:
        shortest = min(p.planned for p in places.values())
        yield "To settle it", f"runs of one length, such as {shortest:,.0f} {_unit(f)}"
        return
    if by := next(filter(None, (sized_by(r.config) for r in f.runs)), ""):
        yield "Tokens of each run", f"they follow from {by} and its model: read it at its own end"
    elif any(key.startswith(("train.max_", "fork.step")) for r in f.runs for key in r.swept):
        yield "The budget was swept", "read each run at its own end"
    else:
        budget = common([p.spent for p in places.values()])
        yield "To settle it", f"the same with train.max_tokens={budget} for every run"


def _unknown(f: Result) -> str:
    """Say what the sources of runs of others do not tell, so that nobody could check it."""
    runs = [r for r in f.taking_part if r.foreign]
    if not runs:
        return ""
    length = "length, " * (not any(len(positions(r, f.align)) for r in runs))
    ends = "" if all(r.state for r in runs) else "; nor whether each came to its end"
    return f"whether all have one {length}schedule, validation data and code{ends}"


def _unit(f: Result) -> str:
    """Return what budgets are counted in: steps where tokens are not known."""
    known = any("tokens" in r.steps for r in f.taking_part)
    return "tokens" if known or not f.foreign else UNITS[f.align]


def _of_target(f: Result) -> str:
    """Say how exactly it is known where runs reach the target, and how the others count."""
    if f.target is None or not f.ranked or not f.reached:
        return ""
    runs, parts = f.taking_part, list[str]()
    what = "steps" if f.target.key == "train/loss" else "evaluations"
    there = {r: r.figures["target/by"] for r in runs if "target/by" in r.figures}
    early = [f.label_of(r) for r in there if "target/after" not in r.figures]
    if early:
        parts.append(
            f"{len(early)} of {plural(len(runs), 'run')} had reached it by the first of the {what}"
            f" ({listed(early)}), so the place is an upper bound"
        )
    if len(early) < len(there):
        apart = f.digits(max(by - r.figures.get("target/after", by) for r, by in there.items()))
        parts.append(f"interpolated linearly between {what} up to {apart} {UNITS[f.align]} apart")
    if never := [f.label_of(r) for r in runs if r.figures.get(REACHED) == 0.0]:
        cap = f"{f.digits(cap_of(f))} {UNITS[f.align]}"
        parts.append(
            f"{len(never)} of {plural(len(runs), 'run')} never reached it ({listed(never)}); "
            f"those that had not by {cap}, where the first of them ends, are censored there"
        )
    return "; ".join(parts)


def _of_knobs(f: Result) -> Iterator[Note]:
    """Say how a screen's knobs are mixed, what a search's choice is worth, which knobs mattered."""
    s, names = f.screen, f.names
    if s:
        pairs = {key: spelled(p, names, " + ") for key, p in s.confounded.items() if p}
        mixed = "; ".join(f"{names[key]} with {words}" for key, words in pairs.items())
        groups = "; ".join(spelled(c.names, names) for c in s.others if len(c.names) > 1)
        yield {
            3: ("Resolution III", f"an effect may be that of a pair instead: {mixed}"),
            4: ("Resolution IV", f"no effect is that of a pair; pairs are mixed: {groups}"),
            5: ("Resolution V", "no effect is mixed with a pair, nor pairs with each other"),
        }[s.resolution]  # fmt: skip
        if s.found:
            yield "To confirm them", "llmexp next proposes the sweep"
    elif f.runs and all(r.screen for r in f.runs):
        yield "Screen", "it is judged when all of its runs have finished, over the same seeds"
    trials = [r for r in f.runs if r.trial and f.key in r.figures and r.rung is None]
    if not trials or not f.ranked or f.target:  # which the search did not choose by
        return
    lead = f.ranked[0]
    if not any(r.trial for r in lead.taking_part):
        own = ", ".join(f.digits(r.figures[f.key]) for r in lead.runs if r in trials)
        yield (
            "Search",
            f"it chose {lead.label} by the lowest of {sum(r.trial for r in f.runs)} trials, {own}, "
            f"which is low by chance too; with fresh seeds it has {figure_text(lead, f.metric)}",
        )
    keys = [k for k in varying(f.settings, f.factors) if k not in (SEED, TWIN)]
    if len(keys) > 1:
        told = importances([r.config for r in trials], keys, [r.figures[f.key] for r in trials])
        parts = [f"{names[key]} {share:.0%} ({low:.0%} to {high:.0%})"
                 for key, (share, low, high) in told.items()]  # fmt: skip
        untold = [names[key] for key in keys if key not in told]
        parts += [f"of {' and '.join(untold)} it is not known"] * bool(untold)
        yield f"Share of the order of {len(trials)} trials that knobs explain", ", ".join(parts)


def _matters(e: Effect, f: Result) -> bool:
    return e.difference.real and e.difference.bound >= f.min_effect


def _effect(f: Result, e: Effect) -> Note:
    keys = varying([s for s in f.settings if not s.out], f.factors)
    others = " and ".join(f.names[key] for key in keys if key != e.key)
    how = "by" if _matters(e, f) else "by too little to matter," if e.difference.real else ""
    what = f"{e.better} is better than {e.worse} {how}"
    if not how:
        what = f"undecided between {e.better} and {e.worse},"
    text = f"{what} {e.difference.text}, averaged over {others} ({e.difference.basis})"
    if e.only is not None:
        text += f", at {listed(e.only)} only" if e.only else f"; it depends on {others}"
    opposite = f", and worse at {listed(e.against)}" * bool(e.against)
    return f.names[e.key], text + opposite


def _why(f: Result) -> Iterator[Note]:
    """Yield what result and notes rest on."""
    if places := _places(f):
        higher = "; where the rate has not decayed yet, losses will still fall"
        budgets = "; ".join(f"{name} {p.planned:,.0f}" for name, p in places.items())
        yield (
            f"{_unit(f).capitalize()} of the whole runs",
            budgets + higher * any(p.decays for p in places.values()),
        )
    yield "Losses are read at", _where(f)
    stages = [stage for r in f.taking_part for stage in r.facts.get("stages") or [r.facts]]
    known = [size for s in stages if (size := s.get("real_batch_size")) is not None]
    sizes = dict.fromkeys(f"{size:,.0f}" for size in (min(known), max(known))) if known else "?"
    if f.batch in _BATCH:
        yield f"Batch ({f.batch})", f"real_batch_size {' to '.join(sizes)}; {_BATCH[f.batch]}"
    if any(r.difference for r in f.ranked):
        small = f"; a difference under {f.min_effect:g} does not matter" * bool(f.min_effect)
        looks = " over all interim analyses" * bool(f.looks)
        of = f" of all {len(f.ranked)} settings" * (len(f.ranked) > 2)
        yield "Intervals", f"at 95 %{looks}, with the noise{of} over their seeds{small}"
        close = [s for s in (runner_up(f), *f.those(*SMALL)) if s]
        pairs = [
            f"{f.ranked[0].label} and {s.label}, {d.details}" for s in close if (d := s.difference)
        ]
        yield "Nearest pair", "".join(pairs[:1])
    few = f.judged and Verdict.FEW_SEEDS in f.verdicts and not f.screen
    if few:
        example = "" if f.foreign else " (train.seed=1,2,3)"
        yield (
            "Few seeds",
            f"the order of the data and rounding move losses, too; more seeds{example} show how "
            "much",
        )
    if f.floor:
        yield (
            "Floor of rounding",
            f"{amount(f.floor.size)}, the largest difference in {f.metric.title} among "
            f"{f.floor.runs} runs that differ in rounding alone ({f.floor.source})",
        )
    elif few and not f.foreign:
        yield (
            "Rounding",
            "not measured; sweep.twins=1 trains the leading setting once more to measure it",
        )
    rungs = sorted({r.rung for r in f.runs if r.rung is not None})
    out = [listed([f.label_of(r) for r in f.runs if r.rung == share]) for share in rungs]
    after = [f"{names} after {100 * share:.3g} %" for names, share in zip(out, rungs, strict=True)]
    facts = f"{'; '.join(after)} of the steps; what was left out may be as good" * bool(rungs)
    yield "Successive halving left out", facts
    for key, name in _FACTS.items():
        found = sorted({str(fact) for r in f.taking_part if (fact := r.facts.get(key))})
        yield name, listed(found) if len(found) > 1 else ""


def _where(f: Result) -> str:
    """Say where the losses are read, and who has no evaluation up to there."""
    runs = [r for r in f.taking_part if not broken(r)]
    if not f.judged or f.key == "final val/loss" or f.align_at is None or len(runs) < 2:
        return ""
    ends = {round(float(p[-1]), 3) for r in runs if len(p := positions(r, f.align))}
    which = "where all runs end" if len(ends) == 1 else "where the first run ends"
    if f.measured and f.align_at < min(ends):
        which = "the last position at which every run was evaluated"
    late = f.align_at * (1 + 1e-9)
    without = [f.label_of(r) for r in runs if not (evaluations(r, f.align) <= late).any()]
    lacking = f"; no evaluation up to there: {listed(without)}"
    told = bool(without) and any(r.measured in r.columns for r in runs)
    return f"{f.position} {UNITS[f.align]}, {which}{lacking * told}"
