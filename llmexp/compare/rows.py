"""Read metrics.jsonl and steps.bin as columns."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.runs.folder import is_row, parse_row
from llmexp.runs.steps import FIELDS, STEPS_BIN, steps_in

_MOST = 2**25  # steps: a file of 1 GiB
_Columns = dict[str, np.ndarray]  # float64, NaN where a row has no value, in order of the steps


def read_columns(path: Path) -> tuple[_Columns, tuple[str, ...]]:
    """Return the columns of a metrics file that hold numbers, and what could not be read."""
    problems, lines = [], list[bytes]()
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what has no newline was never finished
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"cannot be read: {error.strerror}")
    rows = _rows(lines)
    if lost := len(lines) - len(rows):
        text = "lines are no rows of metrics and were passed over"
        problems.append(f"{lost:,} of {len(lines):,} {text}")
    if any(a["step"] >= b["step"] for a, b in itertools.pairwise(rows)):
        problems.append("steps are repeated or out of order; the last row of each step counts")
        by_step = {row["step"]: row for row in rows}
        rows = [by_step[step] for step in sorted(by_step)]
    columns = {"step": np.zeros(0)}
    for key in list(dict.fromkeys(itertools.chain.from_iterable(rows)))[:1000]:
        column = _column([row.get(key) for row in rows])
        if key == "step" or np.isfinite(column).any():
            columns[key] = column
    return columns, tuple(f"{path}: {problem}" for problem in problems)


def read_steps(path: Path, most: int) -> tuple[_Columns, int]:
    """Return the columns of steps.bin, of at most so many steps, and how many of these were lost.

    `tokens` are those up to the end of each step.
    """
    table = np.zeros((min(steps_in(path), most, _MOST), len(FIELDS)))
    with contextlib.suppress(OSError, ValueError):
        table[:] = np.fromfile(path / STEPS_BIN, "<f8", table.size).reshape(table.shape)
    table = np.where(np.abs(table) < 1e15, table, np.nan)
    lost = ~(table[:, 1] >= 0) | ~table.any(axis=1)
    columns = dict(zip(FIELDS, table.T, strict=True))
    return columns | {"tokens": np.cumsum(np.nan_to_num(table[:, 1]))}, int(lost.sum())


def by_interval(columns: _Columns, end: int) -> _Columns:
    """Return columns without the evaluations of stops before the step `end`.

    So a run that was stopped on its way is as an unbroken one.
    """
    steps = columns["step"]
    off = (columns.get("off_interval", np.zeros(len(steps))) > 0) & (steps < end)
    return {k: np.where(off & (k[:4] == "val/"), np.nan, v) for k, v in columns.items()}


def finite(columns: Mapping[str, np.ndarray], key: str, rows: int | None = None) -> np.ndarray:
    """Return the known values of a key, those of the first `rows` rows."""
    values = columns.get(key, np.zeros(0))[:rows]
    return values[np.isfinite(values)]


def _rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the rows that the lines hold: all in one go, or those that can be parsed alone."""
    try:
        rows = json.loads(b"[%s]" % b",".join(lines))
        if len(rows) == len(lines) and all(map(is_row, rows)):
            return list(rows)
    except (ValueError, RecursionError):
        pass
    return list(filter(None, map(parse_row, lines)))


def elapsed(columns: Mapping[str, np.ndarray], first: float = 0.0) -> np.ndarray:
    """Return the seconds of training from the step `first` until each row; empty if not measured.

    `step_time` is the mean over the steps since the row before, so what a resumed run did twice
    counts once.
    """
    if "step_time" not in columns:
        return np.zeros(0)
    steps = np.diff(columns["step"], prepend=first)
    return np.cumsum(np.nan_to_num(steps * columns["step_time"], nan=0.0, posinf=0.0, neginf=0.0))


def _column(values: list[Any]) -> np.ndarray:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        column = np.array(values, dtype=float)  # None is NaN
        if column.ndim == 1:
            return np.where(np.abs(column) < 1e308, column, np.nan)
    return np.array(list(map(_value, values)))  # not all are numbers


def _value(value: Any) -> float:
    if isinstance(value, str):  # a digest of tokens: hexadecimal, kept as far as float64 is exact
        return float(int(value[-13:], 16)) if re.fullmatch(r"[0-9a-f]{16}", value) else math.nan
    known = isinstance(value, (int, float)) and abs(value) < 1e308  # nan is not
    return float(value) if known else math.nan
