"""Hold what a comparison is made of: runs as they were read, and what was found of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.budgets import Spent
from llmexp.compare.inference import Difference
from llmexp.compare.screening import Screen
from llmexp.config.knobs import SEED, is_record
from llmexp.config.labels import short_keys
from llmexp.folders.ledger import Look
from llmexp.metrics.keys import ROW_KEYS, is_of_named_set, is_score
from llmexp.system.text import amount, listed, shown, with_interval

TWIN = "train.twin"
# Why a run is left out that is none of the family of the others.
APART = ("other task", "too short")
LEADING = ("best", "lowest", "highest")  # marks of the leading one of several
LOSS_FIGURES = ("val/loss", "final val/loss", "best val/loss", "train/loss", "val/bits_per_byte")
REACHED = "target/reached"  # 1 or 0: the figure that tells whether a run reached its target


@dataclass(frozen=True, eq=False)
class Record:
    """One run, as far as its folder, or another source, could be read."""

    path: Path
    name: str  # of the folder; unique within a comparison
    sweep: Path | None  # the sweep's folder
    state: str  # one of runs.folder.STATES; empty where the source does not say
    config: dict[str, Any]  # config.yaml with dotted keys
    facts: dict[str, Any]  # run.json
    status: dict[str, Any]  # status.json
    # metrics.jsonl by key: float64, NaN where a row has none; all of the same length
    columns: Mapping[str, np.ndarray]
    problems: tuple[str, ...] = ()  # what could not be read, in words
    swept: tuple[str, ...] = ()  # config keys that its sweep varies
    min_effect: float | None = None  # nats of its sweep; a difference below does not matter
    looks: Sequence[Look] = ()  # of its sweep, where that decides by itself
    rung: float | None = None  # share of its steps after which successive halving left it out
    screen: bool = False  # its sweep is a screen
    trial: bool = False  # a search chose it, by the results of others
    left: int = 0  # runs that its sweep has still to train
    lost: str = ""  # where its rows end before its status says that it did, in words
    # steps.bin by field, and `tokens` up to each step; of a fork its parents' steps come first
    steps: Mapping[str, np.ndarray] = field(default_factory=dict)
    before: Mapping[str, np.ndarray] = field(default_factory=dict)  # rows of a fork's parents
    # llmexp did not train it: what its source does not say is absent here. `steps` has the place of
    # each row by axis, as far as it is known, and `step` of a row is its number.
    foreign: bool = False
    measured: str = "val/loss"  # the figure that is measured now and then, and judged over seeds
    # As compared: why it takes no part (empty where it does), and its figures by name.
    out: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Return the last step that it has recorded; of a fork that of its parent at least."""
        return len(self.columns["step"] if self.foreign else self.steps.get("tokens", ()))

    @property
    def seed(self) -> str:
        return str(self.config.get(SEED))

    @property
    def named_seed(self) -> bool:
        """Tell whether its source names a seed; else the run counts as one of its own."""
        return not (self.foreign and self.seed == own_seed(self.name))

    @cached_property
    def essence(self) -> dict[str, str]:
        """Return what of the config decides a result, as text by key, in order."""
        keys = (k for k in sorted(self.config) if self.foreign or not is_execution(k))
        return {k: repr(self.config[k]) for k in keys}

    @property
    def summary(self) -> dict[str, Any]:
        return self.status.get("summary") or {}

    @property
    def parent(self) -> dict[str, Any]:
        """Return what a fork goes on from; empty for a run that is none."""
        return self.facts.get("parent") or {}

    def batch(self, key: str) -> Any:
        """Return a number of the batch as the run solved it, else as its config has it."""
        return self.facts.get(key, self.config.get(f"batch.{key}"))


def one_spelling(records: Sequence[Record]) -> list[Record]:
    """Return runs with 100 as 100.0 in a key that has floats in others: they are one value."""
    kinds = {(k, type(v)) for r in records for k, v in r.config.items() if k != SEED}
    mixed = {k for k, kind in kinds if kind is int and (k, float) in kinds}

    def value(key: str, given: Any) -> Any:
        whole = key in mixed and type(given) is int and abs(given) < 2**53
        return float(given) if whole else given

    if not mixed:
        return list(records)
    return [replace(r, config={k: value(k, v) for k, v in r.config.items()}) for r in records]


def own_seed(name: str) -> str:
    """Return what stands for the seed of a run whose source names none."""
    return f"of {name}"


class Verdict(Enum):
    """The knowledge of a setting beside the leading one; `mark` is its word in the table."""

    WORSE = "seeds show it", "worse"
    NEGLIGIBLE = "seeds show a difference too small to matter", "same"
    SAME = "seeds show that no difference matters", "same"
    ROUNDING = "the same computation, so what differs is what rounding makes", "same"
    UNDECIDED = "seeds leave it open", "undecided"
    FEW_SEEDS = "too few seeds", "undecided"
    BUDGET = "not comparable", "not comparable"
    TASK = "another validation text", "other task"

    @property
    def mark(self) -> str:
        return self.value[1]


@dataclass(frozen=True)
class Place:
    """The place of a run where its loss is read."""

    tokens: float  # target tokens that it has trained on
    planned: float  # tokens of its whole budget
    grain: float  # tokens of one optimizer step
    decays: bool  # whether its learning rate depends on how far it has come

    @property
    def progress(self) -> float:
        """Share of its budget that it has used."""
        return self.tokens / self.planned

    @property
    def spent(self) -> Spent:
        """Return its whole budget; its steps are as long as a step is now."""
        steps = max(1, round(self.planned / (self.grain or self.planned)))
        return Spent({}, round(self.planned), steps)


@dataclass(eq=False)
class Setting:
    """A line of the table: one run, or the runs that differ in nothing but the seed."""

    name: str
    runs: tuple[Record, ...]
    values: dict[str, Any]  # of the keys that differ between the settings
    # mean over the runs by name of the column; what is not known is absent
    figures: dict[str, float]
    intervals: dict[str, tuple[float, float]]  # of 95 %, of means over several runs
    state: str  # of the worst of the runs
    note: str = ""  # such as: another tokenizer
    # what sets it apart, short: accum=1 clip=0.5; the name of the run where nothing does
    label: str = ""
    computation: object = None  # equal for settings that compute the same but for rounding
    # As judged, where it takes part.
    seeds: Mapping[str, float] = field(default_factory=dict)  # the metric by seed
    capped: bool = False  # some of `seeds` are the cap of a target, and not where a run reached it
    early: bool = False  # some had reached the target by their first evaluation, nobody knows where
    place: Place | None = None  # where it stands when its loss is read
    # How it stands to the leading one of its budget; None for the leading one of all.
    verdict: Verdict | None = None
    # Of the metric, its minus the leading one's, over the seeds compared; None also where a cap
    # hides it.
    size: float | None = None
    difference: Difference | None = None  # over seeds
    identity: object = None  # equal where one computation, or all figures to the bit, are equal
    # best | lowest | highest | the word of its verdict, or why it is left out: running, ...
    mark: str = ""

    @property
    def taking_part(self) -> list[Record]:
        return [r for r in self.runs if not r.out]

    @property
    def out(self) -> str:
        """Say why it takes no part; empty where a run of it does."""
        return "" if self.taking_part else self.runs[0].out

    @property
    def mean(self) -> float:
        return math.fsum(self.seeds.values()) / len(self.seeds)

    @property
    def leads(self) -> bool:
        """Tell whether it is the leading one of several."""
        return self.mark in LEADING

    @property
    def half(self) -> float | None:
        """Return the half width of the 95 % interval of `size`; None where seeds give none."""
        return self.difference.half if self.difference else None

    @property
    def basis(self) -> str:
        """Return what the interval rests on, such as: 3 seeds."""
        if not (d := self.difference):
            return ""
        return d.basis if d.most >= len(self.seeds) else f"{d.seeds} of {len(self.seeds)} seeds"

    def label_of(self, *runs: Record) -> str:
        """Return the short name of one or some of its runs: accum=1 seed=2,3."""
        if len(self.runs) == 1 or (self.label == self.name and len(runs) == len(self.runs)):
            return self.label
        seeds = f"seed={','.join(r.seed for r in runs)}"
        if not any(r.named_seed for r in runs):
            seeds = f"run={','.join(r.name for r in runs)}"
        # the name of a fold that nothing sets apart is its seeds
        return seeds if self.label == f"{len(self.runs)} seeds" else f"{self.label} {seeds}"


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    key: str  # in Setting.figures
    title: str  # with its unit
    better: str = ""  # lower | higher, where one is
    digits: int = 4  # significant ones
    counts: bool = True  # whether all of its figures are whole numbers

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
class Floor:
    """The spread of a figure over runs that differ in nothing but rounding."""

    size: float  # largest difference between two runs of one computation and one seed
    spread: float  # standard deviation of the difference of two such runs
    runs: int
    source: str  # in words, such as: twins


@dataclass(frozen=True)
class Effect:
    """The effect of one key, averaged over the other keys."""

    key: str
    better: str  # its values as text
    worse: str
    difference: Difference
    against: Sequence[str] = ()  # values of the other keys at which seeds show the opposite
    # Values of the other keys at which seeds show it; None where it does not vary with these.
    only: Sequence[str] | None = None


@dataclass
class Result:
    """Everything that was found out, which the answer, the table, the JSON and the page show."""

    settings: Sequence[Setting]  # the best one first
    differing: tuple[str, ...]  # config keys, by section
    columns: tuple[Column, ...]  # of which some setting has a figure
    metric: Column  # of the order, such as: final val/loss
    align: str  # tokens | steps | time: where the metric is read off
    # the last common position there (tokens, steps or seconds); None: each run's own end
    align_at: float | None
    batch: str  # iso-batch | scaling | same | mixed
    problems: tuple[str, ...]  # paths that were no run, damage that was passed over
    # of `differing`, those that vary of themselves and not as another's consequence
    factors: tuple[str, ...] = ()
    target: Target | None = None  # that runs are to reach; the metric is where they did
    min_effect: float = 0.0  # nats below which a difference does not matter
    mixed: bool = False  # several tokenizers
    # As judged. Those with the metric, the leading one first; none where no order has a meaning.
    ranked: Sequence[Setting] = ()
    without: Sequence[Setting] = ()  # those that take part and have no such figure
    # All that take part, those of like budgets together, the leading one's first.
    budgets: Sequence[Sequence[Setting]] = ()
    tasks: int = 1  # validation texts
    floor: Floor | None = None
    effects: Sequence[Effect] = ()
    multiplied: bool = False  # whether seeds multiply effects, and intervals are wider by it
    far: Sequence[tuple[Setting, str]] = ()  # seeds that are far off all others
    screen: Screen | None = None  # of the knobs of a screen
    looks: Sequence[Look] = ()  # of a sweep that decided by itself how many seeds it trained
    # In words.
    headline: str = ""  # the result, in one line
    notes: tuple[str, ...] = ()  # what must be known beside it: other budgets, what was left out
    why: tuple[str, ...] = ()  # what both rest on, for those who ask

    @property
    def runs(self) -> list[Record]:
        return [r for s in self.settings for r in s.runs]

    @property
    def taking_part(self) -> list[Record]:
        return [r for r in self.runs if not r.out]

    @property
    def sweep(self) -> Path | None:
        """Return the folder of the sweep that all runs belong to, if there is one."""
        sweeps = {r.sweep for r in self.runs}
        return sweeps.pop() if len(sweeps) == 1 else None

    @property
    def key(self) -> str:
        """Return the key of the metric."""
        return self.metric.key

    @property
    def measured(self) -> bool:
        """Tell whether the metric is what runs are evaluated for."""
        return self.key.startswith("val/") or self._of_source

    @property
    def judged(self) -> bool:
        """Tell whether seeds judge the metric."""
        return is_loss(self.key) or self._of_source

    @property
    def _of_source(self) -> bool:
        return any(self.key == r.measured for r in self.runs)

    @property
    def foreign(self) -> bool:
        """Tell whether llmexp did not train some of the runs."""
        return any(r.foreign for r in self.runs)

    @property
    def names(self) -> dict[str, str]:
        """Return the short names of the factors."""
        return short_keys(self.factors)

    @property
    def comparable(self) -> bool:
        """Tell whether all that take part have one budget and one validation text."""
        return len(self.budgets) < 2 and self.tasks < 2

    @property
    def reached(self) -> bool:
        """Tell whether any run reaches the target; the leading setting has one then."""
        return any(s.figures.get(REACHED) for s in self.ranked[:1])

    @property
    def own_ends(self) -> bool:
        """Tell whether each loss is read at its run's own end, as there is no common position."""
        forks = any(r.parent for r in self.taking_part)
        return self.measured and self.align_at is None and not forks

    @property
    def extreme(self) -> str:
        return "lowest" if self.metric.sign > 0 else "highest"

    @property
    def verdicts(self) -> set[Verdict]:
        return {s.verdict for s in self.ranked if s.verdict}

    def those(self, *verdicts: Verdict) -> list[Setting]:
        return [s for s in self.ranked if s.verdict in verdicts]

    def digits(self, number: float) -> str:
        """Return a number with the digits of the metric."""
        return shown(number, self.metric.digits, self.metric.counts)

    @property
    def position(self) -> str:
        """Return the common position as text."""
        return "" if self.align_at is None else shown(self.align_at, 6)

    def label_of(self, run: Record) -> str:
        return next(s.label_of(run) for s in self.settings if run in s.runs)


def is_execution(key: str) -> bool:
    """Tell whether a key names, records or carries out a run.

    Such keys are shown only where nothing else differs.
    """
    return is_record(key) or key == "hooks"


def is_loss(key: str) -> bool:
    return key in LOSS_FIGURES or is_of_named_set(key)


def labels(settings: Iterable[Setting]) -> str:
    """Return the short names of settings as one listed text."""
    return listed([s.label for s in settings])


def column_of(key: str, when: str = "") -> Column:
    """Return the column of a figure of the rows."""
    known = ROW_KEYS[key]
    return Column(f"{when}{key}", f"{when}{known.head}", known.better, known.digits)


def figure_text(setting: Setting, column: Column) -> str:
    """Return a figure as text, a loss with the half width of its interval.

    Empty where it is not known.
    """
    half = half_width(setting, column)
    return with_interval(setting.figures.get(column.key), half, column.digits, column.counts)


def alone(setting: Setting, column: Column) -> str:
    """Return a figure as its cell has it, without the interval."""
    return figure_text(setting, column).partition(" ± ")[0]


def difference(setting: Setting) -> str:
    """Return the difference to the leading setting, with its interval where seeds give one."""
    if (apart := setting.size) is None:
        return ""
    return "-+"[apart >= 0] + amount(apart, setting.half)


def half_width(setting: Setting, column: Column) -> float | None:
    """Return the half width of a loss's interval over seeds, or of a score's over items.

    None where there is none, as of rates and times.
    """
    key, measured = column.key, {r.measured for r in setting.runs}
    known = is_loss(key) or is_score(key) or key.startswith("target/") or key in measured
    low, high = setting.intervals.get(key if known else "", (0.0, 0.0))
    return (high - low) / 2 or None
