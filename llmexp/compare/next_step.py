"""Propose the one command that would tell most about runs, with its cost.

The rules are asked in the order of `NEXT_RULES`; the first one that has a step says it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from pathlib import Path

from llmexp.compare.budgets import common
from llmexp.compare.inference import FEW
from llmexp.compare.judging import needed
from llmexp.compare.known import Known, Step, before
from llmexp.compare.records import TWIN, Record, Result, Setting, Verdict, labels
from llmexp.config.convert import check_range
from llmexp.config.knobs import SEED, fields, fresh_seeds
from llmexp.config.labels import plural
from llmexp.config.values import ConfigError, override_value
from llmexp.folders import ledger
from llmexp.folders.ending import COMES_AGAIN
from llmexp.run.budget import BUDGETS, sized_by
from llmexp.system.text import listed

MOST_SEEDS = 12  # of a setting: a difference that needs more is not worth them
FIRST_SEEDS, ALL_SEEDS = 2, 8  # of a sweep that decides by itself, unless it is given others
MOST_SETTINGS = 8  # that get further seeds, the best ones
# Numbers that have a best value in between.
TUNED = ("optimizer.", "schedule.", "clip.", "model.dropout", "batch.real_batch_size",
         "batch.gradient_accumulation_steps")  # fmt: skip


def propose(f: Result) -> Step:
    """Return the step that would tell most."""
    known = Known(f)
    if step := next(filter(None, (rule(known) for rule in NEXT_RULES)), None):
        return step
    most = _affordable(f)
    if any((needed(r, f) or 0) > most for r in f.ranked):
        return Step("nothing", f"more than {most} seeds each are not proposed. {f.headline}")
    return Step("nothing", f.headline)


def rest(k: Known) -> Step | None:
    """Train what the sweep, or a run, has still to train; what failed is tried once more."""
    if k.f.foreign:
        return None
    records = {r.path.resolve(): r for r in k.runs}
    if going := [r for r in k.runs if r.state == "running"]:
        verb = "is" if len(going) == 1 else "are"
        return Step("wait", f"{plural(len(going), 'run')} {verb} training now.")
    if any(ledger.is_running(r.sweep) for r in k.runs if r.sweep):
        return Step("wait", "the sweep is still running.")
    unchosen, more = 0, ""
    if k.sweep:
        points, where = k.sweep.points, k.sweep.path
        at = [p for p in points if p.state in ledger.TO_TRAIN and p.rung is None]
        failed = (p for p in points if p.state == "failed" and p.attempts < 2)
        at += [p for p in failed if COMES_AGAIN not in (p.error or "")]
        left = [(where / p.folder).resolve() for p in at]
        if not k.sweep.grid and k.sweep.state in ledger.TO_TRAIN:
            unchosen = max((k.sweep.planned or 0) - len(points), int(not left))
    else:
        stopped = [r.path for r in k.runs if r.state in ("preempted", "crashed") and r.rung is None]
        left, where = [path.resolve() for path in stopped[:1]], next(iter(stopped), Path())
        more = f" Of {len(stopped)} such runs this is the first." * (len(stopped) > 1)
    if not left and not unchosen:
        return None
    tokens = round(sum(_left(records[p]) if p in records else k.tokens for p in left))
    tokens += unchosen * k.tokens
    why = f"{plural(len(left), 'run')} did not come to the end.{more}"
    if unchosen:
        why = "the search was stopped before its end."
    runs = len(left) + unchosen
    return k.costed("rest", why, ("resume", str(where)), runs, tokens / runs)


def _left(r: Record) -> float:
    """Return the tokens that a run has still to train on."""
    seen = [before(r), *r.steps["tokens"]][-1]
    return max(0.0, r.facts.get("max_tokens", 0) - seen)


def budget(k: Known) -> Step | None:
    """Train all on as many tokens, where budgets differ without having been swept."""
    f = k.f
    places = [group[0].place for group in f.budgets]
    swept = {key for r in k.runs for key in r.swept} | set(k.keys)
    chosen = any(key.startswith((*BUDGETS, "fork.")) for key in swept)
    chosen = chosen or any(sized_by(r.config) for r in k.runs)
    if len(f.budgets) < 2 or None in places or chosen or not k.settings:
        return None
    changes = k.values(k.settings)
    changes[SEED] = list(dict.fromkeys(r.seed for r in f.taking_part))
    changes["train.max_tokens"] = [str(common([p.spent for p in places if p]))]
    why = "the settings trained on unequal numbers of tokens, so their losses do not compare."
    return k.step("budget", why, changes, anew=True)


def confirm_search(k: Known) -> Step | None:
    """Train the best trials of a search again, with fresh seeds: the lowest of many is luck too."""
    if not k.sweep or k.sweep.grid:
        return None
    ranked = k.f.ranked
    if any(not r.trial for r in k.runs):
        wanted = [n for r in ranked if (n := needed(r, k.f)) and n <= MOST_SEEDS]
        wanted += [FEW] * bool(k.f.those(Verdict.FEW_SEEDS))
        if not wanted:
            return Step("nothing", k.f.headline)
        runs = sum(max(0, max(wanted) - len(r.seeds)) for r in ranked)
        why = f"{labels(ranked)} are undecided."
        return k.resumed("seeds", why, f"sweep.search.seeds={max(wanted)}", runs)
    best = ranked[:FEW]
    why = f"the search chose {best[0].label} by looking at {plural(len(k.runs), 'trial')}."
    return k.resumed("confirm", why, f"sweep.search.rerun_top={FEW}", FEW * len(best))


def confirm_screen(k: Known) -> Step | None:
    """Confirm the largest effects of a screen, by all combinations of these keys over seeds."""
    s = k.f.screen
    if s is None:
        left = Step("nothing", "a screen is judged once all of its runs have finished.")
        return left if k.sweep and k.sweep.screen else None
    short = {key.lstrip("+"): key for key in k.keys}
    if not s.found or not set(s.knobs) <= short.keys():
        return Step("nothing", k.f.headline)
    changes, asked = {}, s.found[: MOST_SETTINGS.bit_length() - 1]
    for key in s.knobs:
        better = s.better(key, k.f.metric.sign)
        two = sorted(s.levels[key], key=lambda level: level != better)
        changes[short[key]] = [override_value(level) for level in two][: 1 + (key in asked)]
    grid = [f"{key}={','.join(values)}" for key, values in changes.items()]
    runs = FIRST_SEEDS * 2 ** len(asked)
    words = ("train", "-m", *k.base(changes), *grid, "sweep.decide=true")
    why = f"{listed([k.name(key) for key in s.found])} matter by the screen; "
    if len(asked) < len(s.found):
        why += f"the {len(asked)} largest effects are asked for, "
    why += "the others keep the value that looks better."
    return k.costed("screen", why, words, runs)


def _lines(k: Known) -> list[tuple[str, float, dict[float, Setting | None]]]:
    """Return key, best value, and the settings that differ from the best one in this number alone.

    They stand by their number, null as infinity; None is one that was left out, such as one that
    failed.
    """
    own, found = k.settings[k.f.ranked[0]], []
    for key in (key for key in k.keys if key.lstrip("+").startswith(TUNED)):
        with contextlib.suppress(ValueError):  # a word is no number
            line = {
                math.inf if other[key] == "null" else float(other[key]): s if s.seeds else None
                for s, other in reversed(k.settings.items())  # the best one counts
                if all(other[x] == own[x] for x in k.keys if x != key)
            }
            if own[key] != "null":
                found.append((key, float(own[key]), line))
    return found


def _with(k: Known, key: str, value: float, why: str, line: Collection[float]) -> Step | None:
    """Return the step that trains the best setting with another value of a key than its `line`."""
    lead = k.f.ranked[0]
    own = k.settings[lead]
    whole = all(text.isdigit() for text in k.values(k.settings)[key])
    text = str(round(value)) if whole else f"{value:.2g}"
    steps = lead.taking_part[0].facts.get("max_steps") or math.inf
    if float(text) in line or (key.startswith("schedule.") and float(text) > steps):
        return None
    with contextlib.suppress(ConfigError):  # beyond what the knob takes
        if knob := fields().get(key.lstrip("+")):
            check_range(float(text), key, knob)
        changes = {x: [own[x]] for x in k.keys} | {key: [text]}
        changes[SEED] = sorted(lead.seeds, key=lambda s: (len(s), s))
        return k.step("wider", why, changes)
    return None


def wider(k: Known) -> Step | None:
    """Widen the range of a number whose best value is at an edge, and towards which losses fall."""
    f = k.f
    for key, here, line in _lines(k):
        for side in (-1, 1):
            inner = sorted((v for v in line if side * v < side * here), key=lambda v: -side * v)
            outside = any(side * v > side * here for v in line)
            if outside or not inner or here <= 0 or inner[0] == math.inf:
                continue
            sizes = [f.metric.sign * r.size for v in inner[:2] if (r := line[v]) and r.size]
            near = line[inner[0]]
            falls = len(sizes) > 1 and sizes[1] > sizes[0] > f.min_effect
            if near and (near.verdict == Verdict.WORSE or (falls and not near.difference)):
                edge = "highest" if side > 0 else "lowest"
                why = f"the best {k.name(key)}, {here:g}, is the {edge} of those that were tried, "
                why += "and the loss still falls towards it."
                beyond = here * here / inner[0] if inner[0] else 2 * here
                if step := _with(k, key, beyond, why, line):
                    return step
    return None


def decide(k: Known) -> Step | None:
    """Let a grid of single seeds find out itself how many seeds each of its settings needs."""
    sweep, count = k.sweep, len(k.settings)
    if not sweep or not sweep.grid or any("sweep.halving=" in a for a in sweep.arguments):
        return None
    if k.f.looks or count < 2 or any(len(r.seeds) > 1 for r in k.f.ranked):
        return None
    if not k.f.those(Verdict.FEW_SEEDS):  # all computed the same
        return None
    runs, most = count * (FIRST_SEEDS - 1), count * (ALL_SEEDS - 1)
    why = f"one seed each decides nothing; adds seeds until one leads, {most} runs at most."
    return k.resumed("decide", why, "sweep.decide=true", runs)


def seeds(k: Known) -> Step | None:
    """Give further seeds to the settings that can still be best, so many as should decide."""
    f, lead = k.f, k.f.ranked[0]
    if f.looks and not f.looks[-1].is_last:  # the sweep asks for its seeds itself
        return None
    worse = [f.metric.sign * (r.size or 0.0) for r in f.those(Verdict.WORSE)]
    few = f.those(Verdict.FEW_SEEDS)[: MOST_SETTINGS - 1]
    few = [r for r in few if f.metric.sign * (r.size or 0.0) < min(worse, default=math.inf)]
    wanted = {r: needed(r, f) for r in (*f.those(Verdict.UNDECIDED)[: MOST_SETTINGS - 1], *few)}
    near = {r: n for r, n in wanted.items() if n and n <= _affordable(f)}
    if not near:
        return None
    chosen, count = (lead, *near), max(near.values())
    why = f"{labels(chosen)} are undecided; {plural(count, 'seed')} each should decide."
    if f.looks and k.sweep:  # which gives seeds to all that are not worse
        left = [r for r in f.ranked if r.verdict not in (Verdict.WORSE, Verdict.NEGLIGIBLE)]
        runs = sum(max(0, count - len(r.seeds)) for r in left)
        return k.resumed("seeds", why, f"sweep.max_seeds={count}", runs)
    have = list(dict.fromkeys(s for r in chosen for s in r.seeds))
    every = [*have, *fresh_seeds(have, max(0, count - len(have)))]
    if not k.sweep:  # runs that are there would be trained again
        every = [s for s in every if not all(s in r.seeds for r in chosen)]
    changes = k.values(chosen)
    return k.step("seeds", why, changes | {SEED: every})


def _affordable(f: Result) -> int:
    """Return the seeds of a setting that are still proposed: 12, or twice those of its looks."""
    return max(MOST_SEEDS, 2 * len(f.looks[-1].seeds) if f.looks else 0)


def _alone(k: Known) -> Step | None:
    """Give a setting that has two seeds, and no rival, two further ones."""
    why, lead = "two seeds are too few for an interval.", k.f.ranked[0]
    if k.sweep and not k.sweep.grid:
        fresh = sum(not r.trial for r in lead.taking_part)
        return k.resumed("seeds", why, "sweep.search.seeds=4", 4 - fresh)
    have = list(lead.seeds)
    more = fresh_seeds(have, 2)
    return k.step("seeds", why, {SEED: [*have, *more] if k.sweep else more})


def compared(k: Known) -> Step | None:
    """Stop where losses do not compare, or nothing is known of how the runs were made."""
    f, ranked = k.f, k.f.ranked
    alone = len(ranked) == 1 and len(ranked[0].seeds) == 2
    if not (f.judged and (alone or (len(ranked) > 1 and f.comparable))):
        return Step("nothing", f.headline)
    if k.settings and all(e in k.settings or e.values.get(TWIN) for e in ranked):
        return _alone(k) if alone else None
    return Step("nothing", f"no single command makes runs like these. {f.headline}")


NEXT_RULES = (rest, budget, compared, confirm_screen, confirm_search, wider, decide, seeds)
