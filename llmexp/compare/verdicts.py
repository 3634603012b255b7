"""What a comparison comes to, in words: which setting is best, by how much, and whether the difference is real."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmexp.compare.figures import counts, number, positions
from llmexp.compare.records import Column, Comparison, Entry, Record
from llmexp.compare.statistics import (
    Difference,
    detrended_deviation,
    mean_interval,
    paired_seeds,
    pooled_seeds,
    series_difference,
    t_quantile,
)

SEED = "train.seed"
LOSSES = ("val/loss", "final val/loss", "best val/loss", "train/loss", "val/bits_per_byte")
_UNITS = {"tokens": "tokens", "steps": "steps", "time": "s"}


def sentences(c: Comparison, metric: Column, limiting: Record | None, mixed: bool) -> tuple[str, ...]:
    """The answer first, then what it rests on."""
    ranked = [e for e in c.entries if metric.key in e.figures and any(counts(r) for r in e.runs)]
    if mixed and metric.key.endswith("/loss"):
        ranked = []
    said: list[str] = []
    if len(ranked) > 1 and metric.better:
        said += _best(c, metric, ranked)
    elif len(ranked) == 1 and metric.better:
        said.append(f"{describe(ranked[0], c)} is the only run with a {word(metric)}: {_shown(ranked[0], metric)}.")
    said += _where(c, metric, limiting)
    said += _batch(c)
    said += _caveats(c, metric, ranked, mixed)
    return tuple(said)


def word(metric: Column) -> str:
    """The metric's name in a sentence."""
    return "val loss" if "val/loss" in metric.key else metric.title.partition(" (")[0]


def describe(entry: Entry, c: Comparison) -> str:
    """The entry by what sets it apart: clip.max_norm=0.5 with batch.real_batch_size=8."""
    parts = [f"{key}={_value(entry.values.get(key))}" for key in c.factors]
    return " with ".join(parts) if entry.values and 0 < len(parts) <= 3 else entry.name


def _value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _shown(entry: Entry, metric: Column) -> str:
    return f"{entry.figures[metric.key]:.{metric.digits}g}"


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
    floors = [floor for e in (a, b) if (floor := _eval_error(e, metric)) is not None]
    if len(floors) < 2 or "val" not in metric:
        return None
    half = t_quantile((1 + level) / 2, 1e6) * math.hypot(*floors)
    return Difference(b.figures[metric] - a.figures[metric], half, "beside the noise of the evaluation"), metric


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


def _best(c: Comparison, metric: Column, ranked: Sequence[Entry]) -> list[str]:
    best, others = ranked[0], ranked[1:]
    direction = -1.0 if metric.better == "higher" else 1.0
    extreme = "highest" if metric.better == "higher" else "lowest"
    lead = abs(others[0].figures[metric.key] - best.figures[metric.key])
    level = 1 - 0.05 / len(others)  # Bonferroni: the best was picked by looking at all
    judged = [judge(best, other, metric.key, c, ranked, level) for other in others]
    text = (
        f"{describe(best, c)} has the {extreme} {word(metric)}, {_shown(best, metric)}; next is "
        f"{describe(others[0], c)}, {_shown(others[0], metric)}"
        + (f": {lead:.2g} {'less' if direction < 0 else 'more'}." if lead else ", the same.")
    )
    said = [text, _verdict(judged[0], direction, len(others)), *_effects(c, metric, ranked)]
    tied = [o for o, j in zip(others, judged, strict=True) if j is None or not _real(j[0], direction)]
    beaten = [o for o in others if o not in tied]
    if len(others) > 1 and tied and beaten:
        said.append(
            f"Within noise of the best: {_listed([describe(e, c) for e in tied])}. "
            f"Clearly behind it: {_listed([describe(e, c) for e in beaten])}."
        )
    elif len(others) > 1:
        said.append(
            f"It is clearly ahead of all {len(others)} others."
            if beaten
            else f"None of the {len(others)} others can be told from the best."
        )
    return said


def _real(d: Difference, direction: float) -> bool:
    return d.real and d.mean * direction > 0


def _verdict(judged: tuple[Difference, str] | None, direction: float, comparisons: int) -> str:
    if judged is None:
        return "Whether that lead is real cannot be said from these records: run each setting with three seeds or more."
    d, what = judged
    several = f" over {comparisons} comparisons" if comparisons > 1 else ""
    amount = f"{abs(d.mean):.2g} ± {d.half:.2g} (95 %{several})"
    if d.method == "paired by step":
        basis = f"step by step on the same batches its train loss is {'lower' if d.mean > 0 else 'higher'} by {amount}"
        seeds = " That holds for these two runs; what other seeds would give, only other seeds tell."
    else:
        basis, seeds = f"the difference in {what} is {amount}, {d.method}", ""
    if not d.real:
        return f"Within noise, indistinguishable: {basis}."
    if d.mean * direction < 0:
        return f"Not settled: {basis}, against the order of the table."
    return f"The difference is real: {basis}.{seeds}"


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _effects(c: Comparison, metric: Column, ranked: Sequence[Entry]) -> list[str]:
    """For each of several swept keys: what it does, averaged over the others, cell by cell."""
    if not 2 <= len(c.factors) <= 4 or metric.key not in LOSSES:
        return []
    said = []
    for key in c.factors:
        cells: dict[str, dict[tuple[str, ...], Entry]] = {}
        for entry in ranked:
            rest = tuple(_value(entry.values.get(k)) for k in c.factors if k != key)
            cells.setdefault(_value(entry.values.get(key)), {}).setdefault(rest, entry)
        pairs = list(itertools.combinations(cells, 2))
        level = 1 - 0.05 / max(1, len(pairs))
        effects = [(a, b, e) for a, b in pairs if (e := _effect(cells[a], cells[b], metric.key, c, level))]
        if not effects:
            continue
        # The clearest one first: a large mean with a larger error says nothing.
        a, b, (d, what) = max(effects, key=lambda e: (e[2][0].real, abs(e[2][0].mean)))
        amount = f"{abs(d.mean):.2g} ± {d.half:.2g} in {what}"
        others = " and ".join(k for k in c.factors if k != key)
        if d.real:
            better, worse = (a, b) if d.mean > 0 else (b, a)
            said.append(f"{key}: {better} is better than {worse} by {amount}, averaged over {others}: real.")
        else:
            iso = key.startswith("batch.") and c.batch == "iso-batch"
            said.append(
                f"{key} makes no difference that can be told{' (iso-batch, as it should)' if iso else ''}: "
                f"at most {a} against {b}, {amount}, averaged over {others}."
            )
    return said


def _effect(
    a: Mapping[tuple[str, ...], Entry], b: Mapping[tuple[str, ...], Entry], metric: str, c: Comparison, level: float
) -> tuple[Difference, str] | None:
    """b - a over the cells that both have: the mean of the cells' step-by-step differences, else a t-test on cells."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) < 2:
        return None
    series = [s for rest in shared if (s := series_of(a[rest], b[rest], c)) is not None]
    length = min((len(s) for s in series), default=0)
    if len(series) == len(shared) and length:
        difference = series_difference(np.mean([s[len(s) - length :] for s in series], axis=0), level)
        if difference:
            return difference, "train/loss"
    mean, interval = mean_interval([b[rest].figures[metric] - a[rest].figures[metric] for rest in shared], level)
    return (Difference(mean, interval[1] - mean, "over the cells"), metric) if interval else None


def _where(c: Comparison, metric: Column, limiting: Record | None) -> list[str]:
    if metric.key not in LOSSES or metric.key == "final val/loss" or c.align_at is None or limiting is None:
        return []
    runs = [r for e in c.entries for r in e.runs if counts(r)]
    ends = {round(float(p[-1]), 3) for r in runs if len(p := positions(r, c.align))}
    if len(runs) < 2:
        return []
    at = f"{c.align_at:,.0f} {_UNITS[c.align]}"
    if len(ends) == 1:
        text = f"All runs are compared at equal {c.align}, {at}, where they end."
    else:
        text = (
            f"Losses are read at {at}, the last position that every unfailed run reached ({limiting.name} ends there)."
        )
    late = []
    for r in runs:
        place = positions(r, c.align)
        values = r.columns.get("val/loss", np.zeros(0))
        seen = place[: len(values)][np.isfinite(values) & (place[: len(values)] <= c.align_at * (1 + 1e-9))]
        if len(place) and len(seen) and seen[-1] < c.align_at * (1 - 1e-9):
            late.append((r.name, float(seen[-1])))
    if late and "val" in metric.key:
        name, last = min(late, key=lambda pair: pair[1])
        text += f" {len(late)} of {len(runs)} runs had their last evaluation before that, {name} at {last:,.0f}."
    return [text]


def _batch(c: Comparison) -> list[str]:
    sizes = {s for e in c.entries for r in e.runs if (s := number(r.facts.get("real_batch_size"))) is not None}
    span = f"{min(sizes):,.0f} to {max(sizes):,.0f}" if sizes else "?"
    texts = {
        "iso-batch": f"Iso-batch: real_batch_size is held at {span.partition(' ')[0]} sequences and only its cut into "
        "micro-batches, accumulation and ranks varies, so losses should agree but for rounding.",
        "scaling": f"Scaling: real_batch_size varies, {span} sequences, so at equal tokens the runs have taken "
        "different numbers of steps.",
        "mixed": f"real_batch_size varies ({span} sequences), and so does how it is cut into micro-batches.",
    }
    return [texts[c.batch]] if c.batch in texts else []


def _caveats(c: Comparison, metric: Column, ranked: Sequence[Entry], mixed: bool) -> list[str]:
    runs = [r for e in c.entries for r in e.runs]
    said = []
    if mixed:
        offered = "they are ordered by bits per byte" if metric.key == "val/bits_per_byte" else "they are not ranked"
        said.append(f"The tokenizers differ, so losses per token cannot be compared; {offered}.")
    if len(models := {str(m) for r in runs if (m := r.facts.get("model"))}) > 1:
        said.append(f"The models differ: {_listed(sorted(models))}.")
    prints = [r.facts.get("data_fingerprint") for r in runs]
    val = {repr([p.get(k) for k in ("val_files", "val_ratio", "seed")]) for p in prints if isinstance(p, dict)}
    sizes = {s for r in runs if (s := number(r.facts.get("eval_sequences"))) is not None}
    if not mixed and (len(val) > 1 or len(sizes) > 1):
        said.append("The validation text is not the same in all runs, so their val losses differ for that alone.")
    if len(devices := {str(d) for r in runs if (d := r.facts.get("device_name"))}) > 1:
        said.append(f"Not all ran on the same device ({_listed(sorted(devices))}): rates and times do not compare.")
    for state in ("failed", "cut", "preempted", "running", "queued"):
        names = [r.name for r in runs if r.state == state]
        if names:
            many = f"{len(names)} of {len(runs)} runs {'is' if len(names) == 1 else 'are'} {state}"
            apart = ", and ranked behind the others" if state in ("failed", "cut", "queued") and ranked else ""
            said.append(f"{many}{apart}: {_listed(names)}.")
    return said
