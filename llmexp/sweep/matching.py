"""Find points that a sweep has already, name new ones, and lengthen all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmexp.compose.app import typed_config
from llmexp.run.budget import BUDGETS, keep_warmup
from llmexp.runs import ledger as ledgers
from llmexp.runs import rundir
from llmexp.runs.ledger import Ledger, LedgerEntry, steps_of
from llmexp.settings.config import Config, plain
from llmexp.settings.convert import with_knobs
from llmexp.settings.knobs import deciding_result
from llmexp.settings.labels import short_value
from llmexp.settings.values import ConfigError, flatten, refuse
from llmexp.sweep.current import Current
from llmexp.sweep.points import Point, no_start, point_label, with_devices
from llmexp.sweep.section import Sweep


def entries_of(ledger: Ledger, points: Sequence[Point]) -> dict[str, LedgerEntry]:
    """Return the entries of points that the sweep has, by the identities of the points.

    A point is known by its config as composed, or by the solved one in a run's folder.
    """
    composed = {e.identity: e for e in ledger.points if e.identity is not None}
    # some may be there in other words
    written_otherwise = not {point.identity for point in points} <= composed.keys()
    solved = by_folder(ledger) if written_otherwise else {}
    found = ((p, composed.get(p.identity) or solved.get(p.facts.solved)) for p in points)
    return {point.identity: entry for point, entry in found if entry is not None}


def match(ledger: Ledger, points: Sequence[Point], longer: Mapping[str, str]) -> list[Point]:
    """Return the points with the entries that the sweep has of them, else with new ones.

    `longer`: the folders of points that get another budget, by their identities.
    """
    known = entries_of(ledger, points)
    folders = {e.folder: e for e in ledger.points}
    infeasible = {tuple(e.overrides): e for e in ledger.points if e.state == "infeasible"}
    placed = []
    for point in points:
        asked = point.entry.overrides
        entry = known.get(point.identity) or infeasible.get(tuple(asked))
        if point.identity in longer:
            entry = folders[longer[point.identity]]
            entry.overrides = asked
        if entry is None:
            point = told_apart(point, ledger).moved(ledger.next_number(), ledger.path)
            entry = point.entry
            ledger.points.append(entry)
        entry.identity = point.identity
        if entry.state == "infeasible":
            entry.refused = None
            ledger.look(entry)
        point = dataclasses.replace(point, entry=entry, where=ledger.path, group=ledger.group)
        more = is_longer(point)
        if entry.state != "finished" or more:
            point = dataclasses.replace(point, config=as_begun(point, more))
        placed.append(point)
    return placed


def is_longer(point: Point) -> bool:
    """Return whether a point has more steps than the run in its folder was planned with.

    Epochs are left out: there it may be the data that have grown.
    """
    more = 0 < steps_of(point.path) < point.facts.run["max_steps"]
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


def by_folder(ledger: Ledger) -> dict[str, LedgerEntry]:
    """Return the points by the identity of the config in their runs' folders."""
    found = {}
    for entry in ledger.points:
        with contextlib.suppress(ConfigError):
            found[ledgers.config_identity(rundir.read_config(ledger.path / entry.folder))] = entry
    return found


def is_left(ledger: Ledger, entry: LedgerEntry) -> bool:
    """Return whether a point has a run that is not finished."""
    return rundir.is_run(ledger.path / entry.folder) and ledger.look(entry) != "finished"


def of_folders(current: Current, entries: Sequence[LedgerEntry]) -> list[Point]:
    """Return points of earlier commands, from their runs' folders; those that cannot run failed."""
    points = []
    for entry in entries:
        try:
            config = rundir.built_config(current.ledger.path / entry.folder)
        except ConfigError as error:
            entry.not_started(str(error))
            continue
        points.append(placed_point(current.ledger, entry, config))
    return startable(current, points)


def placed_point(ledger: Ledger, entry: LedgerEntry, config: Config, *swept: str) -> Point:
    """Return the point of an entry in the ledger, with its config and further swept keys."""
    keys = list(dict.fromkeys([*ledger.swept, *swept]))
    return Point(entry, ledger.path, entry.overrides, keys, config, group=ledger.group)


def startable(current: Current, points: Sequence[Point]) -> list[Point]:
    """Return those of the points of the ledger that can run; the others failed."""
    able, refused = current.checker.check(points)
    entries = {point.entry.number: point.entry for point in points}
    for one in refused:
        entries[one.number].not_started(one.refused or "")
    return able


def told_apart(point: Point, ledger: Ledger) -> Point:
    """Return a new point with a label by what sets it apart from all others of the sweep."""
    swept = list(dict.fromkeys([*point.swept, *ledger.swept]))
    text = point_label(point.overrides, swept)
    if other := next((e for e in ledger.points if e.label == text), None):
        new = [o for o in point.entry.overrides if o not in other.overrides]
        swept = list(dict.fromkeys([*swept, *(o.partition("=")[0] for o in new)]))
        text = point_label(point.overrides, swept)
    if any(e.label == text for e in ledger.points):  # of less than the other was given
        text = f"{text[:110]}-{ledger.next_number()}"
    if text == point.entry.label:
        return point
    keys = {o.partition("=")[0] for o in point.overrides}
    entry = dataclasses.replace(point.entry, label=text)
    return dataclasses.replace(point, entry=entry, swept=[key for key in swept if key in keys])


def lengthened(current: Current, points: Sequence[Point]) -> dict[str, str]:
    """Return the folders of the points that become longer, by the identities of the points.

    Raises ConfigError where one cannot, and for another value of any other key that all points of
    the sweep share: new points come from values of swept keys.
    """
    if not ledgers.is_sweep(current.where):
        return {}
    ledger = ledgers.read_ledger(current.where)
    known = entries_of(ledger, points)
    new = [point for point in points if point.identity not in known]
    there = composed_points(ledger, new, current.knobs)
    found: dict[str, str] = {}
    asked: list[Point] = []
    for point in new:
        swept = {key.lstrip("+") for key in (*point.swept, *ledger.swept)}
        whole = flat_of(point.config)
        same = (e for e, flat in there if without_budget(flat) == without_budget(whole))
        entry = None if swept & set(BUDGETS) else next(same, None)
        if entry is None:
            refuse_shared(ledger, whole, [flat for _, flat in there], swept)
        else:
            found[point.identity] = entry.folder
            placed = dataclasses.replace(point, entry=entry, where=ledger.path)
            asked.append(dataclasses.replace(placed, config=as_begun(placed, longer=True)))
    if asked and current.knobs.halving is not None:
        text = "decides by shares of the old budget; to train all points on"
        raise refuse("conflict", "sweep.halving", current.knobs.halving, text, "null")
    _, refused = current.checker.check(asked, "lengthen")
    if refused:
        raise no_start(refused)
    return found


def composed_points(
    ledger: Ledger, new: Sequence[Point], knobs: Sweep
) -> list[tuple[LedgerEntry, dict[str, Any]]]:
    """Return the points of the ledger that still compose, each with its flat config."""
    found = []
    if new and (compose := new[0].composer) is not None:
        for entry in ledger.points:
            if entry.state != "infeasible" and not entry.is_twin:
                with contextlib.suppress(Exception):  # files that it needs may be gone
                    config = typed_config(compose(entry.overrides, entry.label))
                    found.append((entry, flat_of(with_devices(config, knobs))))
    return found


def flat_of(config: Config) -> dict[str, Any]:
    return deciding_result(flatten(plain(config)))


def without_budget(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat.items() if key not in BUDGETS}


def refuse_shared(
    ledger: Ledger,
    flat: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    swept: set[str],
) -> None:
    """Raise ConfigError where a point has another value of a key that all others share."""
    if not others or "experiment" in swept:
        return
    for key, value in flat.items():
        section, values = key.partition(".")[0], {repr(other.get(key)) for other in others}
        if key in swept or section in swept or key in BUDGETS or len(values) > 1:
            continue
        if repr(value) in values:
            continue
        old = others[0].get(key)
        way = "new points come from keys with several values, others from a sweep of their own"
        if key.endswith("._target_"):
            raise ConfigError(
                "other_run", f"{section}: all points of {ledger.path} share another one; {way}"
            )
        text = f"all points of {ledger.path} have {short_value(old)}; {way}"
        both = f"{short_value(old)},{short_value(value)}"
        raise refuse(
            "other_run", key, value, text, both if re.fullmatch(r"[\w.,+-]+", both) else None
        )
