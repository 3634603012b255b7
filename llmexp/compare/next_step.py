"""Propose the one command that would tell most about runs, with its cost.

The rules are asked in the order of `NEXT_RULES`; the first one that has a step says it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from llmexp.compare.budgets import common
from llmexp.compare.inference import FEW
from llmexp.compare.judging import THIRD_SEED, needed
from llmexp.compare.records import TWIN, Record, Result, Setting, Verdict, labels
from llmexp.config.commands import command_words, own_parts
from llmexp.config.convert import check_range
from llmexp.config.knobs import SEED, fields, fresh_seeds, is_record
from llmexp.config.labels import plural
from llmexp.config.values import ConfigError, override_value, pasteable
from llmexp.folders import ledger
from llmexp.folders.ending import COMES_AGAIN
from llmexp.run.budget import BUDGETS, sized_by
from llmexp.system.text import columns, duration, in_lines, listed

MOST_SEEDS = 12  # of a setting: a difference that needs more is not worth them
FIRST_SEEDS, ALL_SEEDS = 2, 8  # of a sweep that decides by itself, unless it is given others
MOST_SETTINGS = 8  # that get further seeds, the best ones
# Numbers that have a best value in between.
TUNED = ("optimizer.", "schedule.", "clip.", "model.dropout", "batch.real_batch_size",
         "batch.gradient_accumulation_steps")  # fmt: skip
_PLACE = ("--config-dir", "-cd", "hydra/launcher=", "hydra.launcher.", "hydra.searchpath=")


@dataclass(frozen=True)
class Step:
    """Propose what to do next: a command, its cost, and why."""

    rule: str  # the name of a rule of NEXT_RULES, or nothing
    why: str
    words: tuple[str, ...] = ()  # of the command, after `llmexp`; none where there is none
    runs: int = 0
    tokens: int = 0  # to be trained on, of all runs
    hours: float | None = None  # one run after another; None: not known
    beside_s: float = 0.0  # seconds of each run beside its steps, which `hours` has

    @property
    def command(self) -> str:
        """Return the command, ready to paste; empty where there is none."""
        return " ".join(["llmexp", *map(pasteable, self.words)]) if self.words else ""

    @property
    def data(self) -> dict[str, Any]:
        """Return what `llmexp next --json` prints."""
        cost = {key: getattr(self, key) for key in ("runs", "tokens", "hours", "beside_s")}
        how = {"command": self.command or None, "words": list(self.words)}
        return {"rule": self.rule, "why": self.why, **how, "cost": cost}

    def __str__(self) -> str:
        if not self.words:
            return f"{self.rule}: {self.why}"
        time = "" if self.hours is None else f", about {duration(3600 * self.hours)}"
        if time and self.beside_s:
            time += f" with {duration(self.beside_s)} for the start and end of each"
        cost = f"{plural(self.runs, 'run')}, {self.tokens:,} tokens{time}"
        return f"{self.command}\n{cost}\n{self.rule}: {self.why}"

    def show(self) -> None:
        """Print the step as wide as the terminal is; its command stays one line, to be copied."""
        for line in str(self).splitlines():
            print(line if line == self.command else in_lines(line, columns()))


def before(r: Record) -> float:
    """Return the tokens that the parents of a fork trained on; 0 for a run that is none."""
    return r.parent.get("tokens", 0)


@dataclass(frozen=True)
class Known:
    """Hold what the rules ask: the findings, and which overrides made each setting."""

    f: Result

    @property
    def runs(self) -> list[Record]:
        return self.f.runs

    @cached_property
    def sweep(self) -> ledger.Ledger | None:
        """Return the sweep that all runs belong to, if there is one."""
        one = self.f.sweep
        return ledger.read_ledger(one) if one and ledger.is_sweep(one) else None

    @cached_property
    def overrides(self) -> dict[Path, dict[str, str]]:
        """Return the overrides of each run, as text by key, as its run.json has them."""
        found = {}
        for r in self.runs:
            pairs = (text.partition("=") for text in r.facts.get("overrides") or ())
            found[r.path] = {k: v for k, is_, v in pairs if is_}
        return found

    @cached_property
    def keys(self) -> list[str]:
        """Return the keys whose overrides tell the settings apart."""
        of = list(self.overrides.values())
        keys = dict.fromkeys(key for given in of for key in given)
        swept = {key for r in self.runs if self.sweep for key in r.swept}  # also of a part of it
        varied = (k for k in keys if k in swept or len({given.get(k) for given in of}) > 1)
        apart = (SEED, TWIN) if self.sweep else (SEED, TWIN, *BUDGETS)
        return [k for k in varied if (key := k.lstrip("+")) not in apart and not is_record(key)]

    @cached_property
    def settings(self) -> dict[Setting, dict[str, str]]:
        """Return the overrides that make each setting; empty where they tell none apart."""
        found = {}
        for e in (e for e in self.f.settings if not e.values.get(TWIN)):
            given, config = self.overrides[e.runs[0].path], e.runs[0].config
            known = self.sweep or e.runs[0].facts.get("overrides") is not None
            known = known and all(key in given or key.lstrip("+") in config for key in self.keys)
            if known and len({r.config.get("fork.run") for r in e.runs}) == 1:
                own = ((key, given.get(key)) for key in self.keys)
                found[e] = {k: v or override_value(config.get(k.lstrip("+"))) for k, v in own}
        return found if len({tuple(own.values()) for own in found.values()}) == len(found) else {}

    def values(self, settings: Iterable[Setting]) -> dict[str, list[str]]:
        """Return the values that settings have of the keys that tell them apart."""
        of = [self.settings[s] for s in settings]
        return {key: list(dict.fromkeys(own[key] for own in of)) for key in self.keys}

    def resumed(self, rule: str, why: str, override: str, runs: int) -> Step:
        """Return the step that goes on with the sweep."""
        assert self.sweep is not None
        return self.costed(rule, why, ("resume", str(self.sweep.path), override), runs)

    @cached_property
    def tokens(self) -> int:
        """Return the mean budget of the runs in tokens, of a fork without its parent's."""
        known = [n - before(r) for r in self.runs if (n := r.facts.get("max_tokens"))]
        return round(sum(known) / max(1, len(known)))

    def step(
        self, rule: str, why: str, changes: Mapping[str, Sequence[str]], anew: bool = False
    ) -> Step | None:
        """Return the step that trains the points of a grid, but for those that the sweep has.

        It is a sweep of its own (`anew`) for runs without a sweep. One that decides by itself
        chooses the seeds of a further value too.
        """
        chosen = SEED if self.f.looks and not anew else None
        grid = [f"{k}={','.join(values)}" for k, values in changes.items() if k != chosen]
        words = ("train", "-m", *self.base(changes), *grid)
        each, there = self.tokens, set()
        if "train.max_tokens" in changes:
            each = int(changes["train.max_tokens"][0]) - round(fmean(map(before, self.runs)))
        if self.sweep and not anew:
            words = ("resume", str(self.sweep.path), *grid)
            for e, own in self.settings.items():
                there |= {tuple({**own, SEED: r.seed}.get(k) for k in changes) for r in e.runs}
        runs = len(set(itertools.product(*changes.values())) - there)
        return self.costed(rule, why, words, runs, each) if runs else None

    def costed(
        self, rule: str, why: str, words: Sequence[str], runs: int, each: float | None = None
    ) -> Step:
        """Return the step of a command that trains so many runs, on `each` tokens or their mean."""
        tokens = round(runs * (self.tokens if each is None else each))
        name, *given = words
        parts = dict.fromkeys(part for r in self.runs for part in own_parts(r.config))
        whole = command_words(name, *given, parts=parts)
        if (hours := self.hours(tokens)) is not None:
            hours += runs * self.beside_s / 3600
        return Step(rule, why, whole, runs, tokens, hours, self.beside_s)

    @cached_property
    def beside_s(self) -> float:
        """Return the seconds of a run beside its steps: its start, evaluations, saves and end.

        It is what its status.json has beyond its training: the median; of a run that went on,
        status.json has the last part alone. 0 where no run tells it.
        """
        beyond = []
        for r in self.runs:
            begin, end = map(r.status.get, ("started", "ended"))
            steps = r.figures.get("train_time")
            if begin is not None and end is not None and steps is not None:
                beyond.append(end - begin - steps)
        return median([s for s in beyond if s >= 0] or [0.0])

    def base(self, changed: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the overrides that all runs share, less those that are changed."""
        first = self.overrides[self.runs[0].path]
        same = [k for k in first if all(o.get(k) == first[k] for o in self.overrides.values())]
        tracker = self.runs[0].config.get("tracker.kind")  # no record keeps its override
        gone = {*changed, "train.stop_step", *(BUDGETS if "train.max_tokens" in changed else ())}
        words = [f"{k}={first[k]}" for k in same if k not in gone]
        return self.place() + words + [f"tracker={tracker}"] * (tracker in ("none", "trackio"))

    def place(self) -> list[str]:
        """Return the words of the command that say where its options and its points are."""
        given = self.sweep.arguments if self.sweep else self.runs[0].facts.get("place") or ()
        pairs = itertools.pairwise(["", *given])
        return [w for before, w in pairs if w.lstrip("+").startswith(_PLACE) or before in _PLACE]

    def hours(self, tokens: float) -> float | None:
        """Return the hours that so many tokens take at the rate of the runs' own steps."""
        pairs = ((r.figures.get("train_time"), r.figures.get("tokens_per_sec")) for r in self.runs)
        known = [(s, rate) for s, rate in pairs if s is not None and rate is not None]
        done = sum(seconds * rate for seconds, rate in known)
        return tokens * sum(seconds for seconds, _ in known) / done / 3600 if done else None


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
    if going := sum(r.state == "running" for r in k.runs):
        verb = "is" if going == 1 else "are"
        return Step("wait", f"{plural(going, 'run')} {verb} training now.")
    if any(ledger.is_running(r.sweep) for r in k.runs if r.sweep):
        return Step("wait", "the sweep is still running.")
    unchosen, more = 0, ""
    if k.sweep:
        points, where = k.sweep.points, k.sweep.path
        at = [p for p in points if p.state in ledger.TO_TRAIN and p.rung is None]
        failed = (p for p in points if p.state == "failed" and p.failures < 2)
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
    tokens = unchosen * k.tokens
    for p in left:  # of a run what it has still to train on
        r = records.get(p)
        seen = [before(r), *r.steps["tokens"]][-1] if r else 0
        tokens += round(max(0, r.facts.get("max_tokens", 0) - seen)) if r else k.tokens
    why = f"{plural(len(left), 'run')} did not come to the end.{more}"
    if unchosen:
        why = "the search was stopped before its end."
    runs = len(left) + unchosen
    return k.costed("rest", why, ("resume", str(where)), runs, tokens / runs)


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
        why = f"{labels(ranked)} are undecided{_as_guess(ranked)}."
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
    why = f"{listed([k.f.names[key] for key in s.found])} matter by the screen; "
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


def wider(k: Known) -> Step | None:
    """Widen the range of a number whose best value is at an edge, and towards which losses fall."""
    f, lead = k.f, k.f.ranked[0]
    for (key, here, line), side in itertools.product(_lines(k), (-1, 1)):
        inner = sorted((v for v in line if side * v < side * here), key=lambda v: -side * v)
        outside = any(side * v > side * here for v in line)
        if outside or not inner or here <= 0 or inner[0] == math.inf:
            continue
        sizes = [f.metric.sign * r.size for v in inner[:2] if (r := line[v]) and r.size]
        near, falls = line[inner[0]], len(sizes) > 1 and sizes[1] > sizes[0] > f.min_effect
        if not near or not (near.verdict == Verdict.WORSE or (falls and not near.difference)):
            continue
        beyond = here * here / inner[0] if inner[0] else 2 * here
        whole = all(text.isdigit() for text in k.values(k.settings)[key])
        text = str(round(beyond)) if whole else f"{beyond:.2g}"
        steps = lead.taking_part[0].facts.get("max_steps") or math.inf
        if float(text) in line or (key.startswith("schedule.") and float(text) > steps):
            continue
        edge = "highest" if side > 0 else "lowest"
        name = f.names.get(key, key)
        why = f"the best {name}, {here:g}, is the {edge} of those that were tried, "
        why += "and the loss still falls towards it."
        with contextlib.suppress(ConfigError):  # beyond what the knob takes
            if knob := fields().get(key.lstrip("+")):
                check_range(float(text), key, knob)
            changes = {x: [k.settings[lead][x]] for x in k.keys} | {key: [text]}
            changes[SEED] = sorted(lead.seeds, key=lambda s: (len(s), s))
            if step := k.step("wider", why, changes):
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
    each = _as_guess(near) or f"; {plural(count, 'seed')} each should decide"
    why = f"{labels(chosen)} are undecided{each}."
    if f.looks and k.sweep:  # which gives seeds to all that are not worse
        left = [r for r in f.ranked if r.verdict not in (Verdict.WORSE, Verdict.NEGLIGIBLE)]
        runs = sum(max(0, count - len(r.seeds)) for r in left)
        return k.resumed("seeds", why, f"sweep.max_seeds={count}", runs)
    have = list(dict.fromkeys(s for r in chosen for s in r.seeds))
    every = [*have, *fresh_seeds(have, max(0, count - len(have)))]
    if not k.sweep:  # runs that are there would be trained again
        every = [s for s in every if not all(s in r.seeds for r in chosen)]
    return k.step("seeds", why, k.values(chosen) | {SEED: every})


def _as_guess(settings: Iterable[Setting]) -> str:
    """Return what a third seed is for, where two are too few to tell how many it takes."""
    return f"; {THIRD_SEED}" * any(s.difference and s.difference.vague for s in settings)


def _affordable(f: Result) -> int:
    """Return the seeds of a setting that are still proposed: 12, or twice those of its looks."""
    return max(MOST_SEEDS, 2 * len(f.looks[-1].seeds) if f.looks else 0)


def compared(k: Known) -> Step | None:
    """Stop where losses do not compare, or nothing is known of how the runs were made."""
    f, ranked = k.f, k.f.ranked
    alone = len(ranked) == 1 and len(ranked[0].seeds) == 2
    if not (f.judged and (alone or (len(ranked) > 1 and f.comparable))):
        return Step("nothing", f.headline)
    if not k.settings or not all(e in k.settings or e.values.get(TWIN) for e in ranked):
        return Step("nothing", f"no single command makes runs like these. {f.headline}")
    if not alone:
        return None
    why, have = "two seeds are too few for an interval.", list(ranked[0].seeds)
    if k.sweep and not k.sweep.grid:
        fresh = sum(not r.trial for r in ranked[0].taking_part)
        return k.resumed("seeds", why, "sweep.search.seeds=4", 4 - fresh)
    return k.step("seeds", why, {SEED: [*have * bool(k.sweep), *fresh_seeds(have, 2)]})


NEXT_RULES = (rest, budget, compared, confirm_screen, confirm_search, wider, decide, seeds)
