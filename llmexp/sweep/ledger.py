"""sweep.json, the record of a sweep: what its points are and how far each has come.

What a run's own folder says about it goes before what the ledger says: the sweep may have been
killed, the run not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmexp.runs import rundir
from llmexp.runs.ending import state_now
from llmexp.runs.naming import CHANGES, LEDGER, with_changes
from llmexp.settings.config import FOLDER_NAME
from llmexp.settings.knobs import essence
from llmexp.settings.values import ConfigError, flatten, typed
from llmexp.system import fileio

FORMAT = 1
STATES = ("queued", "running", "finished", "failed", "preempted", "infeasible")


def anew(path: Path) -> str:
    """Return how a ledger that is lost is written again."""
    command = f"llmexp train -m ... {typed('sweep.resume', path)}"
    return f"the command of the sweep writes it anew from its runs: {command}"


@dataclass
class Entry:
    """A point in the ledger. Times are in seconds since 1970."""

    number: int
    label: str
    folder: str  # in that of the sweep
    identity: str | None  # of the config as composed; None where only the run's folder is known
    overrides: list[str]
    state: str = "queued"
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    attempts: int = 0
    error: str | None = None  # one line
    rung: float | None = None  # share of its steps after which successive halving left it out


@dataclass(frozen=True)
class Facts:
    """The checker's answer: how a point's run is solved, and what it needs."""

    solved: str  # identity of the config as solved; also what was null
    max_steps: int
    max_tokens: int
    ranks: int
    devices: int  # CUDA devices of this machine; 0 for a run on the CPU


@dataclass
class Ledger:
    """Written by the process that holds the sweep's lock: whole where points are added and at the
    end; a change of a point in between is a line of its own."""

    path: Path  # the sweep's folder
    name: str
    group: str  # of its runs in the tracker, wherever the folder is moved
    launcher: str
    arguments: list[str]  # of the command that goes on with it, after `train`
    swept: list[str]
    created: float = field(default_factory=time.time)
    state: str = "running"
    negligible: float | None = None  # nats; sweep.negligible, for those who compare its runs later
    points: list[Entry] = field(default_factory=list)
    # when this process wrote it whole; None: not yet, or a line after it may be torn
    since: float | None = field(default=None, compare=False)

    def add(self, label: str, overrides: list[str], folder: str | None = None) -> Entry:
        """Return a new point, in the folder or in one that is named by its number."""
        number = self.next_number()
        entry = Entry(number, label, folder or f"{number}-{label}", None, overrides)
        self.points.append(entry)
        return entry

    def next_number(self) -> int:
        return max((entry.number for entry in self.points), default=-1) + 1

    def add_swept(self, keys: Iterable[str]) -> None:
        self.swept = sorted({*self.swept, *keys})

    def save(self) -> None:
        """Write the whole ledger. Raise OSError that names the file and the way to go on."""
        now = time.time()
        whole = {"format": FORMAT, **vars(self), "updated": now}
        del whole["path"], whole["since"]
        whole["points"] = [vars(entry) for entry in whole.pop("points")]
        with self._written(LEDGER):
            fileio.write_json(self.path / LEDGER, whole)
        self.since = now
        with contextlib.suppress(OSError):  # its lines are of the ledger before
            (self.path / CHANGES).unlink(missing_ok=True)

    def update(self, entry: Entry, **changes: Any) -> None:
        """Change a point, and append that to the file when it made a difference."""
        if all(getattr(entry, name) == value for name, value in changes.items()):
            return
        for name, value in changes.items():
            setattr(entry, name, value)
        if self.since is None:
            self.save()
            return
        line = json.dumps({"since": self.since, "number": entry.number, **changes}, allow_nan=False)
        with self._written(CHANGES), open(self.path / CHANGES, "ab", buffering=0) as f:
            since, self.since = self.since, None
            data = f"{line}\n".encode()
            if f.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(f.fileno())
            self.since = since

    @contextlib.contextmanager
    def _written(self, name: str) -> Iterator[None]:
        """Name the file and the way to go on in an OSError."""
        try:
            yield
        except OSError as error:
            text = f"{self.path / name}: could not be written: {error.strerror}"
            if is_sweep(self.path):  # else it has not begun
                text += f"; its runs are intact; to go on: {rundir.how_to_resume(self.path)}"
            raise OSError(text) from error

    def look(self, entry: Entry, alive: bool = False) -> dict[str, Any]:
        """Return the status of a point's run, after the ledger has taken over what it says.
        `alive`: it is known to be there, such as from a queue."""
        path = self.path / entry.folder
        status = rundir.read_status(path) if rundir.is_run(path) else {}
        state = status.get("state") if alive else state_now(path, status)
        if state == "cut":  # killed, or its host went down
            state = "preempted"
        if state not in STATES:
            return status
        error, started, code = (status.get(key) for key in ("error", "started", "exit_code"))
        over = state in ("finished", "failed", "preempted")
        self.update(
            entry,
            state=state,
            started=entry.started if figure(started) is None else started,
            ended=figure(status.get("ended")) if over else None,
            exit_code=code if type(code) is int and abs(code) < 2**31 else None,
            error=one_line(error) if error else None,
        )
        return status


def identity(config: Mapping[str, Any]) -> str:
    """Hash of a plain config less what cannot change results or does nothing there; in hex
    digits."""
    text = json.dumps(essence(flatten(config)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def figure(value: Any) -> float | None:
    """Return a finite number, or None: what is in a run's files may be damaged."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return value if fits else None


def one_line(text: str, width: int = 300) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= width else line[: width - 3] + "..."


def is_sweep(path: Path) -> bool:
    return (path / LEDGER).is_file()


def read(path: Path) -> Ledger:
    """Return the ledger of the sweep's folder. Raises ConfigError for one that is missing, damaged,
    or of a newer version."""
    where = path / LEDGER
    if not where.is_file():
        example = "one looks like outputs/default/2030-01-01_12-00-00"
        raise ConfigError(f"{path}: is no sweep (it has no {LEDGER}); {example}")
    try:
        tree = with_changes(fileio.read_json(where), path)
        if not isinstance(tree, dict):
            raise ConfigError(f"{where}: holds no ledger")
    except ConfigError as error:
        raise ConfigError(f"{error}; give it another name, then {anew(path)}") from None
    if tree.get("format") != FORMAT:
        text = f"this version of llmexp reads format {FORMAT}"
        raise ConfigError(f"{where}: format={tree.get('format')}: {text}")
    head = _fitting(Ledger, tree, f"{where}: ")
    if not FOLDER_NAME.fullmatch(head["name"]):  # it goes into shell scripts
        raise ConfigError(f"{where}: name={_short(head['name'])}: is not the name of a sweep")
    points = [_entry(f"{where}: points[{i}]", given) for i, given in enumerate(head.pop("points"))]
    for key in ("number", "folder"):
        for value, count in Counter(getattr(point, key) for point in points).items():
            if count > 1:
                raise ConfigError(f"{where}: two points have the {key} {_short(value)}")
    return Ledger(path, points=points, **head)


def rebuilt(path: Path, name: str, launcher: str, arguments: list[str]) -> Ledger:
    """Return the ledger of a sweep's folder that has lost its own, from its runs. Raises
    ConfigError."""
    found = Ledger(path, name, str(path), launcher, arguments, [])
    for run in runs_in(path):
        number, _, name_of = run.name.partition("-")
        facts = rundir.read_run(run)
        overrides, swept = (
            list(map(str, facts[key])) if isinstance(facts.get(key), list) else []
            for key in ("overrides", "swept")
        )
        label = str(facts.get("label") or name_of)
        found.points.append(Entry(int(number), label, run.name, None, overrides))
        found.add_swept(swept)
        found.group = str(facts.get("group") or found.group)
    if twice := [n for n, c in Counter(p.number for p in found.points).items() if c > 1]:
        text = f"two runs there have the number {twice[0]}; give one of them another"
        raise ConfigError(f"{path}: {text}")
    found.points.sort(key=lambda p: p.number)
    return found


def steps_of(path: Path) -> int:
    """Return the planned steps of a run; 0 where its file is damaged."""
    with contextlib.suppress(ConfigError):
        steps = rundir.read_run(path).get("max_steps")
        return steps if type(steps) is int else 0
    return 0


def runs_in(path: Path) -> list[Path]:
    """Return the folders of a sweep's runs: <number>-<label>."""
    if not path.is_dir():
        return []
    return [p for p in path.iterdir() if re.match(r"[0-9]+-", p.name) and rundir.is_run(p)]


def _entry(at: str, given: Any) -> Entry:
    """Return a point of a ledger that may have been edited by hand. Raises ConfigError."""
    if not isinstance(given, dict):
        raise ConfigError(f"{at}={_short(given)}: a section of keys is needed here")
    entry = Entry(**_fitting(Entry, given, f"{at}."))
    if entry.state not in STATES:
        raise ConfigError(f"{at}.state={_short(entry.state)}: must be one of {', '.join(STATES)}")
    relative = Path(entry.folder)
    inside = relative.parts and not relative.is_absolute() and ".." not in relative.parts
    if not inside or "\0" in entry.folder:
        text = "must be a folder inside that of the sweep"
        raise ConfigError(f"{at}.folder={_short(entry.folder)}: {text}")
    return entry


def _fitting(cls: type, given: dict[str, Any], at: str) -> dict[str, Any]:
    """Return the values for the fields of a dataclass. Raises ConfigError for one of another
    kind, and for one that is missing and has no default."""
    values = {}
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING
        if f.name in ("path", "since") or (f.name not in given and not required):
            continue
        values[f.name] = given.get(f.name)
        if not _fits(values[f.name], str(f.type)):
            text = "is not what a ledger holds there"
            raise ConfigError(f"{at}{f.name}={_short(given.get(f.name))}: {text}")
    return values


def _fits(value: Any, kind: str) -> bool:
    """Return whether a value of a file is of a kind, such as `int`, `float | None` or
    `list[str]`."""
    if value is None:
        return "None" in kind
    if kind.startswith("list"):
        texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
        return texts if kind == "list[str]" else isinstance(value, list)
    if kind.startswith("str"):
        return isinstance(value, str)
    return figure(value) is not None and (kind.startswith("float") or isinstance(value, int))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
