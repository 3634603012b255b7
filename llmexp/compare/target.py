"""Find where runs first reach a target, such as a validation loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from llmexp.compare.figures import train_losses
from llmexp.compare.position import ROWS, of_rows, positions
from llmexp.compare.records import REACHED, Record, Result, Target
from llmexp.compare.rows import elapsed
from llmexp.metrics.keys import ROW_KEYS, is_of_named_set, is_score
from llmexp.settings.values import ConfigError

UNITS = {"tokens": "tokens", "steps": "steps", "time": "s"}  # of the axes
UNITS_IN_WORDS = UNITS | {"time": "s of training"}


def target_of(given: object, better: Mapping[str, str]) -> Target:
    """Return the target of `KEY=NUMBER`. `better`: lower or higher, for keys of hooks.

    Raises ConfigError.
    """
    key, _, text = str(given).partition("=")
    known = ROW_KEYS.get(f"val/{key.rpartition('/')[2]}" if is_of_named_set(key) else key)
    way = "higher" if is_score(key) else better.get(key) or (known.better if known else "")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not way:
        text = "a figure of the rows that is better when lower or higher is needed, and a number"
        raise ConfigError(f"--target {given}: {text}; for example --target val/loss=3.28")
    return Target(key, value, -1.0 if way == "higher" else 1.0)


def target_figures(record: Record, target: Target, align: str) -> dict[str, float]:
    """Return where a run first reaches the target, between two evaluations by a straight line.

    `target/reached` is 1 or 0, absent for a run that was never evaluated. `target/after` and
    `target/by` are the positions of the two evaluations: start and first one, where that is there.
    """
    own, before = record.columns, record.before
    steps, values = course(record, target.key)
    if not len(values):
        return {}
    there = np.flatnonzero(target.sign * values <= target.sign * target.value)
    if not len(there):
        return {REACHED: 0.0}
    by, after = there[0], there[0] - 1  # -1: there at the first evaluation already
    share = 1.0
    if after >= 0:
        share = float((values[after] - target.value) / (values[after] - values[by]))
    found = {REACHED: 1.0}
    rows = np.concatenate([_column(c, "step") for c in (before, own)])
    for axis in UNITS:
        parents = elapsed(before) if axis == "time" else _column(before, ROWS[axis])
        known = np.concatenate([parents, of_rows(record, axis)])
        if len(known) != len(rows):
            continue
        if target.key == "train/loss" and axis != "time":
            where = positions(record, axis)[steps.astype(int) - 1]
        else:
            where = np.interp(steps, np.append(0.0, rows), np.append(0.0, known))
        low, high = float(where[after]) if after >= 0 else 0.0, float(where[by])
        found[f"target/{axis}"] = low + share * (high - low) if after >= 0 else high
        if axis == align:
            found |= {"target/after": low, "target/by": high}
    return found


def course(record: Record, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps at which a run has a figure, and its values; those of parents come first.

    The train loss is that of the table: there is one after each step, whatever the rows.
    """
    if key == "train/loss":
        values = train_losses(record)
        steps = np.arange(1.0, len(values) + 1)
    else:
        parts = (record.before, record.columns)
        values = np.concatenate([_column(c, key) for c in parts])
        steps = np.concatenate([_column(c, "step") for c in parts])
    there = np.isfinite(values)
    return steps[there], values[there]


def _column(columns: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    return columns.get(key, np.full(len(columns.get("step", ())), np.nan))


def capped(runs: Sequence[Record], key: str, cap: float) -> dict[str, float]:
    """Return by seed where runs reach the target, `cap` for those that have not by then."""
    known = [r for r in runs if key in r.figures or r.figures.get(REACHED) == 0.0]
    return {r.seed: min(r.figures.get(key, cap), cap) for r in known}


def cap_of(f: Result) -> float:
    """Return the end of the first of the runs to end that never reached the target."""
    never = [positions(r, f.align) for r in f.taking_part if r.figures.get(REACHED) == 0.0]
    return min((float(where[-1]) for where in never if len(where)), default=math.inf)
