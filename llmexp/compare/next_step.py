"""Propose the one command that would tell most about runs, with its cost.

The rules are asked in the order of `RULES`; the first one that has a step says it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llmexp.compare.answer import headline, listed, needed
from llmexp.compare.budgets import Spent, common
from llmexp.compare.evidence import FEW, Rival, Verdict
from llmexp.compare.judging import Findings
from llmexp.compare.records import SEED, TWIN, Entry, Record
from llmexp.run.budget import BUDGETS
from llmexp.runs import ledger
from llmexp.runs.rundir import allowed_again
from llmexp.settings.convert import check_range
from llmexp.settings.knobs import fields
from llmexp.settings.labels import plural, short_keys
from llmexp.settings.values import ConfigError, override_value, pasteable
from llmexp.system.text import duration, number

MOST_SEEDS = 12  # of a setting: a difference that needs more is not worth them
MOST_SETTINGS = 8  # that get further seeds, the best ones
# Numbers that have a best value in between.
TUNED = ("optimizer.", "schedule.", "clip.", "model.dropout", "batch.real_batch_size",
         "batch.gradient_accumulation_steps")  # fmt: skip


@dataclass(frozen=True)
class Step:
    """What to do next: a command, its cost, and why."""

    rule: str  # the name of a rule of RULES, or nothing
    why: str
    words: tuple[str, ...] = ()  # of the command, after `llmexp`; none where there is none
    runs: int = 0
    tokens: int = 0  # to be trained on, of all runs
    hours: float | None = None  # of training, one run after another; None: not known

    @property
    def command(self) -> str:
        """Return the command, ready to paste; empty where there is none."""
        return f"llmexp {' '.join(map(pasteable, self.words))}{allowed_again()}" * bool(self.words)

    @property
    def data(self) -> dict[str, Any]:
        """Return what `llmexp next --json` prints."""
        cost = {"runs": self.runs, "tokens": self.tokens, "hours": self.hours}
        how = {"command": self.command or None, "words": list(self.words)}
        return {"rule": self.rule, "why": self.why, **how, "cost": cost}

    def __str__(self) -> str:
        if not self.words:
            return f"{self.rule}: {self.why}"
        time = "" if self.hours is None else f", about {duration(3600 * self.hours)}"
        cost = f"{plural(self.runs, 'run')}, {self.tokens:,} tokens{time}"
        return f"{self.command}\n{cost}\n{self.rule}: {self.why}"


@dataclass(frozen=True)
class Known:
    """What the rules ask: the findings, and which overrides made each setting."""

    f: Findings

    @property
    def runs(self) -> list[Record]:
        return self.f.c.runs

    @cached_property
    def sweep(self) -> ledger.Ledger | None:
        """Return the sweep that all runs belong to, if there is one."""
        sweeps = {r.sweep for r in self.runs}
        one = sweeps.pop() if len(sweeps) == 1 else None
        return ledger.read(one) if one and ledger.is_sweep(one) else None

    @cached_property
    def overrides(self) -> dict[Path, dict[str, str]]:
        """Return the overrides of each run, as text by key, as its run.json has them."""
        found = {}
        for r in self.runs:
            given = r.facts.get("overrides")
            texts = map(str, given) if isinstance(given, list) else ()
            found[r.path] = {k: v for k, is_, v in (t.partition("=") for t in texts) if is_}
        return found

    @cached_property
    def keys(self) -> list[str]:
        """Return the keys whose overrides tell the settings apart."""
        of = list(self.overrides.values())
        keys = dict.fromkeys(key for given in of for key in given)
        swept = {key for r in self.runs if self.sweep for key in r.swept}  # also of a part of it
        varied = (k for k in keys if k in swept or len({given.get(k) for given in of}) > 1)
        apart = (SEED, TWIN) if self.sweep else (SEED, TWIN, *BUDGETS)
        return [key for key in varied if key.lstrip("+") not in apart]

    @cached_property
    def settings(self) -> dict[Entry, dict[str, str]]:
        """Return the overrides that make each setting; empty where they tell none apart."""
        found = {}
        for e in (e for e in self.f.c.entries if not e.values.get(TWIN)):
            given, config = self.overrides[e.runs[0].path], e.runs[0].config
            known = all(key in given or key.lstrip("+") in config for key in self.keys)
            if known and len({r.config.get("fork.run") for r in e.runs}) == 1:
                own = ((key, given.get(key)) for key in self.keys)
                found[e] = {k: v or override_value(config.get(k.lstrip("+"))) for k, v in own}
        return found if len({tuple(own.values()) for own in found.values()}) == len(found) else {}

    def name(self, key: str) -> str:
        """Return a key as the table shows it."""
        return short_keys(self.f.c.factors).get(key, key)

    @cached_property
    def tokens(self) -> int:
        """Return the mean budget of the runs in tokens."""
        known = [n for r in self.runs if (n := number(r.facts.get("max_tokens")))]
        return round(sum(known) / max(1, len(known)))

    def step(
        self, rule: str, why: str, changes: Mapping[str, Sequence[str]], anew: bool = False
    ) -> Step | None:
        """Return the step that trains the points of a grid, but for those that the sweep has.

        It is a sweep of its own (`anew`) for runs without a sweep.
        """
        grid = [f"{key}={','.join(values)}" for key, values in changes.items()]
        words = ("train", "-m", *self.base(changes), *grid)
        each, there = int(changes.get("train.max_tokens", [self.tokens])[0]), set()
        if self.sweep and not anew:
            words = ("resume", str(self.sweep.path), *grid)
            for e, own in self.settings.items():
                there |= {tuple({**own, SEED: r.seed}.get(k) for k in changes) for r in e.runs}
        runs = len(set(itertools.product(*changes.values())) - there)
        return Step(rule, why, words, runs, runs * each, self.hours(runs * each)) if runs else None

    def base(self, changed: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the overrides that all runs share, less those that are changed."""
        first = self.overrides[self.runs[0].path]
        same = [k for k in first if all(o.get(k) == first[k] for o in self.overrides.values())]
        tracker = self.runs[0].config.get("tracker.kind")  # no record keeps its override
        gone = {*changed, *(BUDGETS if "train.max_tokens" in changed else ())}
        words = [f"{k}={first[k]}" for k in same if k not in gone]
        return words + [f"tracker={tracker}"] * (tracker in ("none", "trackio"))

    def hours(self, tokens: float) -> float | None:
        """Return the hours that so many tokens take at the rate of the runs' own steps."""
        rates = [r.figures for r in self.runs if {"train_time", "tokens_seen"} <= r.figures.keys()]
        seen = sum(r.get("own_tokens", r["tokens_seen"]) for r in rates)
        return tokens * sum(r["train_time"] for r in rates) / seen / 3600 if seen else None


def next_step(f: Findings) -> Step:
    """Return the step that would tell most."""
    known = Known(f)
    for rule in RULES:
        if step := rule(known):
            return step
    return Step("nothing", headline(f))


def rest(k: Known) -> Step | None:
    """Train what the sweep, or a run, has still to train; what failed is tried once more."""
    records = {r.path.name: r for r in k.runs}
    if going := [r for r in k.runs if r.state == "running"]:
        return Step("wait", f"{plural(len(going), 'run')} did not come to the end yet.")
    if k.sweep:
        points = k.sweep.points
        left = [p.folder for p in points if p.state in ledger.TO_TRAIN and p.rung is None]
        left += [p.folder for p in points if p.state == "failed" and p.attempts < 2]
    else:
        stopped = (r for r in k.runs if r.state in ("preempted", "cut") and r.rung is None)
        left = [r.path.name for r in stopped][:1]
    if not left:
        return None
    where = k.sweep.path if k.sweep else records[left[0]].path
    tokens = round(sum(_left(records[p]) if p in records else k.tokens for p in left))
    why = f"{plural(len(left), 'run')} did not come to the end."
    return Step("rest", why, ("resume", str(where)), len(left), tokens, k.hours(tokens))


def _left(r: Record) -> float:
    """Return the tokens that a run has still to train on."""
    seen = [0.0, *r.columns.get("tokens_seen", ())][-1]
    return max(0.0, (number(r.facts.get("max_tokens")) or 0.0) - seen)


def budget(k: Known) -> Step | None:
    """Train all on as many tokens, where budgets differ without having been swept."""
    f = k.f
    places = [group[0].place for group in f.budgets]
    swept = {key for r in k.runs for key in r.swept} | set(k.keys)
    chosen = any(key.startswith((*BUDGETS, "fork.")) for key in swept)
    if len(f.budgets) < 2 or None in places or chosen or not k.settings:
        return None
    spent = [Spent({}, round(p.planned), max(1, round(p.planned / p.grain))) for p in places if p]
    changes = {key: _values(k.settings.values(), key) for key in k.keys}
    changes[SEED] = list(dict.fromkeys(r.seed for r in f.c.taking_part))
    why = "the settings trained on unequal numbers of tokens, so their losses do not compare."
    return k.step("budget", why, changes | {"train.max_tokens": [str(common(spent))]}, anew=True)


def confirm(k: Known) -> Step | None:
    """Train the best trials of a search again, with fresh seeds: the lowest of many is luck too."""
    if not k.sweep or k.sweep.grid:
        return None
    best = [r.entry for r in k.f.ranked[:FEW]]
    why = f"the search chose {best[0].label} by looking at {plural(len(k.runs), 'trial')}."
    if any("experiment" in given for given in k.overrides.values()):  # it would search again
        return Step("confirm", f"{why} Train its best trials in a sweep of their own, over seeds.")
    used = {r.seed for r in k.runs}
    fresh = [s for s in map(str, range(1, len(used) + FEW + 1)) if s not in used][:FEW]
    found = [{key: _values([k.settings[e] for e in some], key) for key in k.keys}
             for some in (best, best[:1])]  # fmt: skip
    changes = next(c for c in found if math.prod(map(len, c.values())) <= FEW**2)
    return k.step("confirm", why, changes | {SEED: fresh}, anew=True)


def _values(settings: Any, key: str) -> list[str]:
    return list(dict.fromkeys(own[key] for own in settings))


def _lines(k: Known) -> list[tuple[str, float, dict[float, Rival | None]]]:
    """Return key, best value, and the settings that differ from the best one in this number alone.

    They stand by their number, null as infinity; None is one that was left out, such as one that
    failed.
    """
    rivals = {r.entry: r for r in k.f.ranked}
    own, found = k.settings[k.f.ranked[0].entry], []
    for key in (key for key in k.keys if key.lstrip("+").startswith(TUNED)):
        with contextlib.suppress(ValueError):  # a word is no number
            line = {
                math.inf if other[key] == "null" else float(other[key]): rivals.get(e)
                for e, other in reversed(k.settings.items())  # the best one counts
                if all(other[x] == own[x] for x in k.keys if x != key)
            }
            if own[key] != "null":
                found.append((key, float(own[key]), line))
    return found


def _with(k: Known, key: str, value: float, rule: str, why: str) -> Step | None:
    """Return the step that trains the best setting with another value of a key."""
    lead = k.f.ranked[0]
    own = k.settings[lead.entry]
    whole = all(text.isdigit() for text in _values(k.settings.values(), key))
    text = str(round(value)) if whole else f"{value:.2g}"
    if text == own[key]:
        return None
    with contextlib.suppress(ConfigError):  # beyond what the knob takes
        if knob := fields().get(key.lstrip("+")):
            check_range(float(text), key, knob)
        changes = {x: [own[x]] for x in k.keys} | {key: [text]}
        changes[SEED] = sorted(lead.seeds, key=lambda s: (len(s), s))
        return k.step(rule, why, changes)
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
            falls = len(sizes) > 1 and sizes[1] > sizes[0] > f.negligible
            if near and (near.verdict == Verdict.WORSE or (falls and not near.difference)):
                edge = "highest" if side > 0 else "lowest"
                why = f"the best {k.name(key)}, {here:g}, is the {edge} of those that were tried, "
                why += "and the loss still falls towards it."
                beyond = here * here / inner[0] if inner[0] else 2 * here
                if step := _with(k, key, beyond, "wider", why):
                    return step
    return None


def seeds(k: Known) -> Step | None:
    """Give further seeds to the settings that can still be best, so many as should decide."""
    f, lead = k.f, k.f.ranked[0]
    worse = [f.metric.sign * (r.size or 0.0) for r in f.those(Verdict.WORSE)]
    few = f.those(Verdict.FEW_SEEDS)[: MOST_SETTINGS - 1]
    few = [r for r in few if f.metric.sign * (r.size or 0.0) < min(worse, default=math.inf)]
    undecided = f.those(Verdict.UNDECIDED)[: MOST_SETTINGS - 1]
    wanted = {r: needed(r, f) or math.inf for r in undecided}
    if not (near := [r for r in wanted if wanted[r] <= MOST_SEEDS]) and not few:
        return None
    chosen = (lead, *near, *few)
    have = list(dict.fromkeys(s for r in chosen for s in r.seeds))
    count = max(FEW, len(lead.seeds) + bool(near), *(int(wanted[r]) for r in near))
    free = (str(s) for s in itertools.count(1) if str(s) not in have)
    every = [*have, *itertools.islice(free, max(0, count - len(have)))]
    if not k.sweep:  # runs that are there would be trained again
        every = [s for s in every if not all(s in r.seeds for r in chosen)]
    changes = {key: _values([k.settings[r.entry] for r in chosen], key) for key in k.keys}
    names = listed([r.label for r in chosen])
    why = f"{names} are not told apart; {plural(count, 'seed')} each should tell."
    return k.step("seeds", why, changes | {SEED: every})


def finer(k: Known) -> Step | None:
    """Try the lowest point of the parabola through the best value of a number and its neighbours.

    The gain that it promises must matter, and be one that as many seeds can show.
    """
    f = k.f
    for key, here, line in _lines(k):
        below = max((v for v in line if v < here), default=0.0)
        above = min((v for v in line if v > here), default=math.inf)
        sides = [line.get(v) for v in (below, above) if 0 < v < math.inf]
        shown = [(r.difference, f.metric.sign * (r.size or 0.0)) for r in sides if r]
        if len(shown) < 2 or None in (d for d, _ in shown):
            continue
        x = [math.log(v / here) for v in (below, above)]
        slopes = [size / at for at, (_, size) in zip(x, shown, strict=True)]
        bend = (slopes[1] - slopes[0]) / (x[1] - x[0])
        tilt = slopes[0] - bend * x[0]
        gain = tilt**2 / (4 * bend) if bend > 0 else 0.0
        if gain < max(f.negligible, min(d.half for d, _ in shown if d)):
            continue
        why = f"between {below:g} and {above:g} the losses bend as if another {k.name(key)} "
        why += f"gained {gain:.2g}."
        if step := _with(k, key, here * math.exp(-tilt / (2 * bend)), "finer", why):
            return step
    return None


def compared(k: Known) -> Step | None:
    """Stop where losses do not compare, or nothing is known of how the runs were made."""
    f, ranked = k.f, [r.entry for r in k.f.ranked]
    if len(ranked) < 2 or not f.is_loss or not f.comparable:
        return Step("nothing", headline(f))
    if not k.settings or any(e not in k.settings and not e.values.get(TWIN) for e in ranked):
        return Step("nothing", f"the folders do not say how to make such runs. {headline(f)}")
    return None


RULES = (rest, budget, compared, confirm, wider, seeds, finer)
