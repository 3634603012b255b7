"""Find the points of a command that a sweep has already, and name the new ones."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmexp.compose.app import visible
from llmexp.run.budget import keep_warmup
from llmexp.runs import ledger as ledgers
from llmexp.runs import rundir
from llmexp.runs.ledger import Entry, Facts, Ledger, steps_of
from llmexp.settings.config import Config
from llmexp.settings.convert import with_knobs
from llmexp.settings.values import ConfigError
from llmexp.sweep.checker import Checker
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


def entries_of(ledger: Ledger, points: Sequence[Point]) -> dict[str, Entry]:
    """Return the entries of points that the sweep has, by the identities of the points.

    A point is known by its config as composed, or by the solved one in a run's folder.
    """
    composed = {e.identity: e for e in ledger.points if e.identity is not None}
    # some may be there in other words
    written_otherwise = not {point.identity for point in points} <= composed.keys()
    solved = by_folder(ledger) if written_otherwise else {}
    found = ((p, composed.get(p.identity) or solved.get(p.facts.solved)) for p in points)
    return {point.identity: entry for point, entry in found if entry is not None}


def match(ledger: Ledger, points: Sequence[Point], longer: Mapping[str, str]) -> list[Task]:
    """Return the points with their entries: those that the sweep has, else new ones.

    `longer`: the folders of points that get another budget, by their identities.
    """
    known = entries_of(ledger, points)
    folders = {e.folder: e for e in ledger.points}
    infeasible = {tuple(e.overrides): e for e in ledger.points if e.state == "infeasible"}
    tasks = []
    for point in points:
        asked = visible(point.overrides)
        entry = known.get(point.identity) or infeasible.get(tuple(asked))
        if point.identity in longer:
            entry = folders[longer[point.identity]]
            entry.overrides = asked
        if entry is None:
            point = told_apart(point, ledger)
            path = point.moved(ledger.next_number(), ledger.path).path
            entry = ledger.add(point.label, asked, str(path.relative_to(ledger.path)))
        entry.identity = point.identity
        if entry.state == "infeasible":
            entry.refused = None
            ledger.look(entry)
        path = ledger.path / entry.folder
        placed = dataclasses.replace(point, number=entry.number, path=path, group=ledger.group)
        more = is_longer(placed)
        if entry.state != "finished" or more:
            placed = dataclasses.replace(placed, config=as_begun(placed, more))
        tasks.append(Task(placed, entry))
    return tasks


def is_longer(point: Point) -> bool:
    """Return whether a point has more steps than the run in its folder was planned with.

    Epochs are left out: there it may be the data that have grown.
    """
    more = 0 < steps_of(point.path) < point.facts.max_steps
    return more and point.config.train.max_epochs is None


def as_begun(point: Point, longer: bool) -> Config:
    """Return the config with the warm-up of the run in its folder.

    It was a share of the budget that the run began with, and stays what it was.
    """
    config = point.config
    if config.schedule.get("warmup_steps", 0) is not None or not rundir.is_run(point.path):
        return config
    there = rundir.read_config(point.path).get("schedule")
    if not longer and (not isinstance(there, dict) or there.get("warmup_steps") is None):
        return config
    schedule = dict(config.schedule)
    keep_warmup(schedule, rundir.read_run(point.path).get("warmup_updates"))
    return with_knobs(config, schedule=schedule)


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
        entry.not_started(str(error))
        return None
    return Task(able[0], entry)


def told_apart(point: Point, ledger: Ledger) -> Point:
    """Return a new point with a label by what sets it apart from all others of the sweep."""
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
