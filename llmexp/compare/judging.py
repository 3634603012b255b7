"""What two settings differ by, and how far that can be trusted: by seeds, step by step, or beside an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmexp.compare.figures import counts, number, positions
from llmexp.compare.records import Comparison, Entry, Record
from llmexp.compare.statistics import (
    Difference,
    detrended_deviation,
    paired_seeds,
    pooled_seeds,
    series_difference,
    t_quantile,
)

SEED = "train.seed"
LOSSES = ("val/loss", "final val/loss", "best val/loss", "train/loss", "val/bits_per_byte")
STEPS, EVALUATION = "paired by step", "beside the noise of the evaluation"  # of one seed, how a difference was judged
Cells = Mapping[tuple[str, ...], Entry]  # by the values of the other keys


def judge(
    a: Entry, b: Entry, metric: str, c: Comparison, ranked: Sequence[Entry], level: float
) -> tuple[Difference, str] | None:
    """How much b has more of the metric than a, and what exactly was compared; None where nothing can be said."""
    of_a, of_b = _by_seed(a, metric), _by_seed(b, metric)
    shared = sorted(of_a.keys() & of_b.keys())
    if len(shared) > 1:
        return paired_seeds([of_b[s] - of_a[s] for s in shared], level), metric
    groups = [list(_by_seed(e, metric).values()) for e in ranked]
    if any(len(g) > 1 for g in groups) and of_a and of_b:
        return pooled_seeds(list(of_a.values()), list(of_b.values()), groups, level), metric
    if metric not in LOSSES:
        return None
    series = series_of(a, b, c)
    difference = series_difference(series, level) if series is not None else None
    if difference:
        return difference, "train/loss"
    beside = _beside_evaluation(a, b, metric, level)
    return (beside, metric) if beside else None


def _beside_evaluation(a: Entry, b: Entry, metric: str, level: float) -> Difference | None:
    floors = [floor for e in (a, b) if (floor := _eval_error(e, metric)) is not None]
    if not floors or "val" not in metric:
        return None
    floors *= 3 - len(floors)  # a run too short to tell has that of the other one: the scatter is the text's above all
    half = t_quantile((1 + level) / 2, 1e6) * math.hypot(*floors)
    return Difference(b.figures[metric] - a.figures[metric], half, EVALUATION)


def effect(
    a: Cells, b: Cells, metric: str, c: Comparison, ranked: Sequence[Entry], level: float
) -> tuple[Difference, str] | None:
    """b - a, averaged over the cells that both have, in each over the seeds that both have; None where nothing can be
    said.

    Cells are no independent witnesses: they share seeds, data and perhaps the very same steps. So seeds are what is
    counted where there are several; of one seed it is the steps of the averaged series, and else the error of a single
    pair, which averaging is not taken to make smaller.
    """
    cells = [
        (a[rest], b[rest], _by_seed(a[rest], metric), _by_seed(b[rest], metric)) for rest in sorted(a.keys() & b.keys())
    ]
    # What a seed of one side alone adds would pass for an effect of the key.
    common = [(x, y, {s: p[s] for s in p if s in q}, {s: q[s] for s in q if s in p}) for x, y, p, q in cells]
    cells = [cell for cell in common if cell[2]] or cells
    if len(cells) < 2:
        return None
    mean = float(np.mean([_mean(y, q, metric) - _mean(x, p, metric) for x, y, p, q in cells]))
    seeds = set.intersection(*(set(p) & set(q) for _, _, p, q in cells))
    if len(seeds) > 1:
        return paired_seeds(
            [float(np.mean([q[s] - p[s] for _, _, p, q in cells])) for s in sorted(seeds)], level
        ), metric
    groups = [list(_by_seed(e, metric).values()) for e in ranked]
    if any(len(g) > 1 for g in groups) and all(p and q for _, _, p, q in cells):
        found = [pooled_seeds(list(p.values()), list(q.values()), groups, level) for _, _, p, q in cells]
        return Difference(mean, max(d.half for d in found), found[0].method), metric
    series = [s for x, y, _, _ in cells if (s := series_of(x, y, c)) is not None]
    length = min((len(s) for s in series), default=0)
    if len(series) == len(cells) and length:
        # The last steps of all, which are the same ones where the runs are equally long.
        difference = series_difference(np.mean([s[len(s) - length :] for s in series], axis=0), level)
        if difference:
            return difference, "train/loss"
    beside = [_beside_evaluation(x, y, metric, level) for x, y, _, _ in cells]
    halves = [d.half for d in beside if d]
    return (Difference(mean, max(halves), EVALUATION), metric) if len(halves) == len(cells) else None


def _mean(entry: Entry, of: Mapping[Any, float], metric: str) -> float:
    return float(np.mean(list(of.values()))) if of else entry.figures[metric]


def seeds_with(entry: Entry, metric: str) -> set[str]:
    """The seeds of which the entry's figure is the mean."""
    return set(_by_seed(entry, metric))


def _by_seed(entry: Entry, metric: str) -> dict[Any, float]:
    pairs = zip(entry.runs, entry.run_figures, strict=False)
    return {str(r.config.get(SEED)): f[metric] for r, f in pairs if counts(r) and metric in f}


def series_of(a: Entry, b: Entry, c: Comparison) -> np.ndarray | None:
    """Differences b - a of train/loss, step by step on the same batches, over the later half of the steps that both
    have, where warm-up is over; None where the batches are not known to be the same."""
    if len(a.runs) != 1 or len(b.runs) != 1 or not same_batches(a.runs[0], b.runs[0]):
        return None
    x, y = (_rows(e.runs[0], c) for e in (a, b))
    _, at_x, at_y = np.intersect1d(x["step"], y["step"], assume_unique=True, return_indices=True)
    if any("data_digest" in r.columns for r in (a.runs[0], b.runs[0]) if r.config.get("train.data_digest")):
        one, other = (r.columns.get("data_digest") for r in (a.runs[0], b.runs[0]))
        if one is not None and other is not None:
            pair = one[at_x], other[at_y]
            if np.any(pair[0][np.isfinite(pair[0] + pair[1])] != pair[1][np.isfinite(pair[0] + pair[1])]):
                return None
    d = y["train/loss"][at_y] - x["train/loss"][at_x]
    return np.asarray(d[len(d) // 2 :])


def _rows(record: Record, c: Comparison) -> dict[str, np.ndarray]:
    columns = record.columns
    rows = len(columns["step"])
    place = positions(record, c.align) if c.align_at is not None else np.zeros(0)
    if len(place):
        rows = int(np.searchsorted(place, c.align_at * (1 + 1e-9), side="right"))  # type: ignore[operator]
    return {key: columns.get(key, np.full(len(columns["step"]), np.nan))[:rows] for key in ("step", "train/loss")}


def same_batches(a: Record, b: Record) -> bool:
    """Whether step s of both runs trains on the same tokens: that is a function of seed, data and real batch alone."""
    if not a.config or not b.config or SEED not in a.config:
        return False
    essential = [
        {k: repr(v) for k, v in r.config.items() if k.startswith(("data.", "tokenizer.")) and k != "data.cache_dir"}
        | {"seed": repr(r.config.get(SEED)), "length": repr(r.config.get("batch.sequence_length"))}
        | {"batch": repr(r.facts.get("real_batch_size", r.config.get("batch.real_batch_size")))}
        | {"print": repr(r.facts.get("data_fingerprint"))}
        for r in (a, b)
    ]
    return essential[0] == essential[1]


def _eval_error(entry: Entry, metric: str) -> float | None:
    """Standard error of a validation loss as an estimate over text of its kind, from the scatter of the train loss:
    a step's deviation about its trend, scaled from the tokens of a step to those of an evaluation."""
    run = entry.runs[0]
    sizes = [number(run.facts.get(k)) for k in ("tokens_per_step", "eval_sequences", "sequence_length")]
    losses = run.columns.get("train/loss", np.zeros(0))
    deviation = detrended_deviation(losses[len(losses) // 2 :])
    if deviation is None or any(s is None or s <= 0 for s in sizes):
        return None
    step, sequences, length = (float(s or 0) for s in sizes)
    error = deviation * math.sqrt(step / (sequences * length))
    if metric == "val/bits_per_byte":  # of one run a constant multiple of its loss
        loss = entry.figures.get("val/loss")
        return error * entry.figures[metric] / loss if loss else None
    return error
