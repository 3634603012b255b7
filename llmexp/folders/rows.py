"""Read metrics.jsonl, the rows of a run, and write it some rows at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from llmexp.config.kinds import kind_of_error
from llmexp.config.values import ConfigError, Plain
from llmexp.folders.door import scan_rows
from llmexp.folders.rundir import METRICS
from llmexp.folders.steps import STEP_RECORD, STEPS_BIN
from llmexp.system.fileio import Unwritable

# json.dumps with options would make one for each row
ROW = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
MOST_WAITING = 10  # rows
LONGEST_WAIT_S = 1.0
LINEAGE = "lineage.jsonl"  # in a fork's folder: the rows of its parents, up to its step


def read_rows(path: Path) -> list[Plain]:
    """Return the whole rows of a metrics file in order. Raises ConfigError for damage."""
    return [row for row, _ in walk_rows(path)]


def walk_rows(path: Path) -> Iterator[tuple[Plain, int]]:
    """Yield the whole rows of a file of them in order, each with the place where it ends.

    One row is in memory at a time. A torn last line is left out. Raises ConfigError for damage.
    """
    before = -1
    if not os.path.lexists(path):
        return
    try:
        for number, end, row in scan_rows(path, path.name not in (METRICS, LINEAGE)):
            if isinstance(row, dict) and row["step"] <= before:
                row = ValueError(f"step {row['step']} does not follow the one before")
            if isinstance(row, ValueError):
                raise ConfigError(
                    "damaged_file",
                    f"{path}: line {number} is not a row of metrics: {row}; the checkpoints are "
                    "intact: take the line out, or give the file another name, and resume",
                )
            before = row["step"]
            yield row, end
    except OSError as error:
        raise ConfigError(
            kind_of_error(error), f"{path}: cannot be read: {error.strerror}"
        ) from None


def rows_up_to(path: Path, step: int) -> list[Plain]:
    """Return the rows of a run and of its own parents up to a step, those that can be read."""
    found: list[Plain] = []
    for name in (LINEAGE, METRICS):
        with contextlib.suppress(ConfigError):
            found += read_rows(path / name)
    return [row for row in found if row["step"] <= step]


def _torn(rows: FileIO, end: int, step: int, error: OSError) -> Unwritable:
    """Cut a file where its last whole row ends; return the error of the row of a step."""
    with contextlib.suppress(OSError):
        rows.truncate(end)
    text = f"the row of step {step:,} could not be written: {error.strerror}"
    return Unwritable(f"{rows.name}: {text}")


class Figures:
    """Keep what the end of a run needs of its rows."""

    def __init__(self, begins_at: int = 0) -> None:
        """Begin before the first row; `begins_at`: the step before the first one of the run."""
        self.step = begins_at  # of the last row
        self.last: Plain = {}  # row
        self.newest: dict[str, tuple[int, Any]] = {}  # by key: step and value in the last such row
        self.train_time = 0.0  # seconds, of the steps up to the last row

    def count(self, row: Plain) -> None:
        self.last = row
        for key, value in row.items():
            self.newest[key] = row["step"], value
        if (mean := row.get("step_time")) is not None:
            self.train_time += (row["step"] - self.step) * mean
        self.step = row["step"]


class Rows:
    """metrics.jsonl, the record of a run: a strict JSON object a line, each logged step once.

    `add` keeps a row until `flush` writes all that wait, which `due` asks for: with the first row,
    with each tenth one, after a second. While the loop is held up a thread writes them each second.
    A kill loses those that wait and tears none. With `steps` steps.bin is written before the rows.
    """

    def __init__(
        self, path: Path, keep_up_to_step: int, begins_at: int = 0, steps: bool = False
    ) -> None:
        """Read the rows up to a step; `open` writes. Raises ConfigError for damage.

        `begins_at`: the step before the first one of the run.
        """
        self._files: list[FileIO] = []
        self._ends = (
            {path.with_name(STEPS_BIN): keep_up_to_step * STEP_RECORD.size} if steps else {}
        )
        self._steps = bytearray()  # those that wait
        self.path, self.figures, self._ends[path] = path, Figures(begins_at), 0
        for row, after in walk_rows(path):
            if row["step"] > keep_up_to_step:
                break
            self.figures.count(row)
            self._ends[path] = after
        self._waiting: list[tuple[int, bytes]] = []
        self._new = 0  # rows since the last flush
        self._flushed_at = -math.inf
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._error: OSError | None = None  # of the thread

    def open(self) -> Rows:
        """Open for appending, without what comes after the rows that were read or a torn line."""
        for path, end in self._ends.items():
            # Unbuffered: what could not be written must not come back as an error at the end.
            self._files.append(open(path, "ab", buffering=0))  # noqa: SIM115
            self._files[-1].truncate(end)
        threading.Thread(target=self._write_each_second, name="rows", daemon=True).start()
        return self

    def add(self, row: Plain) -> None:
        """Take a row, which `flush` writes."""
        line = f"{ROW.encode(row)}\n".encode()
        with self._lock:
            self._waiting.append((row["step"], line))
        self._new += 1
        self.figures.count(row)

    def add_step(self, *figures: float) -> None:
        """Take what a step came to, in the order of FIELDS."""
        with self._lock:
            self._steps += STEP_RECORD.pack(*figures)

    @property
    def due(self) -> bool:
        """Return whether rows have waited long enough to be written."""
        if not self._new:
            return False
        return self._new >= MOST_WAITING or time.monotonic() - self._flushed_at >= LONGEST_WAIT_S

    def flush(self) -> bool:
        """Write the rows that wait; return whether rows were added since the last call.

        Raises Unwritable where one cannot be written; the file then ends with the row before it.
        """
        with self._lock:
            error, self._error = self._error, None
            if error is not None:
                self._waiting = []
                raise error
            self._write()
        any_new, self._new = self._new > 0, 0
        self._flushed_at = time.monotonic()
        return any_new

    def _write_each_second(self) -> None:
        while not self._closed.wait(LONGEST_WAIT_S):
            with self._lock:
                try:
                    if self._error is None and not self._closed.is_set():
                        self._write()
                except OSError as error:  # the loop raises it
                    self._error = error

    def _write(self) -> None:
        *steps, rows = self._files
        try:
            while steps and self._steps:
                del self._steps[: steps[0].write(self._steps)]
        except OSError as error:
            raise Unwritable(error.errno, error.strerror, steps[0].name) from error
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        data = b"".join(line for _, line in waiting)
        before, written = os.fstat(rows.fileno()).st_size, 0
        try:
            while written < len(data):
                written += rows.write(data[written:])
        except OSError as error:
            whole = data[:written].rfind(b"\n") + 1
            raise _torn(
                rows, before + whole, waiting[data[:whole].count(b"\n")][0], error
            ) from error

    def sync(self) -> None:
        """Flush to the disk, so that no checkpoint is ahead of its rows. Raises Unwritable."""
        self.flush()
        for file in self._files:
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise Unwritable(error.errno, error.strerror, file.name) from error

    def close(self) -> None:
        self.sync()
        with self._lock:
            self._closed.set()
            for file in self._files:
                file.close()
