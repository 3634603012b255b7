"""Judge how two settings differ, and what may be said of it. Seeds are the only witnesses for
settings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from llmexp.compare.figures import positions, rows_until
from llmexp.compare.records import Comparison, Entry, Record
from llmexp.compare.settings import SEED, TWIN, cut_of, fact
from llmexp.compare.statistics import (
    Difference,
    paired_seeds,
    seeds_needed,
    series_difference,
    unpaired_seeds,
)
from llmexp.labels import label
from llmexp.labels import shown as value

NEGLIGIBLE = 0.002  # nats per token: what is known to be smaller is not worth a decision
FEW = 3  # seeds that a setting needs before a spread can be estimated


class Verdict(StrEnum):
    """The knowledge of a setting beside the leading one."""

    WORSE = "worse"  # seeds show it
    BETTER = "better"  # seeds show it, though its mean, over other seeds, is not
    NEGLIGIBLE = "negligible"  # seeds show a difference too small to matter
    SAME = "same"  # seeds show that no difference matters
    ROUNDING = "rounding"  # the same computation, so what differs is what rounding makes
    UNDECIDED = "undecided"
    FEW_SEEDS = "few seeds"  # undecided, as there are too few
    BUDGET = "other budget"  # not comparable
    TASK = "other task"


MARKS = {
    Verdict.WORSE: "worse", Verdict.BETTER: "undecided", Verdict.NEGLIGIBLE: "same",
    Verdict.SAME: "same",
    Verdict.ROUNDING: "same", Verdict.UNDECIDED: "undecided", Verdict.FEW_SEEDS: "undecided",
    Verdict.BUDGET: "other budget", Verdict.TASK: "other task",
}  # fmt: skip


@dataclass(frozen=True)
class Judgement:
    """The verdict on a pair, with the figures that it rests on."""

    verdict: Verdict
    size: float | None = (
        # of the metric, the other's minus the leading one's, over the seeds that were compared
        None
    )
    difference: Difference | None = None  # over seeds
    # seeds per setting that would settle a difference of this size; None where not known
    needed: int | None = None


@dataclass(frozen=True)
class Floor:
    """The effect of rounding on one computation: the spread of a figure over runs that differ in
    nothing else."""

    size: float  # largest difference between two runs of one computation and one seed
    spread: float  # standard deviation of the difference of two such runs
    runs: int
    source: str  # in words, such as: twins


def by_seed(entry: Entry, metric: str, left_out: Mapping[int, str]) -> dict[str, float]:
    """Return the metric of each run of the entry that takes part, by its seed."""
    pairs = zip(entry.runs, entry.run_figures, strict=True)
    return {
        str(r.config.get(SEED)): f[metric]
        for r, f in pairs
        if id(r) not in left_out and metric in f
    }


def over_seeds(a: Mapping[str, float], b: Mapping[str, float], level: float) -> Difference | None:
    """Estimate b - a over seeds, paired where at least two are shared; None where a side has too
    few."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) > 1:
        return paired_seeds([b[s] - a[s] for s in shared], level)
    if len(a) >= FEW and len(b) >= FEW:
        return unpaired_seeds(list(a.values()), list(b.values()), level)
    return None


def judge(
    a: Mapping[str, float], b: Mapping[str, float], level: float, negligible: float, sign: float
) -> Judgement:
    """Judge a setting with the figures `b` by seed beside the leading one with `a`, at equal
    budgets.

    `sign`: -1 where the higher figure is better.
    """
    d = over_seeds(a, b, level)
    if d is None:
        return Judgement(
            Verdict.FEW_SEEDS, float(np.mean(list(b.values())) - np.mean(list(a.values())))
        )
    if d.real and abs(d.mean) >= negligible:
        return Judgement(Verdict.WORSE if d.mean * sign > 0 else Verdict.BETTER, d.mean, d)
    if d.real:
        return Judgement(Verdict.NEGLIGIBLE, d.mean, d)
    if abs(d.mean) + d.half < max(negligible, 1e-12):
        return Judgement(Verdict.SAME, d.mean, d)
    return Judgement(
        Verdict.UNDECIDED, d.mean, d, seeds_needed(d.spread, max(abs(d.mean), negligible), level)
    )


def cuts(a: Mapping[str, float], b: Mapping[str, float]) -> Judgement:
    """Judge two runs of one computation: what differs over their common seeds is rounding."""
    shared = a.keys() & b.keys()
    return Judgement(
        Verdict.ROUNDING, float(np.mean([b[s] - a[s] for s in shared])) if shared else None
    )


def leader(
    candidates: Sequence[Entry], seeds: Mapping[str, Mapping[str, float]], level: float, sign: float
) -> Entry:
    """Return the entry that the others are held against: the best of those with several seeds,
    where there are such.

    `seeds`: the figures of each entry by seed, by its name. Where the means are over other seeds,
    one that is better over the common ones goes before.
    """
    several = [e for e in candidates if len(seeds[e.name]) > 1] or list(candidates)
    best = min(several, key=lambda e: sign * float(np.mean(list(seeds[e.name].values()))))
    for _ in several:
        better = [
            e
            for e in several
            if judge(seeds[best.name], seeds[e.name], level, 0.0, sign).verdict == Verdict.BETTER
        ]
        if not better:
            break
        best = better[0]
    return best


def all_pairs(count: int) -> float:
    """Return the level of each interval at which all pairs of `count` settings hold together at 95
    % (Bonferroni).

    The leading setting was picked by looking at all, so its pairs with the others are not the only
    ones looked at.
    """
    return 1 - 0.05 / max(1, math.comb(count, 2))


def floor_of(entries: Sequence[Entry], metric: str, left_out: Mapping[int, str]) -> Floor | None:
    """Measure what rounding makes, from runs of one computation and one seed; None where there are
    no two."""
    alike: dict[object, list[tuple[Record, float]]] = {}
    for entry in entries:
        for run, figures in zip(entry.runs, entry.run_figures, strict=True):
            if id(run) not in left_out and metric in figures:
                alike.setdefault((entry.computation, run.config.get(SEED)), []).append(
                    (run, figures[metric])
                )
    found = [runs for runs in alike.values() if len(runs) > 1]
    if not found:
        return None
    values = [np.array([value for _, value in runs]) for runs in found]
    variance = sum(float(((v - v.mean()) ** 2).sum()) for v in values) / sum(
        len(v) - 1 for v in values
    )
    twins = any(run.config.get(TWIN) for runs in found for run, _ in runs)
    several = any(len({cut_of(run) for run, _ in runs}) > 1 for runs in found)
    source = (
        " and ".join([*(["twins"] if twins else []), *(["cuts of one batch"] if several else [])])
        or "repeats"
    )
    size = max(float(v.max() - v.min()) for v in values)
    return Floor(size, math.sqrt(2 * variance), sum(map(len, found)), source)


@dataclass(frozen=True)
class Effect:
    """The effect of one key, averaged over the other keys."""

    key: str
    a: str  # its values as text, the better one first
    b: str
    difference: Difference
    against: str = ""  # values of the other keys at which seeds show the opposite


def effects(
    metric: str, entries: Sequence[Entry], keys: Sequence[str], left_out: Mapping[int, str],
    budget: Mapping[str, int],
    negligible: float,
) -> list[Effect]:  # fmt: skip
    """Judge for each of several keys its two values that differ most, in each cell of the others,
    over common seeds.

    Cells are no independent witnesses: they share seeds, data and perhaps the very steps. So the
    seeds are counted: the differences of a seed are averaged over the cells first. Only entries of
    one `budget` (by name) are paired.
    """
    if not 2 <= len(keys) <= 4:
        return []
    tables = {key: _cells(entries, keys, key) for key in keys}
    level = 1 - 0.05 / max(1, sum(math.comb(len(t), 2) for t in tables.values()))
    found = []
    for key, cells in tables.items():
        judged = []
        for (a, first), (b, second) in itertools.combinations(cells.items(), 2):
            pairs = [
                (first[rest], second[rest], rest) for rest in sorted(first.keys() & second.keys())
            ]
            pairs = [(x, y, rest) for x, y, rest in pairs if budget[x.name] == budget[y.name]]
            pairs = [(x, y, rest) for x, y, rest in pairs if x.computation != y.computation]
            if effect := _effect(key, a, b, pairs, metric, left_out, level, negligible):
                judged.append(effect)
        if judged:
            found.append(max(judged, key=lambda e: (e.difference.real, abs(e.difference.mean))))
    return found


def _cells(entries: Sequence[Entry], keys: Sequence[str], key: str) -> dict[str, dict[str, Entry]]:
    cells: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        rest = label({k: entry.values.get(k) for k in keys if k != key})
        cells.setdefault(value(entry.values.get(key)), {}).setdefault(rest, entry)
    return cells


def _effect(
    key: str, a: str, b: str, pairs: Sequence[tuple[Entry, Entry, str]], metric: str,
    left_out: Mapping[int, str], level: float, negligible: float,
) -> Effect | None:  # fmt: skip
    if len(pairs) < 2:
        return None
    sides = [
        (by_seed(x, metric, left_out), by_seed(y, metric, left_out), rest) for x, y, rest in pairs
    ]
    seeds = set.intersection(*(set(p) & set(q) for p, q, _ in sides))
    if len(seeds) < 2:
        return None
    d = paired_seeds(
        [float(np.mean([q[s] - p[s] for p, q, _ in sides])) for s in sorted(seeds)], level
    )
    against = []
    for p, q, rest in sides:
        single = over_seeds(p, q, level)
        if (
            single is not None
            and single.real
            and single.mean * d.mean < 0
            and abs(single.mean) >= negligible
        ):
            against.append(rest)
    better, worse = (a, b) if d.mean > 0 else (b, a)
    return Effect(key, better, worse, d, " and ".join(against))


def stepwise(a: Entry, b: Entry, c: Comparison, level: float = 0.95) -> Difference | None:
    """Estimate b - a of train/loss step by step on the same batches, over the later half of the
    steps that both have.

    It tells whether these two trajectories differ, and nothing of other seeds. None where the
    batches are not known to be the same, or the steps are too few.
    """
    if len(a.runs) != 1 or len(b.runs) != 1 or not same_batches(a.runs[0], b.runs[0]):
        return None
    x, y = (_rows(e.runs[0], c) for e in (a, b))
    _, at_x, at_y = np.intersect1d(x["step"], y["step"], assume_unique=True, return_indices=True)
    if not _same_digests(a.runs[0], b.runs[0], at_x, at_y):
        return None
    d = y["train/loss"][at_y] - x["train/loss"][at_x]
    return series_difference(d[len(d) // 2 :], level)


def _same_digests(a: Record, b: Record, at_a: np.ndarray, at_b: np.ndarray) -> bool:
    """Compare the recorded digests of the windows' tokens, where both runs have them."""
    if not (a.config.get("train.data_digest") or b.config.get("train.data_digest")):
        return True
    one, other = (r.columns.get("data_digest") for r in (a, b))
    if one is None or other is None:
        return True
    known = np.isfinite(one[at_a] + other[at_b])
    return not np.any(one[at_a][known] != other[at_b][known])


def _rows(record: Record, c: Comparison) -> dict[str, np.ndarray]:
    columns = record.columns
    rows = len(columns["step"])
    where = positions(record, c.align) if c.align_at is not None else np.zeros(0)
    if len(where):
        rows = rows_until(where, c.align_at)  # type: ignore[arg-type]
    return {
        key: columns.get(key, np.full(len(columns["step"]), np.nan))[:rows]
        for key in ("step", "train/loss")
    }


def same_batches(a: Record, b: Record) -> bool:
    """Tell whether step s of both runs trains on the same tokens: a function of seed, data and real
    batch alone."""
    if not a.config or not b.config or SEED not in a.config:
        return False
    essential = [
        {
            k: repr(v)
            for k, v in r.config.items()
            if k.startswith(("data.", "tokenizer.")) and k != "data.cache_dir"
        }
        | {"seed": repr(r.config.get(SEED)), "length": repr(r.config.get("batch.sequence_length"))}
        | {"batch": repr(fact(r, "real_batch_size"))}
        | {"print": repr(r.facts.get("data_fingerprint"))}
        for r in (a, b)
    ]
    return essential[0] == essential[1]
