"""Read what the folder of a run holds: each file once, whatever state it is in."""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from llmexp.config.values import ConfigError
from llmexp.folders import door, ending, rundir
from llmexp.folders.door import row_in
from llmexp.folders.rows import read_rows
from llmexp.system.fileio import open_plain
from llmexp.system.redact import clean, cleaned

# States of a run from good to bad, with their colours in tables.
STATES = {
    "finished": "green", "running": "cyan", "queued": "", "preempted": "yellow", "crashed": "red",
    "failed": "red",
}  # fmt: skip
_BLOCK = 1 << 16  # bytes that are read at a time from the end


class RunFolder:
    """The files of a run, each read once, when it is first asked for.

    With `strict`, damage raises ConfigError. Without, nothing in the folder is trusted: texts are
    cleaned, and what cannot be read is left out and named in `problems`.
    """

    def __init__(self, path: Path, strict: bool = True) -> None:
        self.path, self.strict = path, strict
        self.problems: list[str] = []

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Return run.json: every derived number."""
        return self._read(rundir.RUN, rundir.read_run)

    @cached_property
    def status(self) -> dict[str, Any]:
        """Return status.json: state, times, exit code, error and summary."""
        return self._read(rundir.STATUS, rundir.read_status)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return config.yaml as plain values."""
        return self._read(rundir.CONFIG, rundir.read_config)

    @cached_property
    def flat_config(self) -> dict[str, Any]:
        """Return config.yaml with dotted keys, its long values shortened."""
        flat: dict[str, Any] = {}
        waiting: list[tuple[str, Any]] = [("", self.config)]
        while waiting:
            name, value = waiting.pop()
            if isinstance(value, dict) and (value or not name):
                inner = [(f"{name}.{k}"[:200].lstrip("."), v) for k, v in value.items()]
                waiting += reversed(inner)
            else:
                flat[name] = _leaf(value)
        return flat

    @property
    def summary(self) -> dict[str, Any]:
        """Return the figures that the run ended with; empty before."""
        return self.status.get("summary") or {}

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl. Raises ConfigError for damage."""
        return read_rows(self.path / rundir.METRICS)

    def last_row(self, key: str = "step") -> dict[str, Any]:
        """Return the last finished row that has the key, read from the end; empty without one."""
        wanted = json.dumps(key).encode()
        with contextlib.suppress(OSError):
            for line in _backwards(self.path / rundir.METRICS):
                row = row_in(line) if wanted in line else {}
                if isinstance(row, dict) and key in row:
                    return row
        return {}

    @cached_property
    def state(self) -> str:
        """Return one of STATES.

        A run has crashed if its status says running and no process is at work in it, or if it
        has rows and no status.
        """
        state = ending.state_now(self.path, self.status)
        if state in STATES:
            return state
        return "crashed" if (self.path / rundir.METRICS).exists() else "queued"

    @property
    def error(self) -> str:
        """Return why the run failed; empty where it did not."""
        if self.state == "crashed":
            return ending.CUT_OFF
        error = self.status.get("error") if self.state == "failed" else None
        return clean(error or "")

    def lost(self) -> str:
        """Return, in words, how many rows are missing at the end of a run that ended; else nothing.

        A preempted run may have stopped between two rows, train.log_every steps apart.
        """
        state, ended = self.status.get("state"), self.summary.get("steps")
        if ended is None and state == "finished":
            ended = self.facts.get("max_steps")
        if state not in ("finished", "preempted") or ended is None:
            return ""
        between = 1
        if state == "preempted":
            given = self.flat_config.get("train.log_every")
            between = given if type(given) is int and given > 0 else ended
        last = int(self.last_row().get("step", 0))
        if not 0 < ended < 2**53 or last + between > ended:
            return ""
        rows = f"its rows end at {last:,}" if last else "it has no rows"
        return f"says {state} at step {ended:,}, but {rows}"

    def _read(self, name: str, strictly: Callable[[Path], Any]) -> dict[str, Any]:
        """Return what is in a file of the folder: as it is read `strictly`, or cleaned."""
        if self.strict:
            return dict(strictly(self.path))
        path = self.path / name
        try:
            read = door.read_yaml if name == rundir.CONFIG else door.object_in
            return dict(cleaned(read(path)))
        except ConfigError as error:
            there = os.path.lexists(path)
            self.problems.append(clean(error)[:300] if there else f"{path}: is missing")
            return {}


def clean_name(path: Path) -> str:
    """Return the name of a run's folder, without control characters."""
    return clean(path.name) or clean(path.resolve().name) or "run"


def _leaf(value: Any) -> Any:
    if isinstance(value, str):
        return value[:400]
    if isinstance(value, list) and len(value) <= 50:
        if all(isinstance(v, (str, int, float)) for v in value):
            return value
    elif isinstance(value, (float, type(None))) or (isinstance(value, int) and abs(value) < 10**18):
        return value
    return reprlib.repr(value)


def _backwards(path: Path) -> Iterator[bytes]:
    """Yield the finished lines of a file, the last one first."""
    with open_plain(path) as f:
        end, rest, torn = f.seek(0, os.SEEK_END), list[bytes](), True
        while end:
            begin = max(0, end - _BLOCK)
            f.seek(begin)
            *lines, last = f.read(end - begin).split(b"\n")
            rest.append(last)  # a piece of a line, which may be much longer
            if lines:
                if not torn:  # what follows the last newline
                    yield b"".join(reversed(rest))
                yield from reversed(lines[1:])
                rest, torn = lines[:1], False
            end = begin
        if not torn:
            yield b"".join(reversed(rest))
