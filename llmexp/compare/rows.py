"""Read metrics.jsonl as columns."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.runs.folder import parse_row

Columns = dict[str, np.ndarray]  # float64, NaN where a row has no value, in order of the steps


def read_columns(path: Path) -> tuple[Columns, tuple[str, ...]]:
    """Return the columns of a metrics file that hold numbers, and what could not be read."""
    problems = []
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what has no newline was never finished
    except FileNotFoundError:
        return {"step": np.zeros(0)}, ()
    except OSError as error:
        return {"step": np.zeros(0)}, (f"{path}: cannot be read: {error.strerror}",)
    rows = _rows(lines)
    if lost := len(lines) - len(rows):
        problems.append(
            f"{path}: {lost:,} of {len(lines):,} lines are no rows of metrics and were passed over"
        )
    if any(a["step"] >= b["step"] for a, b in itertools.pairwise(rows)):
        problems.append(
            f"{path}: steps are repeated or out of order; the last row of each step counts"
        )
        by_step = {row["step"]: row for row in rows}
        rows = [by_step[step] for step in sorted(by_step)]
    columns = {"step": np.zeros(0)}
    for key in list(dict.fromkeys(itertools.chain.from_iterable(rows)))[:1000]:
        column = _column([row.get(key) for row in rows])
        if key == "step" or np.isfinite(column).any():
            columns[key] = column
    return columns, tuple(problems)


def _rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the rows that the lines hold: all in one go, or those that can be parsed alone."""
    try:
        rows = json.loads(b"[%s]" % b",".join(lines))
        if len(rows) == len(lines) and all(map(_is_row, rows)):
            return list(rows)
    except (ValueError, RecursionError):
        pass
    return [row for row in map(parse_row, lines) if row]


def _is_row(row: object) -> bool:
    step = row.get("step") if isinstance(row, dict) else None
    return type(step) in (int, float) and abs(step) < 2**53  # type: ignore[arg-type]


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
    try:
        column = np.array(values, dtype=float)  # None is NaN
    except (ValueError, TypeError, OverflowError):
        column = np.zeros((0, 0))
    if column.ndim == 1:
        return np.where(np.abs(column) < 1e308, column, np.nan)
    return np.array([_value(value) for value in values])  # not all are numbers


def _value(value: Any) -> float:
    if isinstance(value, str):  # a digest of tokens: hexadecimal, kept as far as float64 is exact
        return float(int(value[-13:], 16)) if re.fullmatch(r"[0-9a-f]{16}", value) else math.nan
    if isinstance(value, (int, float)) and abs(value) < 1e308:  # nan is not
        return float(value)
    return math.nan
