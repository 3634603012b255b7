"""Train points again: the leading setting, different in rounding only, to measure that noise."""

from __future__ import annotations

from collections.abc import Sequence

from llmexp.compare import reading
from llmexp.compare.comparing import findings
from llmexp.runs import rundir
from llmexp.runs.find import find
from llmexp.runs.ledger import Ledger, LedgerEntry
from llmexp.settings.convert import with_knobs
from llmexp.settings.labels import plural
from llmexp.sweep.current import Current
from llmexp.sweep.matching import Task, is_left, of_folders
from llmexp.sweep.points import Point
from llmexp.sweep.running import run_points
from llmexp.sweep.show import name_of
from llmexp.system.child import say


def leading(ledger: Ledger) -> LedgerEntry | None:
    """Return a finished point of the leading setting, as the answer at the end names it."""
    found = findings(reading.read(find([ledger.path])[0]), negligible=ledger.negligible)
    own = {ledger.path / e.folder: e for e in ledger.points if not e.is_twin}
    runs = (run.path for rival in found.ranked for run in rival.entry.taking_part)
    return next((own[path] for path in runs if path in own), None)


def run_twins(current: Current) -> None:
    """Train twins of the leading point, and those of earlier commands that are not finished."""
    if current.over:
        return
    ledger = current.ledger
    # Twins that never began may be those of a setting that leads no more.
    never = [e for e in ledger.points if e.is_twin and not rundir.is_run(ledger.path / e.folder)]
    ledger.points = [e for e in ledger.points if e.state == "infeasible" or e not in never]
    lead = leading(ledger) if current.settings.twins else None
    tasks = [] if lead is None else twins_of(current, lead)
    asked = {task.entry.folder for task in tasks}
    there = [e for e in ledger.points if e.is_twin and e.folder not in asked]
    tasks += of_folders(current.checker, ledger, [e for e in there if is_left(ledger, e)])
    if all(ledger.look(task.entry) == "finished" for task in tasks):
        return
    ledger.add_swept(["train.twin"])
    ledger.save()
    run_points(current, tasks)


def twins_of(current: Current, lead: LedgerEntry) -> list[Task]:
    """Return the twins of a finished point; those that the ledger does not have get new entries."""
    ledger, count = current.ledger, current.settings.twins
    there = [e.folder for e in ledger.points if e.is_twin]
    tasks = copies_of(current, lead, "twin", range(1, count + 1))
    if new := sum(task.entry.folder not in there for task in tasks):
        name = name_of(lead, ledger.swept)
        other = ", where another setting led before," if there else ""
        say(f"{name}{other} leads; {plural(new, 'twin')} of it will show what rounding makes")
    return tasks


def copies_of(current: Current, lead: LedgerEntry, knob: str, values: Sequence[int]) -> list[Task]:
    """Return a finished point with other values of a knob of `train`, each in the ledger."""
    ledger, key = current.ledger, f"train.{knob}"
    config = rundir.built_config(ledger.path / lead.folder)
    overrides = [o for o in lead.overrides if not o.startswith(f"{key}=")]
    swept = list(dict.fromkeys([*ledger.swept, key]))
    there = {tuple(sorted(e.overrides)): e for e in ledger.points}
    entries, points = {}, []
    for value in values:
        asked = [*overrides, f"{key}={value}"]
        entry = there.get(tuple(sorted(asked))) or ledger.add(f"{lead.label}+{knob}_{value}", asked)
        copy = with_knobs(config, train={knob: value, "stop_step": None})
        path = ledger.path / entry.folder
        point = Point(entry.number, asked, swept, None, copy, entry.label, path, ledger.group)
        entry.identity = point.identity
        points.append(point)
        entries[point.number] = entry
    able, refused = current.checker.check(points)
    for one in refused:
        entries[one.number].not_started(one.reason)
    ledger.save()
    return [Task(point, entries[point.number]) for point in able]
