"""sweep.json, the record of a sweep: what its points are and how far each has come. Standard
library only.

What a run's own folder says about it goes before what the ledger says: the sweep may have been
killed, the run not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmexp import fileio, rundir
from llmexp.config import FOLDER_NAME, ConfigError, flatten
from llmexp.knobs import essence

LEDGER, FORMAT = "sweep.json", 1
ANEW = "the command of the sweep writes it anew from its runs: llmexp train -m ... sweep.resume="
STATES = ("queued", "running", "finished", "failed", "preempted", "infeasible")


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


@dataclass
class Ledger:
    """Written whole after every change, by the process that holds the sweep's lock."""

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

    def save(self) -> None:
        """Raise OSError that names the file and the way to go on."""
        head = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("path", "points")
        }
        entries = [dataclasses.asdict(entry) for entry in self.points]
        whole = {"format": FORMAT, **head, "updated": time.time(), "points": entries}
        try:
            fileio.write_json(self.path / LEDGER, whole)
        except OSError as error:
            text = f"{self.path / LEDGER}: could not be written: {error.strerror}"
            if is_sweep(self.path):  # else it has not begun
                text += f"; its runs are intact; to go on: {rundir.how_to_resume(self.path)}"
            raise OSError(text) from error

    def update(self, entry: Entry, **changes: Any) -> None:
        """Change a point, and the file when that made a difference."""
        before = dataclasses.asdict(entry)
        for name, value in changes.items():
            setattr(entry, name, value)
        if dataclasses.asdict(entry) != before:
            self.save()

    def look(self, entry: Entry, alive: bool = False) -> dict[str, Any]:
        """Return the status of a point's run, after the ledger has taken over what it says.
        `alive`: it is known to be there, such as from a queue."""
        path = self.path / entry.folder
        status = rundir.read_status(path) if rundir.is_run(path) else {}
        state = status.get("state")
        if state == "running" and not alive and not rundir.is_alive(path, status):
            state = "preempted"  # cut: killed, or its host went down
        if state in STATES:
            error, started, code = (status.get(key) for key in ("error", "started", "exit_code"))
            self.update(
                entry,
                state=state,
                started=entry.started if figure(started) is None else started,
                ended=figure(status.get("ended"))
                if state in ("finished", "failed", "preempted")
                else None,
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
        raise ConfigError(
            f"{path}: is no sweep (it has no {LEDGER}); one looks like "
            "outputs/default/2030-01-01_12-00-00"
        )
    try:
        tree = fileio.read_json(where)
        if not isinstance(tree, dict):
            raise ConfigError(f"{where}: holds no ledger")
    except ConfigError as error:
        raise ConfigError(f"{error}; give it another name, then {ANEW}{path}") from None
    if tree.get("format") != FORMAT:
        raise ConfigError(
            f"{where}: format={tree.get('format')}: this version of llmexp reads format {FORMAT}"
        )
    kinds: dict[str, type | tuple[type, ...]] = {
        "name": str, "group": str, "launcher": str, "arguments": list, "swept": list,
        "created": (int, float),
        "state": str, "points": list,
    }  # fmt: skip
    for key, kind in kinds.items():
        value: Any = tree.get(key)
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not fits or (key == "created" and not math.isfinite(value)):
            raise ConfigError(
                f"{where}: {key}={_short(tree.get(key))}: is not what a ledger holds there"
            )
    if not FOLDER_NAME.fullmatch(tree["name"]):  # it goes into shell scripts
        raise ConfigError(f"{where}: name={_short(tree['name'])}: is not the name of a sweep")
    for key in ("arguments", "swept"):
        if not all(isinstance(text, str) for text in tree[key]):
            raise ConfigError(f"{where}: {key}={_short(tree[key])}: a list of texts is needed")
    points = [_entry(where, i, given) for i, given in enumerate(tree["points"])]
    for what in ("number", "folder"):
        seen = [getattr(p, what) for p in points]
        if twice := [v for v in seen if seen.count(v) > 1]:
            raise ConfigError(f"{where}: two points have the {what} {_short(twice[0])}")
    head = {
        key: tree[key]
        for key in ("name", "group", "launcher", "arguments", "swept", "created", "state")
    }
    return Ledger(path, points=points, negligible=figure(tree.get("negligible")), **head)


def rebuilt(path: Path, name: str, launcher: str, arguments: list[str]) -> Ledger:
    """Return the ledger of a sweep's folder that has lost its own, from its runs. Raises
    ConfigError."""
    found = Ledger(path, name, str(path), launcher, arguments, [])
    for run in runs_in(path):
        number, _, name_of = run.name.partition("-")
        told = rundir.read_run(run)
        texts = {
            k: [str(t) for t in v]
            for k in ("overrides", "swept")
            if isinstance(v := told.get(k), list)
        }
        entry = Entry(
            int(number),
            str(told.get("label") or name_of),
            run.name,
            None,
            texts.get("overrides", []),
        )
        found.points.append(entry)
        found.swept = sorted({*found.swept, *texts.get("swept", [])})
        found.group = str(told.get("group") or found.group)
    if twice := [n for n, c in Counter(p.number for p in found.points).items() if c > 1]:
        raise ConfigError(
            f"{path}: two runs there have the number {twice[0]}; give one of them another"
        )
    found.points.sort(key=lambda p: p.number)
    return found


def runs_in(path: Path) -> list[Path]:
    """Return the folders of a sweep's runs: <number>-<label>."""
    if not path.is_dir():
        return []
    return [p for p in path.iterdir() if re.match(r"[0-9]+-", p.name) and rundir.is_run(p)]


def _entry(where: Path, index: int, given: Any) -> Entry:
    """Return a point of a ledger that may have been edited by hand. Raises ConfigError."""
    at = f"{where}: points[{index}]"
    if not isinstance(given, dict):
        raise ConfigError(f"{at}={_short(given)}: a section of keys is needed here")
    wanted: dict[str, Any] = {
        "number": int, "label": str, "folder": str, "identity": (str, type(None)),
        "overrides": list, "state": str,
        "started": (int, float, type(None)), "ended": (int, float, type(None)), "exit_code": (int,
        type(None)),
        "attempts": int, "error": (str, type(None)), "rung": (int, float, type(None)),
    }  # fmt: skip
    values: dict[str, Any] = {}
    for f in dataclasses.fields(Entry):
        required = f.default is dataclasses.MISSING
        if f.name not in given and not required:
            continue
        value: Any = given.get(f.name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = isinstance(value, wanted[f.name]) and not isinstance(value, bool)
        if not fits or (number and not math.isfinite(value)):
            raise ConfigError(f"{at}.{f.name}={_short(value)}: is not what a ledger holds there")
        values[f.name] = value
    entry = Entry(**values)
    if entry.state not in STATES:
        raise ConfigError(f"{at}.state={_short(entry.state)}: must be one of {', '.join(STATES)}")
    relative = Path(entry.folder)
    if (
        relative.is_absolute()
        or ".." in relative.parts
        or not relative.parts
        or "\0" in entry.folder
    ):
        raise ConfigError(
            f"{at}.folder={_short(entry.folder)}: must be a folder inside that of the sweep"
        )
    if not all(isinstance(text, str) for text in entry.overrides):
        raise ConfigError(f"{at}.overrides={_short(entry.overrides)}: a list of texts is needed")
    return entry


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
