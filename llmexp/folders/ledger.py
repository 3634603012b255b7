"""Keep sweep.json, the record of a sweep: its points, and what no run's folder knows of them.

How far a point has come is read from the status.json of its run: the sweep may have been killed,
the run not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from llmexp.config.convert import convert_section
from llmexp.config.kinds import Kind
from llmexp.config.knobs import deciding_result, is_seed
from llmexp.config.sections import FOLDER_NAME
from llmexp.config.values import ConfigError, flatten, refuse
from llmexp.folders import rundir
from llmexp.folders.ending import state_now
from llmexp.folders.folder import STATES
from llmexp.system import fileio
from llmexp.system.child import REFUSED
from llmexp.system.text import one_line

_T = TypeVar("_T")
FORMAT = 1
_TWIN = "train.twin="  # begins the override that makes a point a twin
LEDGER, LOCK = "sweep.json", ".lock-sweep"  # in a sweep's folder
_CHANGES = "sweep.jsonl"  # beside it: what has changed since it was written whole, a line a change
TO_TRAIN = ("queued", "running", "preempted")  # states that resuming the sweep ends
# What is written of a point, and what is not written of a ledger.
_KEPT = (
    "number", "label", "folder", "identity", "overrides", "attempts", "failures", "rung", "refused",
    "forked", "fresh",
)  # fmt: skip
NOT_KEPT = ("path", "since", "points", "looks")


def anew(path: Path) -> str:
    """Return how a ledger that is lost is written again."""
    again = rundir.command_on(path, "train", "-m", "...", ("sweep.resume", path))
    return f"the command of the sweep rebuilds it from its runs: {again}"


@dataclass
class LedgerEntry:
    """A point of a sweep. Times are in seconds since 1970."""

    number: int
    label: str
    folder: str  # in that of the sweep
    identity: str | None  # of the config as composed; None where only the run's folder is known
    overrides: list[str]
    attempts: int = 0  # starts, those that go on after a cut or a rung among them
    failures: int = 0
    rung: float | None = None  # share of its steps after which successive halving left it out
    refused: str | None = None  # why it cannot run, in one line; it has no folder then
    forked: bool | None = None  # its process was a fork of one that had imported (sweep.warm)
    fresh: str | None = None  # why it was none, in words
    # As `Ledger.look` found them in the run's folder; not written.
    state: str = "queued"
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    error: str | None = None  # one line
    kind: Kind = "failed"  # of what refuses it

    @property
    def name(self) -> str:
        return f"{self.number}-{self.label}"

    @property
    def is_twin(self) -> bool:
        """Return whether it repeats a setting with another rounding."""
        return any(o.startswith(_TWIN) and o != f"{_TWIN}0" for o in self.overrides)

    def not_started(self, why: str) -> None:
        """Note that the point failed before it had a run, which only this process knows."""
        self.state, self.exit_code, self.error = "failed", REFUSED, one_line(why)


@dataclass(frozen=True)
class Look:
    """A look at the losses of a sweep that decides by itself which settings get further seeds."""

    seeds: list[str]  # of each setting that was in question
    level: float  # the chance of a false alarm that it spends, of 5 % in all
    most: int  # seeds a setting at most, as the sweep had it then
    going: list[str]  # names of the settings that were left in question
    worse: list[str]  # and of those that it showed to be worse
    why: str  # the sweep goes on, or ends

    @property
    def is_last(self) -> bool:
        """Tell whether it was over all seeds that a setting might have."""
        return len(self.seeds) >= self.most


@dataclass(frozen=True)
class PointFacts:
    """The checker's answer: how a point's run is solved, and what it needs."""

    solved: str  # identity of the config as solved; also what was null
    devices: int  # CUDA devices of this machine; 0 for a run on the CPU
    run: dict[str, Any]  # as its run.json will have it, and `own_tokens`, without a parent's

    @property
    def ranks(self) -> int:
        """Return the ranks of a host."""
        return int(self.run["nproc_per_node"])


@dataclass
class Ledger:
    """The record of a sweep, written by the process that holds the sweep's lock.

    It is written whole where points are added and at the end; a change of a point in between is a
    line of its own.
    """

    path: Path  # the sweep's folder
    name: str
    group: str  # of its runs in the tracker, wherever the folder is moved
    launcher: str
    arguments: list[str]  # of the command that goes on with it, after `train`
    swept: list[str]
    created: float = field(default_factory=time.time)
    state: str = "running"
    min_effect: float | None = None  # nats; sweep.min_effect, for those who compare its runs later
    grid: bool = True  # false where a search chose the points by their results
    planned: int | None = None  # runs of a search in all, those that confirm it included
    screen: bool = False  # the points are a fraction of all combinations, to tell which keys matter
    looks: list[Look] = field(default_factory=list)  # with sweep.decide
    points: list[LedgerEntry] = field(default_factory=list)
    # when this process wrote it whole; None: not yet, or a line after it may be torn
    since: float | None = field(default=None, compare=False)

    def add(self, label: str, overrides: list[str], folder: str | None = None) -> LedgerEntry:
        """Return a new point, in the folder or in one that is named by its number."""
        entry = LedgerEntry(self.next_number(), label, folder or "", None, overrides)
        entry.folder = entry.folder or entry.name
        self.points.append(entry)
        return entry

    def is_fresh(self, entry: LedgerEntry) -> bool:
        """Return whether a point of a search repeats a trial with another seed than all trials."""
        first = list(filter(is_seed, self.points[0].overrides))
        return not self.grid and list(filter(is_seed, entry.overrides)) != first

    def next_number(self) -> int:
        return max((entry.number for entry in self.points), default=-1) + 1

    def add_swept(self, keys: Iterable[str]) -> None:
        self.swept = sorted({*self.swept, *keys})

    def save(self) -> None:
        """Write the whole ledger. Raise OSError that names the file and the way to go on."""
        now = time.time()
        whole = {"format": FORMAT, **vars(self), "updated": now}
        for name in NOT_KEPT:
            del whole[name]
        whole["looks"] = [vars(look) for look in self.looks]
        whole["points"] = [{name: getattr(e, name) for name in _KEPT} for e in self.points]
        with self._written(LEDGER):
            fileio.write_json(self.path / LEDGER, whole)
        self.since = now
        with contextlib.suppress(OSError):  # its lines are of the ledger before
            (self.path / _CHANGES).unlink(missing_ok=True)

    def update(self, entry: LedgerEntry, **changes: Any) -> None:
        """Change what is kept of a point, and append that to the file if it makes a difference."""
        if all(getattr(entry, name) == value for name, value in changes.items()):
            return
        for name, value in changes.items():
            setattr(entry, name, value)
        if self.since is None:
            self.save()
            return
        line = json.dumps({"since": self.since, "number": entry.number, **changes}, allow_nan=False)
        with self._written(_CHANGES), open(self.path / _CHANGES, "ab", buffering=0) as f:
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
                text += f"; its runs are intact; to continue: {rundir.how_to_resume(self.path)}"
            raise OSError(text) from error

    def look(self, entry: LedgerEntry, alive: bool = False) -> str:
        """Return the state of a point after a look at the status of its run.

        `alive`: the run is known to be there, such as from a queue.
        """
        if entry.refused is not None:
            entry.state, entry.error = "infeasible", entry.refused
            return entry.state
        path, status = self.path / entry.folder, dict[str, Any]()
        with contextlib.suppress(OSError):  # the name may be too long
            status = rundir.read_status(path) if rundir.is_run(path) else {}
        state = status.get("state") if alive else state_now(path, status)
        # A run that has crashed was killed, or its host went down.
        entry.state = "preempted" if state == "crashed" else state if state in STATES else "queued"
        over = entry.state in ("finished", "failed", "preempted")
        error, code = status.get("error"), status.get("exit_code")
        entry.started = status.get("started") or entry.started
        entry.ended = status.get("ended") if over else None
        entry.exit_code = code
        entry.error = one_line(error) if error else None
        return entry.state


def config_identity(config: Mapping[str, Any]) -> str:
    """Return a hash, in hex digits, of what can change results in a plain config."""
    text = json.dumps(deciding_result(flatten(config)), sort_keys=True, default=str)
    return fileio.text_sha256(text)[:24]


def is_running(path: Path) -> bool:
    """Return whether another process runs the sweep: points that wait then are its own affair."""
    return rundir.is_locked(path, LOCK) and not rundir.holds(path, LOCK)


def is_sweep(path: Path) -> bool:
    return (path / LEDGER).is_file()


def read_ledger(path: Path) -> Ledger:
    """Return the ledger of a sweep's folder, with the states of its points.

    Raises ConfigError for one that is missing, damaged, or of a newer version.
    """
    where = path / LEDGER
    if not where.is_file():
        example = "one looks like outputs/default/2030-01-01_12-00-00"
        raise ConfigError("not_a_run", f"{path}: is not a sweep (it has no {LEDGER}); {example}")
    try:
        tree = fileio.read_json(where)
        if not isinstance(tree, dict):
            raise ConfigError("damaged_file", f"{where}: holds no ledger")
    except ConfigError as error:
        raise ConfigError(error.kind, f"{error}; give it another name, then {anew(path)}") from None
    fileio.check_format(where, tree.get("format"), FORMAT)
    ledger = _checked(Ledger, tree, f"{where}: ", path=path, points=[], looks=[], since=None)
    if not FOLDER_NAME.fullmatch(ledger.name):  # it goes into shell scripts
        raise refuse("damaged_file", f"{where}: name", ledger.name, "is not the name of a sweep")
    points: Any = tree.get("points")
    looks: Any = tree.get("looks") or []
    for key, given in {"points": points, "looks": looks}.items():
        if not isinstance(given, list):
            raise refuse("damaged_file", f"{where}: {key}", given, "a list is needed")
    _add_changes(tree, path)
    ledger.looks = [_checked(Look, given, f"{where}: looks[{i}].") for i, given in enumerate(looks)]
    ledger.points = [_entry(f"{where}: points[{i}]", given) for i, given in enumerate(points)]
    for key in ("number", "folder"):
        for value, count in Counter(getattr(point, key) for point in ledger.points).items():
            if count > 1:
                raise ConfigError("damaged_file", f"{where}: two runs have the {key} {value}")
    for entry in ledger.points:
        ledger.look(entry)
    return ledger


def _add_changes(tree: dict[str, Any], sweep: Path) -> None:
    """Add the changes since a ledger was written whole to its points.

    A line counts if it is whole and of this very ledger (`since`: when that was written).
    """
    try:
        with fileio.open_plain(sweep / _CHANGES) as file:
            lines = file.read(fileio.MOST_BYTES).split(b"\n")[:-1]
    except OSError:
        return
    points = [p for p in tree["points"] if isinstance(p, dict)]
    known = {p["number"]: p for p in points if type(p.get("number")) is int}
    for line in lines:
        with contextlib.suppress(ValueError, AttributeError, TypeError, KeyError):
            change = fileio.from_json(line.decode())
            if change.pop("since") == tree.get("updated"):
                known[change["number"]].update(change)


def rebuilt(path: Path, name: str, launcher: str, arguments: list[str]) -> Ledger:
    """Return the ledger of a sweep that has lost its own, from its runs. Raises ConfigError."""
    found = Ledger(path, name, str(path), launcher, arguments, [])
    for run in runs_in(path):
        number, _, name_of = run.name.partition("-")
        facts = rundir.read_run(run)
        overrides, swept = (facts.get(key) or [] for key in ("overrides", "swept"))
        label = facts.get("label") or name_of
        found.points.append(LedgerEntry(int(number), label, run.name, None, overrides))
        found.add_swept(swept)
        found.group = facts.get("group") or found.group
    if twice := [n for n, c in Counter(p.number for p in found.points).items() if c > 1]:
        text = f"two runs there have the number {twice[0]}; give one of them another"
        raise ConfigError("damaged_file", f"{path}: {text}")
    found.points.sort(key=lambda p: p.number)
    for entry in found.points:
        found.look(entry)
    return found


def steps_of(path: Path) -> int:
    """Return the planned steps of a run; 0 where its file is damaged."""
    with contextlib.suppress(ConfigError):
        return int(rundir.read_run(path).get("max_steps", 0))
    return 0


def runs_in(path: Path) -> list[Path]:
    """Return the folders of a sweep's runs: <number>-<label>."""
    if not path.is_dir():
        return []
    return [p for p in path.iterdir() if re.match(r"[0-9]+-", p.name) and rundir.is_run(p)]


def _entry(at: str, given: Any) -> LedgerEntry:
    """Return a point of a ledger that may have been edited by hand. Raises ConfigError."""
    entry = _checked(LedgerEntry, given, f"{at}.", keys=_KEPT)
    relative = Path(entry.folder)
    inside = relative.parts and not relative.is_absolute() and ".." not in relative.parts
    if not inside or "\0" in entry.folder:
        raise refuse(
            "damaged_file",
            f"{at}.folder",
            entry.folder,
            "must be a folder inside that of the sweep",
        )
    return entry


def _checked(
    cls: type[_T], given: Any, at: str, keys: Collection[str] | None = None, **own: Any
) -> _T:
    """Return the dataclass with the values of a file that are its fields, else their defaults.

    `keys`: the fields that a file may give; `own`: those that it may not. Raises ConfigError for a
    value of another type, and for a missing one.
    """
    fields = {f.name: f.default for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if isinstance(given, Mapping):
        known = {k: v for k, v in given.items() if k in (fields if keys is None else keys)}
        defaults = {k: v for k, v in fields.items() if v is not dataclasses.MISSING}
        given = defaults | known | own
    return convert_section(cls, given, at)
