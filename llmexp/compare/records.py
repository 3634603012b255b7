"""Hold what a comparison is made of: runs as read from their folders, and what was found out about
them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
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
    columns: dict[
        str, np.ndarray
    ]  # metrics.jsonl by key: float64, NaN where a row has none; all of the same length
    problems: tuple[str, ...] = ()  # what could not be read, in words
    swept: tuple[str, ...] = ()  # config keys that its sweep varies
    # nats below which a difference does not matter, as its sweep has it
    negligible: float | None = None
    rung: float | None = None  # share of its steps after which successive halving left it out
    planned: int = 0  # seeds of its setting that its sweep has still to train
    lost: str = ""  # where its rows end before its status says that it did, in words


@dataclass(frozen=True)
class Standing:
    """The standing of an entry beside the leading one."""

    # best | lowest | highest | same | worse | undecided, or why it is left out: running, too short,
    # ...
    mark: str
    difference: float | None = None  # of the metric, this entry's minus the leading one's
    half: float | None = None  # half width of its 95 % interval; None where seeds give none
    basis: str = ""  # what the interval rests on, such as: 3 seeds


@dataclass(frozen=True)
class Entry:
    """A line of the table: one run, or the runs that differ in nothing but the seed."""

    name: str
    runs: tuple[Record, ...]
    values: dict[str, Any]  # of the keys that differ between the entries
    figures: dict[
        str, float
    ]  # mean over the runs by name of the column; what is not known is absent
    intervals: dict[
        str, tuple[float, float]
    ]  # 95 % interval of the mean, where there are several runs
    state: str  # of the worst of the runs
    note: str = ""  # such as: another tokenizer
    run_figures: tuple[dict[str, float], ...] = ()  # of each of the runs
    # what sets it apart, short: accum=1 clip=0.5; the name of the run where nothing does
    label: str = ""
    standing: Standing = Standing("")
    computation: object = None  # equal for entries that compute the same but for rounding


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
class Comparison:
    """Everything that the table, the JSON, the page and the picture show."""

    entries: tuple[Entry, ...]  # the best one first
    differing: tuple[str, ...]  # config keys, by section
    columns: tuple[Column, ...]  # of which some entry has a figure
    metric: str  # of the order, such as: final val/loss
    align: str  # tokens | steps | time: where the metric is read off
    align_at: (
        float | None
    )  # the last common position there (tokens, steps or seconds); None: each run's own end
    batch: str  # iso-batch | scaling | same | mixed
    problems: tuple[str, ...]  # paths that were no run, damage that was passed over
    factors: tuple[
        str, ...
    ] = ()  # of `differing`, those that vary of themselves and not as another's consequence
    headline: str = ""  # the result, in one line
    notes: tuple[str, ...] = ()  # what must be known beside it: other budgets, what was left out
    why: tuple[str, ...] = ()  # what both rest on, for those who ask

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return all that can be said, the answer first."""
        return tuple(text for text in (self.headline, *self.notes, *self.why) if text)
