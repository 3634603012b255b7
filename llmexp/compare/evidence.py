"""Read off runs where their losses stand, how settings differ over seeds, what rounding makes, and
what a single key does."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from llmexp.compare.budgets import CLOSE
from llmexp.compare.position import positions, rows_until
from llmexp.compare.records import SEED, TWIN, Entry, Record, number
from llmexp.compare.settings import cut_of
from llmexp.compare.statistics import Difference, paired_seeds, series_difference, unpaired_seeds
from llmexp.metrics.keys import TIMINGS
from llmexp.settings.knobs import is_record
from llmexp.settings.labels import label
from llmexp.settings.labels import shown as value

FEW = 3  # seeds that a setting needs before a spread can be estimated


class Verdict(Enum):
    """The knowledge of a setting beside the leading one; `mark` is its word in the table."""

    WORSE = "seeds show it", "worse"
    BETTER = "seeds show it, though its mean, over other seeds, is not", "undecided"
    NEGLIGIBLE = "seeds show a difference too small to matter", "same"
    SAME = "seeds show that no difference matters", "same"
    ROUNDING = "the same computation, so what differs is what rounding makes", "same"
    UNDECIDED = "seeds leave it open", "undecided"
    FEW_SEEDS = "too few seeds", "undecided"
    BUDGET = "not comparable", "other budget"
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


@dataclass(eq=False)
class Rival:
    """An entry that takes part, and what was found out about it."""

    entry: Entry
    seeds: dict[str, float]  # the metric by seed; empty where it has none
    place: Place | None = None  # where it stands when its loss is read
    budget: int = 0  # rivals of like budgets have the same number
    # How it stands to the leading one of its budget; None for the leading one of all.
    verdict: Verdict | None = None
    size: float | None = None  # of the metric, its minus the leading one's, over the seeds compared
    difference: Difference | None = None  # over seeds

    @property
    def label(self) -> str:
        return self.entry.label

    @property
    def mean(self) -> float:
        return math.fsum(self.seeds.values()) / len(self.seeds)


@dataclass(frozen=True)
class Floor:
    """The effect of rounding on one computation: the spread of a figure over runs that differ in
    nothing else."""

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
    against: str = ""  # values of the other keys at which seeds show the opposite


def place_of(record: Record, align: str, at: float | None, metric: str) -> Place | None:
    """Return where the run stands at the common position `at` (None: at its own end), in the row
    that the metric is read from: for a validation loss the last evaluation up to there. None where
    that is not known."""
    tokens = positions(record, "tokens")
    where = positions(record, align)
    if not len(tokens) or len(where) != len(tokens):
        return None
    planned = number(record.facts.get("max_tokens"))
    grain = number(record.facts.get("tokens_per_step")) or 0.0
    schedule = str(record.config.get("schedule._target_", ""))
    decays = planned is not None and not schedule.endswith(".constant")
    row = len(tokens) if at is None else rows_until(where, at)
    if row:
        seen = float(tokens[row - 1])
    elif align == "tokens":  # it has no row yet where losses are read
        seen = float(at or 0)
    else:
        return None
    if row and metric.startswith("val/"):
        evaluated = np.flatnonzero(np.isfinite(record.columns.get(metric, np.zeros(0))[:row]))
        seen = float(tokens[evaluated[-1]]) if len(evaluated) else seen
    return Place(seen, planned or seen or 1.0, grain, decays)


def alike(a: Place, b: Place) -> bool:
    """Tell whether losses at these places may be compared: equal tokens, to a step, and equally far
    schedules."""
    step = max(a.grain, b.grain)
    if abs(a.tokens - b.tokens) > step:
        return False
    if a.decays and b.decays:
        steps = max(a.grain / a.planned, b.grain / b.planned)
        return abs(a.progress - b.progress) <= CLOSE + steps
    ended = all(p.progress > 1 - CLOSE for p in (a, b) if p.decays)
    return ended or abs(a.planned - b.planned) <= step


def all_pairs(count: int) -> float:
    """Return the level of each interval at which all pairs of `count` settings hold together at 95
    % (Bonferroni).

    The leading setting was picked by looking at all, so its pairs with the others are not the only
    ones looked at.
    """
    return 1 - 0.05 / max(1, math.comb(count, 2))


def over_seeds(a: Mapping[str, float], b: Mapping[str, float], level: float) -> Difference | None:
    """Estimate b - a over seeds, paired where at least two are shared; None where a side has too
    few."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) > 1:
        return paired_seeds([b[s] - a[s] for s in shared], level)
    if len(a) >= FEW and len(b) >= FEW:
        return unpaired_seeds(list(a.values()), list(b.values()), level)
    return None


def floor_of(rivals: Sequence[Rival], metric: str) -> Floor | None:
    """Measure what rounding makes, from runs of one computation and one seed; None where there are
    no two."""
    alike: dict[object, list[Record]] = defaultdict(list)
    for entry in (r.entry for r in rivals):
        for run in entry.taking_part:
            if metric in run.figures:
                alike[entry.computation, run.seed].append(run)
    sets = [runs for runs in alike.values() if len(runs) > 1]
    if not sets:
        return None
    values = [np.array([r.figures[metric] for r in runs]) for runs in sets]
    squares = sum(float(((v - v.mean()) ** 2).sum()) for v in values)
    variance = squares / sum(len(v) - 1 for v in values)
    twins = any(r.config.get(TWIN) for runs in sets for r in runs)
    cuts = any(len({cut_of(r) for r in runs}) > 1 for runs in sets)
    sources = ["twins"] * twins + ["cuts of one batch"] * cuts
    size = max(float(v.max() - v.min()) for v in values)
    source = " and ".join(sources) or "repeats"
    return Floor(size, math.sqrt(2 * variance), sum(map(len, sets)), source)


def effects(rivals: Sequence[Rival], keys: Sequence[str], negligible: float) -> list[Effect]:
    """Judge for each of several keys its two values that differ most, in each cell of the others,
    over common seeds.

    Cells are no independent witnesses: they share seeds, data and perhaps the very steps. So the
    seeds are counted: the differences of a seed are averaged over the cells first.
    """
    keys = [key for key in keys if key != TWIN]
    if not 2 <= len(keys) <= 4:
        return []
    tables = {key: _cells(rivals, keys, key) for key in keys}
    level = 1 - 0.05 / max(1, sum(math.comb(len(t), 2) for t in tables.values()))
    found = []
    for key, cells in tables.items():
        pairs = itertools.combinations(cells, 2)
        judged = [_effect(key, a, b, cells, level, negligible) for a, b in pairs]
        known = [effect for effect in judged if effect]
        if known:
            found.append(max(known, key=lambda e: (e.difference.real, abs(e.difference.mean))))
    return found


# The rivals by the value of a key, and by the values of the other keys.
Cells = Mapping[str, Mapping[str, Rival]]


def _cells(rivals: Sequence[Rival], keys: Sequence[str], key: str) -> Cells:
    cells: dict[str, dict[str, Rival]] = defaultdict(dict)
    for r in rivals:
        rest = label({k: r.entry.values.get(k) for k in keys if k != key})
        cells[value(r.entry.values.get(key))].setdefault(rest, r)
    return cells


def _effect(
    key: str, a: str, b: str, cells: Cells, level: float, negligible: float
) -> Effect | None:
    """Judge two values of a key over the cells where both are of one budget."""
    sides = {}
    for rest in sorted({*cells[a]} & {*cells[b]}):
        x, y = cells[a][rest], cells[b][rest]
        if x.budget == y.budget and x.entry.computation != y.entry.computation:
            sides[rest] = x.seeds, y.seeds
    seeds = set.intersection(*({*p} & {*q} for p, q in sides.values())) if sides else set()
    if len(sides) < 2 or len(seeds) < 2:
        return None
    means = [float(np.mean([q[s] - p[s] for p, q in sides.values()])) for s in sorted(seeds)]
    d = paired_seeds(means, level)
    against = []
    for rest, (p, q) in sides.items():
        single = over_seeds(p, q, level)
        if single and single.real and single.mean * d.mean < 0 and abs(single.mean) >= negligible:
            against.append(rest)
    better, worse = (a, b) if d.mean > 0 else (b, a)
    return Effect(key, better, worse, d, " and ".join(against))


def same_rows(runs: Sequence[Record]) -> bool:
    """Tell whether the runs agree to the last bit in each row that they share, in all figures but
    times and what is measured on single micro-batches."""
    first, *others = runs
    apart = {*TIMINGS, "noise_scale", "noise_scale_low", "noise_scale_high"}
    for other in others:
        x, y = first.columns["step"], other.columns["step"]
        _, at_x, at_y = np.intersect1d(x, y, assume_unique=True, return_indices=True)
        for key in ({*first.columns} & {*other.columns}) - apart:
            a, b = first.columns[key][at_x], other.columns[key][at_y]
            if not np.array_equal(a, b, equal_nan=True):
                return False
    return True


def stepwise(a: Record, b: Record, align: str, at: float | None, level: float) -> Difference | None:
    """Estimate b - a of train/loss step by step on the same batches, over the later half of the
    steps that both have.

    It tells whether these two trajectories differ, and nothing of other seeds. None where the
    batches are not known to be the same, or the steps are too few.
    """
    if not same_batches(a, b):
        return None
    x, y = (_until(r, "step", align, at) for r in (a, b))
    _, at_x, at_y = np.intersect1d(x, y, assume_unique=True, return_indices=True)
    if a.config.get("train.data_digest") or b.config.get("train.data_digest"):
        d = _until(b, "data_digest", align, at)[at_y] - _until(a, "data_digest", align, at)[at_x]
        if np.any(np.nan_to_num(d)):
            return None
    d = _until(b, "train/loss", align, at)[at_y] - _until(a, "train/loss", align, at)[at_x]
    return series_difference(d[len(d) // 2 :], level)


def _until(record: Record, key: str, align: str, at: float | None) -> np.ndarray:
    """Return the rows of a column up to where losses are read; NaN where it is not known."""
    where, nothing = positions(record, align), np.full(len(record.columns["step"]), np.nan)
    rows = len(nothing) if at is None or not len(where) else rows_until(where, at)
    return record.columns.get(key, nothing)[:rows]


def same_batches(a: Record, b: Record) -> bool:
    """Tell whether step s of both runs trains on the same tokens: a function of seed, data and real
    batch alone."""
    if not a.config or not b.config or SEED not in a.config:
        return False
    return _data(a) == _data(b)


def _data(record: Record) -> list[str]:
    keys = [key for key in record.config if key.startswith(("data.", "tokenizer."))]
    keys = [SEED, "batch.sequence_length", *sorted(k for k in keys if not is_record(k))]
    facts = record.batch("real_batch_size"), record.facts.get("data_fingerprint")
    return [*(f"{key}={record.config.get(key)!r}" for key in keys), *map(repr, facts)]
