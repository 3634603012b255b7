"""Hold what a comparison is made of: runs as they were read, and what was found of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.runs.ledger import Look
from llmexp.settings.knobs import SEED

TWIN = "train.twin"
# Why a run is left out that is none of the family of the others.
APART = ("other task", "too short")


@dataclass(frozen=True, eq=False)
class Record:
    """One run, as far as its folder could be read."""

    path: Path
    name: str  # of the folder; unique within a comparison
    sweep: Path | None  # the sweep's folder
    # queued running finished failed preempted; cut: running by its status, with nobody holding its
    # lock
    state: str
    config: dict[str, Any]  # config.yaml with dotted keys
    facts: dict[str, Any]  # run.json
    status: dict[str, Any]  # status.json
    # metrics.jsonl by key: float64, NaN where a row has none; all of the same length
    columns: Mapping[str, np.ndarray]
    problems: tuple[str, ...] = ()  # what could not be read, in words
    swept: tuple[str, ...] = ()  # config keys that its sweep varies
    # nats below which a difference does not matter, as its sweep has it
    negligible: float | None = None
    looks: Sequence[Look] = ()  # of its sweep, where that decides by itself
    rung: float | None = None  # share of its steps after which successive halving left it out
    screen: bool = False  # its sweep is a screen
    trial: bool = False  # a search chose it, by the results of others
    planned: int = 0  # seeds of its setting that its sweep has still to train
    left: int = 0  # runs that its sweep has still to train
    lost: str = ""  # where its rows end before its status says that it did, in words
    last: dict[str, Any] = field(default_factory=dict)  # its last row
    # of a fork: the rows of its parents, up to its step
    before: Mapping[str, np.ndarray] = field(default_factory=dict)
    # As compared: why it takes no part (empty where it does), and its figures by name.
    out: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def seed(self) -> str:
        return str(self.config.get(SEED))

    @property
    def summary(self) -> dict[str, Any]:
        return as_dict(self.status.get("summary"))

    @property
    def parent(self) -> dict[str, Any]:
        """Return what a fork goes on from; empty for a run that is none."""
        return as_dict(self.facts.get("parent"))

    def batch(self, key: str) -> Any:
        """Return a number of the batch as the run solved it, else as its config has it."""
        return self.facts.get(key, self.config.get(f"batch.{key}"))


@dataclass(frozen=True)
class Standing:
    """The standing of an entry beside the leading one."""

    # best | lowest | highest | same | worse | undecided, or why it is left out: running, ...
    mark: str
    difference: float | None = None  # of the metric, this entry's minus the leading one's
    half: float | None = None  # half width of its 95 % interval; None where seeds give none
    basis: str = ""  # what the interval rests on, such as: 3 seeds


@dataclass(frozen=True, eq=False)
class Entry:
    """A line of the table: one run, or the runs that differ in nothing but the seed."""

    name: str
    runs: tuple[Record, ...]
    values: dict[str, Any]  # of the keys that differ between the entries
    # mean over the runs by name of the column; what is not known is absent
    figures: dict[str, float]
    # 95 % interval of the mean, where there are several runs
    intervals: dict[str, tuple[float, float]]
    state: str  # of the worst of the runs
    note: str = ""  # such as: another tokenizer
    # what sets it apart, short: accum=1 clip=0.5; the name of the run where nothing does
    label: str = ""
    standing: Standing = Standing("")
    computation: object = None  # equal for entries that compute the same but for rounding

    @property
    def taking_part(self) -> list[Record]:
        return [r for r in self.runs if not r.out]

    @property
    def out(self) -> str:
        """Say why it takes no part; empty where a run of it does."""
        return "" if self.taking_part else self.runs[0].out

    def label_of(self, *runs: Record) -> str:
        """Return the short name of one or some of its runs: accum=1 seed=2,3."""
        if len(self.runs) == 1:
            return self.label
        seeds = f"seed={','.join(r.seed for r in runs)}"
        # the name of a fold that nothing sets apart is its seeds
        return f"{self.label} {seeds}" if "=" in self.label else seeds


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    key: str  # in Entry.figures
    title: str  # with its unit
    better: str = ""  # lower | higher, where one is
    digits: int = 4  # significant ones

    @property
    def sign(self) -> float:
        """1 where lower is better, or neither; -1 where higher is."""
        return -1.0 if self.better == "higher" else 1.0


@dataclass(frozen=True)
class Target:
    """A figure of the rows that runs are to reach."""

    key: str
    value: float
    sign: float  # 1 where lower is better

    def __str__(self) -> str:
        return f"{self.key}={self.value:.10g}"


@dataclass(frozen=True)
class Comparison:
    """Everything that the table, the JSON and the page show."""

    entries: tuple[Entry, ...]  # the best one first
    differing: tuple[str, ...]  # config keys, by section
    columns: tuple[Column, ...]  # of which some entry has a figure
    metric: str  # of the order, such as: final val/loss
    align: str  # tokens | steps | time: where the metric is read off
    # the last common position there (tokens, steps or seconds); None: each run's own end
    align_at: float | None
    batch: str  # iso-batch | scaling | same | mixed
    problems: tuple[str, ...]  # paths that were no run, damage that was passed over
    # of `differing`, those that vary of themselves and not as another's consequence
    factors: tuple[str, ...] = ()
    target: Target | None = None  # that runs are to reach; the metric is where they did
    screen: Any = None  # screening.Screen, of the knobs of a screen
    headline: str = ""  # the result, in one line
    notes: tuple[str, ...] = ()  # what must be known beside it: other budgets, what was left out
    why: tuple[str, ...] = ()  # what both rest on, for those who ask

    @property
    def runs(self) -> list[Record]:
        return [r for e in self.entries for r in e.runs]

    @property
    def taking_part(self) -> list[Record]:
        return [r for r in self.runs if not r.out]

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return all that was found, the answer first."""
        return tuple(text for text in (self.headline, *self.notes, *self.why) if text)

    def label_of(self, run: Record) -> str:
        return next(e.label_of(run) for e in self.entries if run in e.runs)


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return `a, b and c`, or `a, b, c and 4 more`."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
