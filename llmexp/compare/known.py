"""Hold what the rules of the next step ask about runs, and how a step is said."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from llmexp.compare.records import TWIN, Record, Result, Setting
from llmexp.config.commands import command_words, own_parts
from llmexp.config.knobs import SEED, is_record
from llmexp.config.labels import plural
from llmexp.config.values import override_value, pasteable
from llmexp.folders import ledger
from llmexp.run.budget import BUDGETS
from llmexp.system.text import columns, duration, in_lines

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
        if not self.words:
            return ""
        return " ".join(["llmexp", *map(pasteable, self.words)])

    @property
    def data(self) -> dict[str, Any]:
        """Return what `llmexp next --json` prints."""
        cost = {
            "runs": self.runs,
            "tokens": self.tokens,
            "hours": self.hours,
            "beside_s": self.beside_s,
        }
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
        different = {tuple(own.values()) for own in found.values()}
        return found if len(different) == len(found) else {}

    def values(self, settings: Iterable[Setting]) -> dict[str, list[str]]:
        """Return the values that settings have of the keys that tell them apart."""
        of = [self.settings[s] for s in settings]
        return {key: list(dict.fromkeys(own[key] for own in of)) for key in self.keys}

    def name(self, key: str) -> str:
        """Return a key as the table shows it."""
        return self.f.names.get(key, key)

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
        pairs = zip(["", *given], given, strict=False)
        return [w for before, w in pairs if w.lstrip("+").startswith(_PLACE) or before in _PLACE]

    def hours(self, tokens: float) -> float | None:
        """Return the hours that so many tokens take at the rate of the runs' own steps."""
        known = [
            r.figures for r in self.runs if {"train_time", "tokens_per_sec"} <= r.figures.keys()
        ]
        done = sum(r["train_time"] * r["tokens_per_sec"] for r in known)
        return tokens * sum(r["train_time"] for r in known) / done / 3600 if done else None
