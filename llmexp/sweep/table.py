"""The table of a sweep's runs: compose and check what is asked for, match it with what is there.

A policy (a grid, seeds until decided, a search, twins) asks for runs by their overrides, or for
copies of one; `place_points` gives each the entry that the ledger has of it, or a new one, and
lengthens those that get a longer budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmexp.compose.app import refuse_hosts, typed_config
from llmexp.compose.command_line import recordable
from llmexp.compose.overrides import key_of
from llmexp.config.convert import with_knobs
from llmexp.config.knobs import deciding_result
from llmexp.config.labels import plural, short_value
from llmexp.config.sections import Config, plain
from llmexp.config.values import ConfigError, flatten, refuse, typed
from llmexp.folders import ledger as ledgers
from llmexp.folders import rundir
from llmexp.folders.ledger import Ledger, LedgerEntry, steps_of
from llmexp.run.budget import BUDGETS, keep_warmup
from llmexp.sweep.answer import conclude
from llmexp.sweep.current import Current
from llmexp.sweep.local import visible_devices
from llmexp.sweep.points import (
    Point,
    load_points,
    no_start,
    point_label,
    split_duplicates,
    with_devices,
)
from llmexp.sweep.show import name_of
from llmexp.system.child import PASSED_ON, handling, say
from llmexp.system.text import one_line


def open_ledger(current: Current) -> None:
    """Make the sweep's folder with its ledger, or find it, and lock it. Raises ConfigError."""
    path, resumed = current.where, current.resumed
    if resumed and not os.access(path, os.W_OK | os.X_OK):
        text = "this folder cannot be written; copy the sweep to one that can, with all its runs, "
        text += "and continue there"
        raise refuse("disk", "sweep.resume", path, text, "/tmp/sweep")
    if not resumed:  # two of one second get two folders
        path = rundir.claim(path, current.fixed, "hydra.sweep.dir")
    current.stack.enter_context(rundir.locked(path, ledgers.LOCK, "running the sweep in"))
    arguments, there = recordable(current.arguments), ledgers.is_sweep(path)
    if there and not resumed:
        again = typed("sweep.resume", path)
        raise ConfigError("exists", f"{path}: holds a sweep already; to continue it: {again}")
    if there:
        ledger = ledgers.read_ledger(path)
    else:
        ledger = ledgers.rebuilt(path, str(current.cfg.name), current.launcher, arguments)
        ledger.grid = current.grid
        if resumed:
            runs = plural(len(ledger.points), "run")
            say(f"{path / ledgers.LEDGER}: is missing and is rebuilt from {runs}")
    if ledger.grid != current.grid:
        kind, other = ("grid", "search") if ledger.grid else ("search", "grid")
        text = f"is a {kind}, which cannot continue as a {other}; leave sweep.resume out"
        raise refuse("other_run", "sweep.resume", path, text)
    ledger.launcher, ledger.arguments = current.launcher, arguments
    given = any(o.lstrip("+").startswith("sweep.min_effect=") for o in current.arguments)
    if given or ledger.min_effect is None:  # else a sweep keeps what it began with
        ledger.min_effect = current.knobs.min_effect
    ledger.screen = current.knobs.screen is not None
    if (trials := current.knobs.search.trials) is not None:
        ledger.planned = trials + current.knobs.search.rerun_top * current.knobs.search.seeds
    current.opened = ledger


def begin_sweep(current: Current) -> None:
    """Begin, once, what may be written: from here on signals are noted, and there is an answer."""
    if current.begun:
        return
    if current.opened is None:
        open_ledger(current)
    current.begun = True
    # the launcher passes signals on (`running.drive`)
    note = handling(PASSED_ON, lambda number, _: current.signals.append(number),
                    stay=lambda: current.stopped)  # fmt: skip
    current.stack.enter_context(note)
    # however the sweep ends, and while the lock is held
    current.stack.callback(conclude, current)


def checked(
    current: Current, texts: Sequence[Sequence[str]], first: int = 0, swept: Sequence[str] = ()
) -> tuple[list[Point], list[LedgerEntry]]:
    """Return the points of these overrides that can run, and those that are left out.

    `first`: the number of the first one, if all are new; `swept`: the keys that differ between the
    points of the sweep. Before the sweep has begun, raise ConfigError where nothing may be left
    out, or nothing is left.
    """
    strict = current.knobs.on_infeasible == "refuse" and not current.begun
    points, refused = load_points(
        current.composer, texts, first, current.knobs, current.where, swept
    )
    if current.launcher != "slurm":
        for point in points:
            refuse_hosts(point.config, "for several use hydra/launcher=slurm")
    # a search may ask twice for one
    points, same = split_duplicates(points) if current.grid else (points, [])
    if same and strict:
        raise no_start([*same, *refused])
    able, unable = current.checker.check(points)
    wanted = current.knobs.devices_per_run or 0
    most = len(visible_devices(max((point.facts.devices for point in able), default=0)))
    if current.launcher == "local" and 0 < most < wanted:
        raise refuse("no_device", "sweep.devices_per_run", wanted, f"this host has {most}", most)
    able, solved = split_duplicates(able) if current.grid else (able, [])
    refused = [*same, *solved, *refused, *unable]
    if refused and (strict or not (able or current.begun)):
        raise no_start(refused)
    return able, refused


def place_points(
    current: Current, points: Sequence[Point], refused: Sequence[LedgerEntry] = ()
) -> list[Point]:
    """Return the points as the ledger has them, each once, and record those that are left out.

    Raises ConfigError before anything is written.
    """
    known = entries_of(current.ledger, points) if current.opened else {}
    if current.opened and current.grid and not current.begun:
        known |= lengthened(current, [p for p in points if p.identity not in known])
    begin_sweep(current)
    ledger, placed = current.ledger, dict[str, Point]()
    for point in points:
        entry = known.get(point.identity)
        if entry is None:
            point = told_apart(point, ledger)
            entry = point.entry
            ledger.points.append(entry)
        entry.identity = point.identity
        if entry.state == "infeasible":
            entry.refused = None
            ledger.look(entry)
        point = dataclasses.replace(point, entry=entry, where=ledger.path, group=ledger.group)
        if (grown := is_longer(point)) or entry.state != "finished":
            point = dataclasses.replace(point, config=as_begun(point, grown))
        placed[entry.folder] = point
    taken = {*placed}
    left_out = {
        e.folder: _with_any_budget(e, ledger) for e in ledger.points if e.state == "infeasible"
    }
    for one in refused:
        wanted = _with_any_budget(one, ledger)
        free = (e for e in ledger.points if e.folder not in taken)
        there = (
            e for e in free if e.overrides == one.overrides or left_out.get(e.folder) == wanted
        )
        entry = next(there, None) or ledger.add(one.label, one.overrides)
        entry.overrides = one.overrides
        taken.add(entry.folder)
        if entry.state != "finished":
            entry.refused = one_line(one.refused or "")
            ledger.look(entry)
    ledger.add_swept(key for point in placed.values() for key in point.swept)
    ledger.state = "running"
    ledger.save()
    return list(placed.values())


def entries_of(ledger: Ledger, points: Sequence[Point]) -> dict[str, LedgerEntry]:
    """Return the entries of points that the sweep has, by the identities of the points.

    A point is known by its config as composed, or by the solved one in a run's folder; one that
    could not run by its overrides.
    """
    known, solved = {e.identity: e for e in ledger.points}, dict[str, LedgerEntry]()
    if any(point.identity not in known for point in points):  # some may be there in other words
        for e in ledger.points:
            with contextlib.suppress(ConfigError):
                solved[ledgers.config_identity(rundir.read_config(ledger.path / e.folder))] = e
    infeasible = {_with_any_budget(e, ledger): e for e in ledger.points if e.state == "infeasible"}
    found = dict[str, LedgerEntry]()
    for point in points:
        entry = known.get(point.identity) or solved.get(point.solved)
        if entry := entry or infeasible.get(_with_any_budget(point.entry, ledger)):
            found[point.identity] = entry
    return found


def _with_any_budget(entry: LedgerEntry, ledger: Ledger) -> str:
    """Return what a point's overrides have in common with those of the point made longer."""
    budgets = {*BUDGETS} - {*ledger.swept}
    return str([text for text in entry.overrides if key_of(text) not in budgets])


def told_apart(point: Point, ledger: Ledger) -> Point:
    """Return a new point with a number and a label of its own, by all keys that are swept."""
    number, keys = ledger.next_number(), {o.partition("=")[0] for o in point.overrides}
    swept = [key for key in dict.fromkeys([*point.swept, *ledger.swept]) if key in keys]
    text = point_label(point.overrides, swept)
    if any(e.label == text for e in ledger.points):  # it differs in a key that is not swept
        text = f"{text[:110]}-{number}"
    if text != point.entry.label:
        entry = dataclasses.replace(point.entry, label=text)
        point = dataclasses.replace(point, entry=entry, swept=swept)
    return point.moved(number, ledger.path)


def is_longer(point: Point) -> bool:
    """Return whether a point has more steps than the run in its folder was planned with.

    Of as many epochs as before it has not: there it is the data that have grown.
    """
    if point.checked is None or not 0 < steps_of(point.path) < point.facts.run["max_steps"]:
        return False
    epochs = point.config.train.max_epochs
    return epochs is None or epochs > (rundir.built_config(point.path).train.max_epochs or epochs)


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


def lengthened(current: Current, new: Sequence[Point]) -> dict[str, LedgerEntry]:
    """Return the entries of the points that become longer, by the identities of the points.

    Raises ConfigError where one cannot, and for another value of any other key that all points of
    the sweep share: new points come from values of swept keys.
    """
    ledger, there = current.ledger, list[tuple[LedgerEntry, dict[str, Any]]]()
    for e in ledger.points if new else ():
        if e.state != "infeasible" and not e.is_twin:
            with contextlib.suppress(Exception):  # files that it needs may be gone
                config = typed_config(current.composer(e.overrides, e.label))
                there.append((e, without_budget(with_devices(config, current.knobs))))
    found, asked = dict[str, LedgerEntry](), list[Point]()
    for point in new:
        swept = {key.lstrip("+") for key in (*point.swept, *ledger.swept)}
        rest = without_budget(point.config)
        same = (e for e, flat in there if flat == rest)
        entry = None if swept & set(BUDGETS) else next(same, None)
        if entry is None:
            refuse_shared(ledger, rest, [flat for _, flat in there], swept)
        else:
            found[point.identity] = entry
            placed = dataclasses.replace(point, entry=entry, where=ledger.path)
            asked.append(dataclasses.replace(placed, config=as_begun(placed, longer=True)))
    if asked and current.knobs.halving is not None:
        text = "selected runs at shares of the old budget; to train all runs further"
        raise refuse("conflict", "sweep.halving", current.knobs.halving, text, "null")
    _, refused = current.checker.check(asked, "lengthen")
    if refused:
        raise no_start(refused)
    for point in new:
        if point.identity in found:
            found[point.identity].overrides = point.entry.overrides
    return found


def without_budget(config: Config) -> dict[str, Any]:
    """Return what decides the result of a run, but for its budget."""
    flat = deciding_result(flatten(plain(config)))
    return {key: value for key, value in flat.items() if key not in BUDGETS}


def refuse_shared(
    ledger: Ledger, flat: Mapping[str, Any], others: Sequence[Mapping[str, Any]], swept: set[str]
) -> None:
    """Raise ConfigError where a point has another value of a key that all others share."""
    if not others or "experiment" in swept:
        return
    for key, value in flat.items():
        section, values = key.partition(".")[0], {repr(other.get(key)) for other in others}
        if {key, section} & swept or len(values) > 1 or repr(value) in values:
            continue
        old = others[0].get(key)
        way = "new runs come from keys with several values, others from a sweep of their own"
        if key.endswith("._target_"):
            text = f"{section}: all runs of {ledger.path} share another one; {way}"
            raise ConfigError("other_run", text)
        text = f"all runs of {ledger.path} have {short_value(old)}; {way}"
        both = re.fullmatch(r"[\w.,+-]+", f"{short_value(old)},{short_value(value)}")
        raise refuse("other_run", key, value, text, both and both[0])


def copies_of(current: Current, lead: LedgerEntry, knob: str, values: Iterable[int]) -> list[Point]:
    """Return a finished point with other values of a knob of `train`, as the ledger has them."""
    ledger, key = current.ledger, f"train.{knob}"
    config = rundir.built_config(ledger.path / lead.folder)
    rest = [o for o in lead.overrides if not o.startswith(f"{key}=")]
    swept, copies = [*dict.fromkeys([*ledger.swept, key])], []
    for value in values:
        entry = LedgerEntry(0, "", "", None, [*rest, f"{key}={value}"])
        copy = with_knobs(config, train={knob: value, "stop_step": None})
        copies.append(Point(entry, ledger.path, entry.overrides, swept, copy))
    return place_points(current, copies)


def left_of(current: Current, entries: Iterable[LedgerEntry]) -> list[Point]:
    """Return points of earlier commands that are not finished, from their runs' folders."""
    ledger, points = current.ledger, []
    for entry in entries:
        path = ledger.path / entry.folder
        if not rundir.is_run(path) or ledger.look(entry) == "finished":
            continue
        try:
            config = rundir.built_config(path)
        except ConfigError as error:
            entry.not_started(str(error))
            continue
        of = entry, ledger.path, entry.overrides, ledger.swept, config
        points.append(Point(*of, group=ledger.group))
    return startable(current, points)


def startable(current: Current, points: Sequence[Point], purpose: str = "check") -> list[Point]:
    """Return those of the points of the ledger that can run; the others failed."""
    able, refused = current.checker.check(points, purpose)
    entries = {point.entry.number: point.entry for point in points}
    for one in refused:
        entry = entries[one.number]
        entry.not_started(one.refused or "")
        say(f"{name_of(entry, current.ledger.swept)}  not started: {entry.error}")
        current.halted |= current.knobs.stop_on_failure
    return able
