"""Figures of a run: what is read off its records, at its end or at a common position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmexp.compare.records import Column, Entry, Record
from llmexp.compare.rows import Columns, elapsed
from llmexp.metrics.keys import KEYS

TAIL = 0.05  # share of the rows whose mean is the train loss; at least 10 rows
DEAD = ("failed", "cut", "queued")  # what they lack says nothing about the setting

LOSSES = ("val/loss", "final val/loss", "best val/loss", "train/loss", "val/bits_per_byte")


def _column(key: str, when: str = "") -> Column:
    known = KEYS[key]
    return Column(f"{when}{key}", f"{when}{known.head}", known.better, known.digits)


COLUMNS = (
    _column("val/loss"),
    _column("val/loss", "final "),
    _column("val/loss", "best "),
    _column("val/bits_per_byte"),
    _column("train/loss"),
    _column("tokens_seen"),
    Column("steps", "steps"),
    Column("train_time", "time (s)", "lower"),
    _column("tokens_per_sec"),
    _column("peak_memory_gib"),
    Column("clip_share", "steps clipped", "", 3),
    _column("noise_scale"),
    _column("skipped_steps"),
    _column("outlier_steps"),
)
_SUMMARY = {  # figure: its name in the summary, its name in a row
    "tokens_seen": ("tokens_seen", "tokens_seen"),
    "steps": ("steps", "step"),
    "train_time": ("train_time", None),
    "tokens_per_sec": ("mean tokens_per_sec", "tokens_per_sec"),
    "peak_memory_gib": ("peak_memory_gib", "peak_memory_gib"),
    "clip_share": ("clip_share", None),
    "noise_scale": ("noise_scale", "noise_scale"),
    "skipped_steps": ("skipped_steps", "skipped_steps"),
    "outlier_steps": ("outlier_steps", "outlier_steps"),
}


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        return None
    return float(value)


def rounded(number: float) -> str:
    """Return a large number with three digits and a letter, as for the head of a column: 81.9k,
    1.64M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def shown(value: float, digits: int) -> str:
    """Return a number with so many significant digits; large ones whole, with separators."""
    if 10 ** (digits - 1) <= abs(value) < 1e15 or (value == int(value) and abs(value) < 1e15):
        return f"{value:,.0f}"
    return (
        f"{value:.{digits}g}" if abs(value) < 1e-3 or abs(value) >= 1e15 else f"{value:#.{digits}g}"
    )


def with_interval(value: float, half: float | None, digits: int) -> str:
    """Return `2.564 ± 0.011`: two digits of the half width, and the value to as many decimals;
    `1,500` alone where the half width is less than can be seen in it."""
    place = (
        digits - 1 - math.floor(math.log10(abs(value))) if value else 12
    )  # decimals that the value shows
    if half is None or not math.isfinite(half) or half < 0.5 * 10.0**-place:
        return shown(value, digits)
    decimals = min(1 - math.floor(math.log10(half)), place + 1)
    if decimals <= 0:
        return f"{round(value, decimals):,.0f} ± {round(half, decimals):,.0f}"
    return f"{value:,.{decimals}f} ± {half:.{decimals}f}"


def figure(entry: Entry, column: Column) -> str:
    """Return a figure as text, a loss with the half width of its interval; empty where it is not
    known."""
    value = entry.figures.get(column.key)
    return "" if value is None else with_interval(value, half_width(entry, column), column.digits)


def difference(entry: Entry) -> str:
    """Return the difference to the leading entry, with its interval where seeds give one."""
    s = entry.standing
    if s.difference is None:
        return ""
    size = f"{s.difference:+,.0f}" if abs(s.difference) >= 100 else f"{s.difference:+.2g}"
    return size + (f" ± {s.half:.2g}" if s.half is not None else "")


def half_width(entry: Entry, column: Column) -> float | None:
    """Return the half width of a loss's interval over seeds; None where there is none, as of rates
    and times."""
    low, high = entry.intervals.get(column.key, (0.0, 0.0)) if column.key in LOSSES else (0.0, 0.0)
    return (high - low) / 2 or None


def positions(record: Record, align: str) -> np.ndarray:
    """Return the position of each row in target tokens, steps, or seconds of training; empty where
    not known."""
    if align == "time":
        seconds = elapsed(record.columns)
        return np.zeros(0) if seconds is None else seconds
    return np.asarray(
        record.columns.get({"tokens": "tokens_seen", "steps": "step"}[align], np.zeros(0))
    )


def rows_until(where: np.ndarray, at: float) -> int:
    """Return how many rows stand at or before the position."""
    return int(np.searchsorted(where, at * (1 + 1e-9), side="right"))


def counts(record: Record) -> bool:
    """Tell whether the run has a say in how far all have come: not broken off, left out or short of
    rows."""
    return (
        record.state not in DEAD
        and record.rung is None
        and not record.lost
        and len(record.columns["step"]) > 0
    )


def common_position(records: Sequence[Record], align: str) -> tuple[float, Record] | None:
    """Return the last position that all runs that count have reached, and the run that came no
    further."""
    ends = [
        (float(np.nanmax(x)), r)
        for r in records
        if counts(r) and len(x := positions(r, align)) and x[-1] > 0
    ]
    return min(ends, key=lambda end: end[0], default=None)


def figures(record: Record, align: str, at: float | None) -> dict[str, float]:
    """Return all figures known of the run. Losses are those at or before the position `at`, never
    interpolated; a run that has not come so far has no `val/loss`."""
    found: dict[str, float | None] = {}
    columns, place = record.columns, positions(record, align)
    upto = len(columns["step"])
    if at is not None and len(place):
        upto = rows_until(place, at)
        reached = place[-1] >= at * (1 - 1e-9)
    else:
        reached = at is None
    for key in ("val/loss", "val/bits_per_byte"):
        if key in _at_hand(columns):
            values = columns[key][np.isfinite(columns[key])]
            seen = columns[key][:upto][np.isfinite(columns[key][:upto])]
            if key == "val/loss" and len(values) and not record.lost:
                found["final val/loss"] = float(values[-1])
                found["best val/loss"] = float(seen.min()) if len(seen) else None
            if reached and len(seen) and not record.lost:
                found[key] = float(seen[-1])
    if "train/loss" in _at_hand(columns) and not record.lost:
        losses = columns["train/loss"][:upto]
        losses = losses[np.isfinite(losses)]
        if len(losses):
            found["train/loss"] = float(losses[-max(10, math.ceil(TAIL * len(losses))) :].mean())
    summary = record.status.get("summary")
    summary = summary if isinstance(summary, dict) else {}
    if record.lost:  # of the end it has only what it wrote down itself
        found["final val/loss"] = number(summary.get("final val/loss"))
    last = columns.last if isinstance(columns, Columns) else {}
    for name, (key, row_key) in _SUMMARY.items():
        value = number(summary.get(key))
        found[name] = value if value is not None or row_key is None else number(last.get(row_key))
    if found["train_time"] is None and len(columns["step"]) and record.state != "finished":
        seconds = elapsed(columns)
        found["train_time"] = float(seconds[-1]) if seconds is not None else None
    return {key: value for key, value in found.items() if value is not None}


def _at_hand(columns: dict[str, np.ndarray]) -> list[str]:
    """Return the keys that can be had without reading the whole file, which holds all losses in the
    usual form."""
    return list(dict.keys(columns))
