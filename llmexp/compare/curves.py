"""Prepare what the page draws: one quantity over training, thinned; the axis of a swept key."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmexp.compare.figures import broken
from llmexp.compare.position import of_rows
from llmexp.compare.records import Setting
from llmexp.settings.labels import short_value
from llmexp.system.text import number

AXES = {"tokens": "Tokens seen", "steps": "Steps", "time": "Training time (s)"}
RATES = ("lr", "learning_rate", "weight_decay", "eps")


@dataclass(frozen=True)
class Curve:
    """The rows that all runs of a setting have."""

    x: dict[str, np.ndarray]  # by axis; `steps` is always there
    y: np.ndarray  # [runs, rows], finite

    @property
    def mean(self) -> np.ndarray:
        return np.asarray(self.y.mean(axis=0))

    def at(self, rows: np.ndarray) -> Curve:
        return Curve({axis: x[rows] for axis, x in self.x.items()}, self.y[:, rows])

    def thinned(self, limit: int) -> Curve:
        """Return a curve of at most `limit` rows that looks the same."""
        return self.at(downsample(self.mean, limit))


def curve(setting: Setting, key: str) -> Curve | None:
    """Return the quantity over the steps that the runs share; None where none has it."""
    alive = [r for r in setting.runs if not broken(r)] or list(setting.runs)
    runs = [r for r in alive if key in r.columns and np.isfinite(r.columns[key]).any()]
    if not runs:
        return None
    steps_of = [r.columns["step"][np.isfinite(r.columns[key])] for r in runs]
    steps = functools.reduce(np.intersect1d, steps_of)
    if not len(steps):
        runs, steps = runs[:1], steps_of[0]
    rows = [(r, np.searchsorted(r.columns["step"], steps)) for r in runs]
    x = {
        axis: np.mean([of_rows(r, axis)[at] for r, at in rows], axis=0)
        for axis in AXES
        if all(len(of_rows(r, axis)) for r in runs)
    }
    return Curve(x, np.stack([r.columns[key][at] for r, at in rows]))


def lineage(setting: Setting, key: str) -> Curve | None:
    """Return the quantity over the rows of a fork's parents, up to the first row of its own.

    None for a run that is no fork.
    """
    runs = [r for r in setting.runs if r.parent and len(r.before.get(key, ()))]
    own = curve(setting, key)
    if not runs or own is None:
        return None
    parents = tuple(replace(r, columns=r.before, facts={**r.facts, "parent": None}) for r in runs)
    found = curve(replace(setting, runs=parents), key)
    if found is None:
        return None
    x = {a: np.append(found.x[a], own.x[a][0]) for a in found.x.keys() & own.x.keys()}
    return Curve(x, np.append(found.mean, own.y[:, 0].mean())[None])


def downsample(y: np.ndarray, limit: int) -> np.ndarray:
    """Return indices of at most `limit` (>= 4) known values with which a curve looks as before.

    They ascend: the known values are cut into runs of equal length; of each its lowest and highest
    stay, and the first and the last value of all. So every spike stays visible, at the place where
    it was. What is not finite is left out.
    """
    known = np.flatnonzero(np.isfinite(y))
    if len(known) <= limit:
        return known
    inner = known[1:-1]
    width = -(-len(inner) // ((limit - 2) // 2))
    # The last bucket is filled up with its own last value, which changes neither its minimum nor
    # its maximum.
    buckets = np.pad(inner, (0, -len(inner) % width), mode="edge").reshape(-1, width)
    rows = np.arange(len(buckets))
    lowest = buckets[rows, y[buckets].argmin(axis=1)]
    highest = buckets[rows, y[buckets].argmax(axis=1)]
    return np.unique(np.concatenate([known[:1], lowest, highest, known[-1:]]))


@dataclass(frozen=True)
class Scale:
    """The values of a key along an axis: numbers where they stand, anything else in its order."""

    kind: str  # linear | log | category
    levels: list[Any]
    labels: list[str]

    def index(self, value: Any) -> int:
        # 1 and True are two values
        return [repr(level) for level in self.levels].index(repr(value))


def scale(settings: Sequence[Setting], key: str) -> Scale:
    """Return the axis of a key.

    It is logarithmic for rates, and where their steps are alike as factors.
    """
    distinct = {repr(e.values.get(key)): e.values.get(key) for e in settings}
    levels = sorted(
        distinct.values(), key=lambda v: (number(v) is None, number(v) or 0.0, short_value(v))
    )
    labels = [short_value(v) for v in levels]
    if len(set(labels)) < len(labels):
        labels = [repr(v) for v in levels]
    if any(number(v) is None for v in levels):
        return Scale("category", levels, labels)
    values = np.array(levels, dtype=float)
    rate = key.rpartition(".")[2] in RATES or key.endswith("_lr")
    log = len(values) and values[0] > 0 and (rate or _geometric(values))
    return Scale("log" if log else "linear", levels, labels)


def _geometric(values: np.ndarray) -> bool:
    if len(values) < 2 or values[-1] < 4 * values[0]:
        return False
    factors, sums = np.diff(np.log(values)), np.diff(values)
    return bool(np.std(factors) / np.mean(factors) <= np.std(sums) / np.mean(sums))
