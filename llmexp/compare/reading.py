"""Read run folders as records. What cannot be read is reported and passed over."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.records import Record, one_spelling
from llmexp.config.labels import plural
from llmexp.folders import rundir
from llmexp.folders.door import TEXT_KEYS, scan_rows
from llmexp.folders.find import SweepFolder, find
from llmexp.folders.folder import RunFolder, clean_name
from llmexp.folders.rows import LINEAGE
from llmexp.folders.steps import FIELDS, STEPS_BIN, steps_in
from llmexp.system.redact import clean

_MOST = 2**25  # steps: a file of 1 GiB
_Columns = dict[str, np.ndarray]  # float64, NaN where a row has no value, in order of the steps


def read(found: Sequence[tuple[Path, SweepFolder]]) -> list[Record]:
    """Return the runs as records, with names that are unique."""
    records = [_record(path, sweep) for path, sweep in found]
    for levels in (1, 2, 20):  # of parent folders in front
        tally = Counter(r.name for r in records)
        for i, r in enumerate(records):
            if tally[r.name] > 1:
                name = clean("/".join(r.path.resolve().parts[-levels - 1 :]))
                records[i] = dataclasses.replace(r, name=name)
    return one_spelling(records)


def runs_in(path: Path) -> list[Record]:
    """Return the runs of a sweep as they are compared."""
    return read(find([path])[0])


def _record(path: Path, sweep: SweepFolder) -> Record:
    """Return a run as it is compared."""
    folder = RunFolder(path, strict=False)
    columns, damage = read_columns(path / rundir.METRICS)
    lost, facts = folder.lost(), folder.facts
    ended = folder.state in ("finished", "preempted") and folder.summary.get("steps")
    came = int(max([ended or 0, *columns["step"][-1:]]))
    steps, gone = read_steps(path, int(facts.get("max_steps") or came))
    gone += max(0, came - len(steps["tokens"]))
    if lost := lost or (f"has lost {plural(gone, 'record')} of {STEPS_BIN}" if gone else ""):
        folder.problems.append(f"{path}: the run {lost}; it is not compared")
    point, ledger = sweep.point_of(path), sweep.ledger
    if not ledger or not any("sweep.halving=" in a for a in ledger.arguments):
        columns = by_interval(columns, len(steps["tokens"]))
    return Record(
        path,
        clean_name(path),
        sweep.path,
        folder.state,
        folder.flat_config,
        facts,
        folder.status,
        columns,
        steps=steps,
        problems=tuple(clean(p) for p in (*damage, *folder.problems)),
        swept=tuple(ledger.swept) if ledger else (),
        min_effect=ledger.min_effect if ledger else None,
        looks=ledger.looks if ledger else (),
        rung=point.rung if point else None,
        screen=bool(ledger and ledger.screen),
        trial=bool(ledger and point and not ledger.grid and not ledger.is_fresh(point)),
        left=sweep.left,
        lost=lost,
        before=read_columns(path / LINEAGE)[0] if facts.get("parent") else {},
    )


def read_columns(path: Path) -> tuple[_Columns, tuple[str, ...]]:
    """Return the columns of a metrics file that hold numbers, and what could not be read."""
    problems, rows, lost = list[str](), list[dict[str, Any]](), list[str]()
    try:
        for number, _, row in scan_rows(path):
            if isinstance(row, dict):
                rows.append(row)
            else:
                lost.append(f"line {number} {clean(row)[:100]}")
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"cannot be read: {error.strerror}")
    if lost:
        text = f"{len(lost):,} of {len(lost) + len(rows):,} lines are not rows of metrics"
        problems.append(f"{text} and were skipped: {lost[0]}")
    if any(a["step"] >= b["step"] for a, b in itertools.pairwise(rows)):
        problems.append("steps are repeated or out of order; the last row of a step counts")
        by_step = {row["step"]: row for row in rows}
        rows = [by_step[step] for step in sorted(by_step)]
    columns = {"step": np.zeros(0)}
    for key in list(dict.fromkeys(itertools.chain.from_iterable(rows)))[:1000]:
        values = [row.get(key) for row in rows]
        if key in TEXT_KEYS:  # a digest of tokens, kept as far as float64 is exact
            values = [float(int(v[-13:], 16)) if isinstance(v, str) else v for v in values]
        column = np.array(values, dtype=float)  # None is NaN
        column[~(np.abs(column) < 1e150)] = np.nan  # squares of what is beyond overflow
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


def elapsed(columns: Mapping[str, np.ndarray], first: float = 0.0) -> np.ndarray:
    """Return the seconds of training from the step `first` until each row; empty if not measured.

    `step_time` is the mean over the steps since the row before, so what a resumed run did twice
    counts once.
    """
    if "step_time" not in columns:
        return np.zeros(0)
    steps = np.diff(columns["step"], prepend=first)
    return np.cumsum(np.nan_to_num(steps * columns["step_time"], nan=0.0, posinf=0.0, neginf=0.0))
