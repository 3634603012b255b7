"""Which points of a command a sweep has already, and what the new ones are called."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from llmexp import rundir
from llmexp.child import REFUSED
from llmexp.compose.app import visible
from llmexp.config import ConfigError
from llmexp.sweep import ledger as ledgers
from llmexp.sweep.checker import Checker
from llmexp.sweep.ledger import Entry, Ledger
from llmexp.sweep.points import Point, label

Pair = tuple[
    Point, Entry, dict[str, Any]
]  # a point, its place in the ledger, what the checker knows of its run


def match(ledger: Ledger, points: Sequence[tuple[Point, dict[str, Any]]]) -> list[Pair]:
    """Return the points with their entries: those that they have already, known by the config as
    composed, or as solved in the run's folder; else new ones."""
    composed = {e.identity: e for e in ledger.points if e.identity is not None}
    infeasible = {tuple(e.overrides): e for e in ledger.points if e.state == "infeasible"}
    solved: dict[str, Entry] = {}
    if not {p.identity for p, _ in points} <= composed.keys():  # some may be there in other words
        for entry in ledger.points:
            with contextlib.suppress(ConfigError):
                solved[ledgers.identity(rundir.read_config(ledger.path / entry.folder))] = entry
    pairs = []
    for point, fact in points:
        asked = visible(point.overrides)
        found = (
            composed.get(point.identity)
            or solved.get(fact["solved"])
            or infeasible.get(tuple(asked))
        )
        if found is None:
            point = told_apart(point, ledger)
            moved = point.moved(next_number(ledger), ledger.path)
            found = Entry(
                moved.number, point.label, str(moved.path.relative_to(ledger.path)), None, asked
            )
            ledger.points.append(found)
        found.identity = point.identity
        if found.state == "infeasible":
            found.state, found.error = "queued", None
        path = ledger.path / found.folder
        pairs.append(
            (
                dataclasses.replace(point, number=found.number, path=path, group=ledger.group),
                found,
                fact,
            )
        )
    return pairs


def of_folder(checker: Checker, ledger: Ledger, entry: Entry) -> Pair | None:
    """Return the point of an earlier command, from its run's folder; None for one that cannot run,
    which is recorded."""
    path = ledger.path / entry.folder
    try:
        config = rundir.built_config(path)
        told = (
            entry.number,
            entry.overrides,
            ledger.swept,
            None,
            config,
            entry.label,
            path,
            ledger.group,
        )
        point = Point(*told)
        (fact,) = checker.ask("check", [point])
        if "refused" in fact:
            raise ConfigError(fact["refused"])
    except ConfigError as error:
        ledger.update(entry, state="failed", exit_code=REFUSED, error=ledgers.one_line(str(error)))
        return None
    return point, entry, fact


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
        text = f"{text[:110]}-{next_number(ledger)}"
    return (
        point if text == point.label else point.renamed(text, [k for k in swept if k in point.keys])
    )


def next_number(ledger: Ledger) -> int:
    return max((e.number for e in ledger.points), default=-1) + 1
