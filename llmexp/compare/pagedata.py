"""What the scripts of the page draw: curves, heat map, parallel coordinates, clipping and noise, as plain JSON."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from llmexp.compare.downsample import downsample
from llmexp.compare.figures import counts, setting
from llmexp.compare.records import Column, Comparison, Entry, Record
from llmexp.compare.rows import elapsed
from llmexp.compare.table import shown

POINTS = 1_000  # of a curve at most: about one per pixel
POINTS_OF_ALL = 60_000  # of one quantity over all runs, so that 200 runs stay a page that can be mailed
QUANTITIES = {
    "train/loss": "Training loss (nats per token)",
    "val/loss": "Validation loss (nats per token)",
    "val/bits_per_byte": "Validation loss (bits per byte)",
    "grad_norm": "Gradient norm before clipping",
    "lr": "Learning rate",
    "tokens_per_sec": "Tokens per second, all ranks",
    "clip_coefficient": "Mean clip coefficient",
}
AXES = {"tokens": "Tokens seen", "steps": "Steps", "time": "Training time (s)"}


def chart_data(comparison: Comparison) -> dict[str, Any]:
    """Everything that is drawn; a part without data has no key. Arrays are in plotly's form {dtype, bdata}."""
    curves = {key: found for key in QUANTITIES if (found := list(_curves(comparison, key)))}
    data = {
        "entries": [entry.name for entry in comparison.entries],
        "axes": {k: t for k, t in AXES.items() if any(k in c for found in curves.values() for c in found)},
        "quantities": {key: QUANTITIES[key] for key in curves},
        "curves": curves,
        "align": {"axis": comparison.align, "at": comparison.align_at},
        "heat": _heat(comparison),
        "parallel": _parallel(comparison),
        "clip": list(_clip(comparison)),
        "noise": list(_noise(comparison)),
    }
    return {key: value for key, value in data.items() if value}


def runs(comparison: Comparison) -> Iterator[tuple[int, Record]]:
    """Every run with the number of its entry."""
    for number, entry in enumerate(comparison.entries):
        for record in entry.runs:
            yield number, record


def _positions(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {"tokens": columns.get("tokens_seen"), "steps": columns.get("step"), "time": elapsed(columns)}
    return {axis: x for axis, x in found.items() if x is not None}


def _packed(values: np.ndarray, kind: str) -> dict[str, str]:
    return {"dtype": kind[1:], "bdata": base64.b64encode(np.asarray(values).astype(kind).tobytes()).decode()}


def _packed_positions(columns: Mapping[str, np.ndarray], kept: np.ndarray) -> dict[str, dict[str, str]]:
    found = {}
    for axis, x in _positions(columns).items():
        if np.isfinite(x[kept]).any():
            # Counts are exact in float64 only; seconds need no more than a pixel.
            found[axis] = _packed(x[kept], "<f4" if axis == "time" else "<f8")
    return found


def _points(comparison: Comparison) -> int:
    return min(POINTS, max(200, POINTS_OF_ALL // max(1, sum(1 for _ in runs(comparison)))))


def _curves(comparison: Comparison, key: str) -> Iterator[dict[str, Any]]:
    # Every evaluation is kept, within reason: there are few of them, and each is a figure that may be quoted.
    limit = POINTS if key.startswith("val/") else _points(comparison)
    for number, record in runs(comparison):
        y = record.columns.get(key)
        if y is None or not np.isfinite(y).any():
            continue
        kept = downsample(y, limit)
        if positions := _packed_positions(record.columns, kept):
            yield {"entry": number, "run": record.name, **positions, "y": _packed(y[kept], "<f4")}


def plain(value: Any) -> str:
    """A value of the configuration as YAML would have it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def ended(entry: Entry) -> bool:
    """Whether all runs that its figures are of have come to their end."""
    found = [record for record in entry.runs if counts(record)]
    return bool(found) and all(record.state == "finished" for record in found)


def _levels(entries: tuple[Entry, ...], key: str) -> list[str]:
    """The values of a key in their order: numbers by size, before words."""
    distinct = {plain(e.values.get(key)): e.values.get(key) for e in entries}

    def place(value: Any) -> tuple[bool, float, str]:
        number = _is_number(value)
        return not number, float(value) if number else 0.0, plain(value)

    return [plain(v) for v in sorted(distinct.values(), key=place)]


def _labels(entries: tuple[Entry, ...], key: str) -> list[str]:
    """The levels as they are read: shortened, unless two would then look alike."""
    short = {plain(v): setting(v) for e in entries for v in [e.values.get(key)]}
    levels = _levels(entries, key)
    return [short[level] for level in levels] if len(set(short.values())) == len(levels) else levels


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _heat(comparison: Comparison) -> dict[str, Any] | None:
    keys = comparison.factors
    levels = [_levels(comparison.entries, key) for key in keys]
    # A random search leaves hardly a pair of values twice: that is no map, but parallel coordinates.
    if len(keys) != 2 or 3 * len(comparison.entries) < len(levels[0]) * len(levels[1]):
        return None
    down, across = (0, 1) if len(levels[0]) <= len(levels[1]) else (1, 0)

    cells: dict[tuple[int, int], Entry] = {}
    for entry in comparison.entries:  # the best one first, and it stays where a cell has several
        i, j = (levels[k].index(plain(entry.values.get(keys[k]))) for k in (down, across))
        cells.setdefault((i, j), entry)

    def grid(cell: Callable[[Entry], Any]) -> list[list[Any]]:
        rows: list[list[Any]] = [[None] * len(levels[across]) for _ in levels[down]]
        for (i, j), entry in cells.items():
            rows[i][j] = cell(entry)
        return rows

    figures = []
    for column in comparison.columns:
        z = grid(lambda entry, key=column.key: entry.figures.get(key))  # type: ignore[misc]
        if any(value is not None for row in z for value in row):
            texts = [["" if value is None else shown(value, column.digits) for value in row] for row in z]
            about = {"key": column.key, "title": column.title, "better": column.better}
            figures.append({**about, "z": z, "texts": texts, "best": _best_cells(cells, column)})
    if not figures:
        return None
    return {
        "x": {"title": keys[across], "levels": _labels(comparison.entries, keys[across])},
        "y": {"title": keys[down], "levels": _labels(comparison.entries, keys[down])},
        "states": grid(lambda entry: entry.state),
        "figures": figures,
        "metric": comparison.metric,
    }


def _best_cells(cells: Mapping[tuple[int, int], Entry], column: Column) -> list[list[int]]:
    """The cells to be framed, [row, column] each; what broke off, goes on or was left out is never the best, and where
    all are the same none is."""
    known = {
        place: entry.figures[column.key]
        for place, entry in cells.items()
        if column.key in entry.figures and ended(entry)
    }
    if len(set(known.values())) < 2 or column.better not in ("lower", "higher"):
        return []
    best = (min if column.better == "lower" else max)(known.values())
    return [list(place) for place, value in known.items() if value == best]


def _parallel(comparison: Comparison) -> dict[str, Any] | None:
    keys = comparison.factors
    column = next((c for c in comparison.columns if c.key == comparison.metric), None)
    if len(keys) < 2 or column is None or _heat(comparison) is not None:
        return None
    axes = [_key_axis(key, comparison.entries) for key in keys]
    figures = [entry.figures.get(column.key) for entry in comparison.entries]
    return {"axes": [*axes, _number_axis(column.title, figures, column.digits)]}


def _key_axis(key: str, entries: tuple[Entry, ...]) -> dict[str, Any]:
    levels = _levels(entries, key)
    numbers = [entry.values.get(key) for entry in entries]
    if len(levels) > 12 and all(_is_number(n) for n in numbers):
        return _number_axis(key, numbers, 3)
    # Equal spacing: swept values are mostly powers of two or picked by hand, and each should be legible.
    last = max(1, len(levels) - 1)
    ticks = [[i / last, label] for i, label in enumerate(_labels(entries, key)) if i % -(-len(levels) // 12) == 0]
    return {"title": key, "places": [levels.index(plain(n)) / last for n in numbers], "ticks": ticks}


def _number_axis(title: str, numbers: list[Any], digits: int) -> dict[str, Any]:
    known = [n for n in numbers if _is_number(n)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    log = low > 0 and high > 50 * low
    scale = math.log if log else float
    span = (scale(high) - scale(low)) or 1.0
    at = [low * (high / low) ** (i / 4) if log else low + (high - low) * i / 4 for i in range(5 if high > low else 1)]
    return {
        "title": title,
        "places": [(scale(n) - scale(low)) / span if _is_number(n) else None for n in numbers],
        "ticks": [[(scale(value) - scale(low)) / span, shown(value, digits)] for value in at],
    }


def _clip(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for number, record in runs(comparison):
        rows = [r for r in clip_table(record) if _is_number(r.get("limit")) and _is_number(r.get("share"))]
        if rows:
            rows.sort(key=lambda row: row["limit"])
            yield {"entry": number, "run": record.name, **{k: [r[k] for r in rows] for k in ("limit", "share")}}


def clip_table(record: Record) -> list[dict[str, Any]]:
    """The counterfactual rows of a run: limit, share, coefficient; what is not in that form is left out."""
    clip = record.status.get("clip")
    table = clip.get("table") if isinstance(clip, dict) else None
    return [row for row in table if isinstance(row, dict)] if isinstance(table, list) else []


def _noise(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for number, record in runs(comparison):
        y = record.columns.get("noise_scale")
        if y is None or not np.isfinite(y).any():
            continue
        kept = downsample(y, _points(comparison))
        packed = {"y": _packed(y[kept], "<f4")}
        for key, name in (("low", "noise_scale_low"), ("high", "noise_scale_high")):
            if name in record.columns:
                packed[key] = _packed(record.columns[name][kept], "<f4")
        if positions := _packed_positions(record.columns, kept):
            batch = record.facts.get("real_batch_size")
            found = {"entry": number, "run": record.name, **positions, **packed}
            yield {**found, "real_batch_size": batch} if _is_number(batch) else found
