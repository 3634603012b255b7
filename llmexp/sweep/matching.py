"""Find the points of a command that a sweep has already, and name the new ones."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmexp import rundir
from llmexp.child import REFUSED
from llmexp.compose.app import visible
from llmexp.config import ConfigError
from llmexp.sweep import ledger as ledgers
from llmexp.sweep.checker import Checker
from llmexp.sweep.ledger import Entry, Facts, Ledger
from llmexp.sweep.points import Point, label


@dataclass(frozen=True)
class Task:
    """A point with its place in the ledger."""

    point: Point
    entry: Entry

    @property
    def path(self) -> Path:
        return self.point.path

    @property
    def facts(self) -> Facts:
        return self.point.facts

    @property
    def cuda(self) -> bool:
        return self.facts.devices > 0


def match(ledger: Ledger, points: Sequence[Point]) -> list[Task]:
    """Return the points with their entries: those that they have already, known by the config as
    composed, or as solved in the run's folder; else new ones."""
    composed = {e.identity: e for e in ledger.points if e.identity is not None}
    infeasible = {tuple(e.overrides): e for e in ledger.points if e.state == "infeasible"}
    # some may be there in other words
    written_otherwise = not {point.identity for point in points} <= composed.keys()
    solved = by_folder(ledger) if written_otherwise else {}
    tasks = []
    for point in points:
        asked = visible(point.overrides)
        entry = composed.get(point.identity) or solved.get(point.facts.solved)
        entry = entry or infeasible.get(tuple(asked))
        if entry is None:
            point = told_apart(point, ledger)
            path = point.moved(ledger.next_number(), ledger.path).path
            entry = ledger.add(point.label, asked, str(path.relative_to(ledger.path)))
        entry.identity = point.identity
        if entry.state == "infeasible":
            entry.state, entry.error = "queued", None
        path = ledger.path / entry.folder
        placed = dataclasses.replace(point, number=entry.number, path=path, group=ledger.group)
        tasks.append(Task(placed, entry))
    return tasks


def by_folder(ledger: Ledger) -> dict[str, Entry]:
    """Return the points by the identity of the config in their runs' folders."""
    found = {}
    for entry in ledger.points:
        with contextlib.suppress(ConfigError):
            found[ledgers.identity(rundir.read_config(ledger.path / entry.folder))] = entry
    return found


def of_folder(checker: Checker, ledger: Ledger, entry: Entry) -> Task | None:
    """Return the point of an earlier command, from its run's folder; None for one that cannot run,
    which is recorded."""
    path = ledger.path / entry.folder
    try:
        config = rundir.built_config(path)
        point = Point(
            entry.number, entry.overrides, ledger.swept, None, config, entry.label, path,
            ledger.group,
        )  # fmt: skip
        able, refused = checker.check([point])
        if refused:
            raise ConfigError(refused[0].reason)
    except ConfigError as error:
        ledger.update(entry, state="failed", exit_code=REFUSED, error=ledgers.one_line(str(error)))
        return None
    return Task(able[0], entry)


def told_apart(point: Point, ledger: Ledger) -> Point:
    """Return the new point with a label by what sets it apart from all others of the sweep, not
    from those of its command."""
    swept = list(dict.fromkeys([*point.swept, *ledger.swept]))
    text = label(point.overrides, swept)
    if other := next((e for e in ledger.points if e.label == text), None):
        new = [o for o in visible(point.overrides) if o not in other.overrides]
        swept = list(dict.fromkeys([*swept, *(o.partition("=")[0] for o in new)]))
        text = label(point.overrides, swept)
    if any(e.label == text for e in ledger.points):  # of less than the other was given
        text = f"{text[:110]}-{ledger.next_number()}"
    if text == point.label:
        return point
    keys = {o.partition("=")[0] for o in point.overrides}
    return dataclasses.replace(point, label=text, swept=[key for key in swept if key in keys])
