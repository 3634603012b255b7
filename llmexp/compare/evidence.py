"""Read off runs what a verdict rests on.

That is where their losses stand, what rounding makes, and what a single key does.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmexp.compare.budgets import CLOSE
from llmexp.compare.folding import batch_cut
from llmexp.compare.inference import Model
from llmexp.compare.looks import Seen
from llmexp.compare.position import of_rows, positions, tokens_of_step, until
from llmexp.compare.records import TWIN, Effect, Floor, Place, Record, Setting
from llmexp.settings.labels import short_label
from llmexp.settings.labels import short_value as value
from llmexp.settings.parts import DECAYS


def read_place(record: Record, align: str, at: float | None, metric: str) -> Place | None:
    """Return where the run stands when the metric is read, None where that is not known.

    It is read at the common position `at` (None: at the run's own end), a validation loss in the
    last evaluation up to there.
    """
    tokens, where = positions(record, "tokens"), positions(record, align)
    if not len(tokens) or len(where) != len(tokens):
        return None
    planned = record.facts.get("max_tokens")
    decays = planned is not None and decays_at_last(record.config)
    step = len(tokens) if at is None else until(where, at)
    if step > record.parent.get("step", 0):
        seen = float(tokens[step - 1])
    elif align == "tokens":  # it has no step yet where losses are read
        seen = float(at or 0)
    else:
        return None
    if metric in record.columns and metric.startswith("val/"):
        known = np.isfinite(record.columns[metric]) & (record.columns["step"] <= step)
        seen = float(max(of_rows(record, "tokens")[known], default=seen))
    return Place(seen, planned or seen or 1.0, tokens_of_step(record), decays)


def decays_at_last(config: Mapping[str, Any]) -> bool:
    """Return whether the rate falls to the end of the budget, and so depends on it."""
    if str(config.get("schedule._target_", "")).endswith(".constant"):
        return False
    if DECAYS.keys[0] not in config:  # linear, cosine, or a schedule of the user's
        return True
    return any(config.get(key) is not None and config[key] != 0 for key in DECAYS.keys)


def alike(a: Place, b: Place) -> bool:
    """Tell whether losses at these places may be compared.

    The tokens must be equal to a step, and the schedules equally far.
    """
    step = max(a.grain, b.grain)
    if abs(a.tokens - b.tokens) > step:
        return False
    if a.decays and b.decays:
        steps = max(a.grain / a.planned, b.grain / b.planned)
        return abs(a.progress - b.progress) <= CLOSE + steps
    ended = all(p.progress > 1 - CLOSE for p in (a, b) if p.decays)
    return ended or abs(a.planned - b.planned) <= step


def floor_of(rivals: Sequence[Setting], metric: str) -> Floor | None:
    """Measure what rounding makes, from runs of one computation and one seed.

    None where there are no two.
    """
    alike: dict[object, list[Record]] = defaultdict(list)
    for setting in rivals:
        for run in setting.taking_part:
            if metric in run.figures:
                alike[setting.computation, run.seed].append(run)
    sets = [runs for runs in alike.values() if len(runs) > 1]
    if not sets:
        return None
    values = [np.array([r.figures[metric] for r in runs]) for runs in sets]
    squares = sum(float(((v - v.mean()) ** 2).sum()) for v in values)
    variance = squares / sum(len(v) - 1 for v in values)
    twins = any(r.config.get(TWIN) for runs in sets for r in runs)
    cuts = any(len({batch_cut(r) for r in runs}) > 1 for runs in sets)
    sources = ["twins"] * twins + ["cuts of one batch"] * cuts
    size = max(float(v.max() - v.min()) for v in values)
    source = " and ".join(sources) or "repeats"
    return Floor(size, math.sqrt(2 * variance), sum(map(len, sets)), source)


def effects(rivals: Sequence[Setting], keys: Sequence[str], seen: Seen) -> list[Effect]:
    """Judge for each of several keys the two of its values that differ most in the loss.

    Differences are averaged over the cells of the other keys.
    """
    keys = [key for key in keys if key != TWIN]
    if not 2 <= len(keys) <= 4:
        return []
    alpha = seen.level / len(keys)
    found = []
    for key in keys:
        cells = _cells(rivals, keys, key, seen)
        pairs = itertools.combinations(cells, 2)
        known = [e for a, b in pairs if (e := _effect(key, a, b, cells, seen.model, alpha))]
        if known:
            found.append(max(known, key=lambda e: (e.difference.real, abs(e.difference.mean))))
    return found


# The number of a setting by the value of a key, and by the values of the other keys.
Cells = Mapping[str, Mapping[str, int]]


def _cells(rivals: Sequence[Setting], keys: Sequence[str], key: str, seen: Seen) -> Cells:
    cells: dict[str, dict[str, int]] = defaultdict(dict)
    for r in rivals:
        number = seen.number.get(r.identity)
        if number is not None:
            rest = short_label({k: r.values.get(k) for k in keys if k != key})
            cells[value(r.values.get(key))].setdefault(rest, number)
    return cells


def _effect(key: str, a: str, b: str, cells: Cells, model: Model, alpha: float) -> Effect | None:
    """Judge two values of a key over the cells where both were trained.

    Where the difference varies over the cells by more than noise does, name those where it holds.
    """
    both = [c for c in cells[a] if c in cells[b] and cells[a][c] != cells[b][c]]
    if len(both) < 2:
        return None

    def over(chosen: Sequence[str], less: Sequence[str] = ()) -> np.ndarray:
        weights = np.zeros(len(model.variances))
        for part, cell_sign in ((chosen, 1.0), (less, -1.0)):
            for cell in part:
                weights[cells[b][cell]] += cell_sign / len(part)
                weights[cells[a][cell]] -= cell_sign / len(part)
        return weights

    d = model.contrast(over(both), len(cells), alpha)
    single = {cell: model.contrast(over([cell]), 2, alpha / len(both)) for cell in both}
    low, high = (pick(both, key=lambda c: single[c].mean) for pick in (min, max))
    apart = model.contrast(over([high], [low]), len(both), alpha)
    interacts = abs(apart.mean) > apart.half
    ahead = 1 if d.mean > 0 else -1
    shown = {cell: one.mean * ahead > 0 for cell, one in single.items() if one.real}
    holds, against = ([cell for cell in shown if shown[cell] is alike] for alike in (True, False))
    better, worse = (a, b) if d.mean > 0 else (b, a)
    return Effect(key, better, worse, d, tuple(against), tuple(holds) if interacts else None)


def same_steps(runs: Sequence[Record]) -> bool:
    """Tell whether the runs agree to the last bit in the losses of all steps that they share.

    Those are of training at each step, and of validation where several were evaluated.
    """
    first, *others = runs
    for other in others:
        a, b = (r.steps["train/loss"][: min(first.step, other.step)] for r in (first, other))
        _, at, there = np.intersect1d(
            first.columns["step"], other.columns["step"], assume_unique=True, return_indices=True
        )
        keys = (key for key in first.columns if key in other.columns and key.startswith("val/"))
        apart = (first.columns[key][at] - other.columns[key][there] for key in keys)
        if not np.array_equal(a, b, equal_nan=True) or any(map(np.any, map(np.nan_to_num, apart))):
            return False
    return True
