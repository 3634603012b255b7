"""Read metrics.jsonl as columns.

What tables need is picked out of the text; the rest is parsed when it is asked for.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.metrics.keys import is_of_named_set
from llmexp.runs.folder import parse_row

# A row as llmexp writes it: one flat object a line, `step` and `tokens_seen` first. Anything else
# is parsed as JSON.
_NUMBER = rb"(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
_ROW = re.compile(
    rb'\{"step":(\d{1,15}),"tokens_seen":(\d{1,15}),(?:[^\n]*?"train/loss":' + _NUMBER + rb"[,}])?"
)
# The losses of the validation, and of each named set.
_VAL = re.compile(rb'"(val/(?:[\w-]+/)?(?:loss|bits_per_byte))":' + _NUMBER + rb"[,}]")
QUICK = ("step", "tokens_seen", "train/loss", "val/loss", "val/bits_per_byte")


class Columns(Mapping[str, np.ndarray]):
    """The columns of a metrics file: float64, NaN where a row has no value, in order of the steps.

    Those of QUICK are there at once; to ask for another one reads the whole file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problems: tuple[str, ...] = ()
        text = b""
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            pass
        except OSError as error:
            self.problems = (f"{path}: cannot be read: {error.strerror}",)
        quick = _quick(text)
        self.whole = quick is None
        if quick is None:
            quick, problems = _parse(path, text)
            self.problems += problems
        self._columns = quick

    def load(self) -> Columns:
        """Read every column, and return itself."""
        if not self.whole:
            self.whole = True
            try:
                columns, self.problems = _parse(self._path, self._path.read_bytes())
            except OSError:  # removed in the meantime
                columns = {}
            # a running run may have written more since then
            rows = len(self._columns["step"])
            more = {key: column[:rows] for key, column in columns.items() if len(column) >= rows}
            self._columns = more | self._columns
        return self

    @property
    def quick(self) -> dict[str, np.ndarray]:
        """Return the columns that were read so far."""
        return self._columns

    def __getitem__(self, key: str) -> np.ndarray:
        return (self if key in QUICK else self.load())._columns[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.load()._columns)

    def __len__(self) -> int:
        return len(self.load()._columns)


def named_sets(columns: Mapping[str, np.ndarray]) -> list[str]:
    """Return the keys of the losses on named validation sets."""
    known = columns.quick if isinstance(columns, Columns) else columns
    return [key for key in known if is_of_named_set(key)]


def elapsed(columns: Mapping[str, np.ndarray], first: float = 0.0) -> np.ndarray:
    """Return the seconds of training from the step `first` until each row; empty if not measured.

    `step_time` is the mean over the steps since the row before, so what a resumed run did twice
    counts once.
    """
    if "step_time" not in columns:
        return np.zeros(0)
    steps = np.diff(columns["step"], prepend=first)
    return np.cumsum(np.nan_to_num(steps * columns["step_time"], nan=0.0, posinf=0.0, neginf=0.0))


def _quick(text: bytes) -> dict[str, np.ndarray] | None:
    """Return the columns that tables need; None where the text is not in the usual form."""
    letters = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))  # what follows the last newline was never finished
    rows, usual = len(ends), text.startswith(b'{"step":')
    if not rows or not usual or np.any(letters[ends - 1] != ord("}")):
        return None
    text = text[: ends[-1] + 1]
    found = _ROW.findall(text)
    if len(found) != rows or np.count_nonzero(letters[: len(text)] == ord("{")) != rows:
        return None
    steps, tokens, losses = zip(*found, strict=True)
    columns = {"step": np.array(steps, dtype=float), "tokens_seen": np.array(tokens, dtype=float)}
    if any(losses):
        columns["train/loss"] = np.array([loss or b"nan" for loss in losses], dtype=float)
    if np.any(np.diff(columns["step"]) <= 0):
        return None
    place = text.find(b'"val/')
    while place >= 0:
        row = int(np.searchsorted(ends, place))
        for match in _VAL.finditer(text, place, int(ends[row])):
            key = match.group(1).decode()
            columns.setdefault(key, np.full(rows, np.nan))[row] = float(match.group(2))
        place = text.find(b'"val/', int(ends[row]))
    return {key: np.where(np.isfinite(column), column, np.nan) for key, column in columns.items()}


def _parse(path: Path, text: bytes) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return all columns, and what could not be read, in words."""
    problems = []
    lines = text.split(b"\n")[:-1]
    rows = [row for row in map(parse_row, lines) if row]
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
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = {"step": np.zeros(0)}
    for key in list(keys)[:1000]:
        column = _column([row.get(key) for row in rows])
        if key == "step" or np.isfinite(column).any():
            columns[key] = column
    return columns, tuple(problems)


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
