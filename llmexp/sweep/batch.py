"""Check a batch of points, run them, and answer when all have ended."""

from __future__ import annotations

import os
from collections.abc import Sequence

from llmexp.compare import reading, table, throughput
from llmexp.compare.comparing import compare, findings
from llmexp.compose.app import refuse_hosts
from llmexp.compose.command_line import recordable
from llmexp.runs import ledger as ledgers
from llmexp.runs import rundir
from llmexp.runs.find import find
from llmexp.runs.ledger import Ledger, LedgerEntry
from llmexp.settings.convert import with_knobs
from llmexp.settings.labels import plural
from llmexp.settings.values import ConfigError, refuse, typed
from llmexp.sweep import show
from llmexp.sweep.current import Current
from llmexp.sweep.deciding import refuse_undecidable, run_looks
from llmexp.sweep.local import visible_devices
from llmexp.sweep.matching import (
    is_left,
    lengthened,
    match,
    of_folders,
    placed_point,
    startable,
)  # fmt: skip
from llmexp.sweep.points import Point, no_start, split_duplicates
from llmexp.sweep.running import run_points, run_rungs
from llmexp.sweep.show import name_of, warn_of_budgets
from llmexp.system.child import PASSED_ON, handling, say
from llmexp.system.text import aligned, columns, one_line
from llmexp.tracker.answer import deliver
from llmexp.tracker.sync import upload_command


def run_batch(current: Current, points: list[Point], refused: list[LedgerEntry]) -> list[Point]:
    """Check all points, then run those that are not finished; return them as the ledger has them.

    Raises ConfigError before anything is written.
    """
    able, refused = _checked(current, points, refused)
    if current.grid:
        placed = placed_grid(current, able, refused)
    else:
        placed = match(current.opened or open_ledger(current), able, {})
    ledger = current.ledger
    record_refused(ledger, refused, {point.entry.folder for point in placed})
    if current.grid and current.resumed:
        placed += others(current, {point.entry.folder for point in placed})
    ledger.add_swept(key for point in placed for key in point.swept)
    ledger.state = "running"
    ledger.save()
    once = list({point.entry.folder: point for point in placed}.values())
    if current.knobs.decide:
        run_looks(current, once)
    else:
        run_rungs(current, once)
    if current.grid:
        run_twins(current)
    return placed


def placed_grid(current: Current, able: list[Point], refused: list[LedgerEntry]) -> list[Point]:
    """Return the points of a grid with their entries in the ledger, which is opened.

    Raises ConfigError.
    """
    if current.knobs.decide:
        refuse_undecidable(current.knobs, current.seeds, able)
    if not current.resumed:
        warn_of_budgets([p.spent for p in able], current.knobs, current.arguments)
        if len(able) + len(refused) == 1:
            say("one point: no key has several values (train.seed=1,2 would make two)")
        return match(open_ledger(current), able, {})
    longer = lengthened(current, able)
    ledger = open_ledger(current)
    first = ledger.next_number()
    placed = match(ledger, able, longer)
    new = sum(point.entry.number >= first for point in placed) or "none"
    more = f", {len(longer)} with a longer budget" if longer else ""
    say(f"{plural(len(placed), 'point')}, {new} of them new{more}")
    return placed


def _checked(
    current: Current, points: list[Point], refused: list[LedgerEntry]
) -> tuple[list[Point], list[LedgerEntry]]:
    """Return the points that can run and those that are left out; a search may ask twice for one.

    Raises ConfigError where nothing may be left out, or nothing is left.
    """
    knobs = current.knobs
    if current.launcher != "slurm":
        for point in points:
            refuse_hosts(point.config, "for several use hydra/launcher=slurm")
    same, solved = list[LedgerEntry](), list[LedgerEntry]()
    if current.grid:
        points, same = split_duplicates(points)
    if same and knobs.on_infeasible == "refuse":
        raise no_start([*same, *refused])
    able, unable = current.checker.check(points)
    if current.launcher == "local":
        refuse_devices(current, able)
    if current.grid:
        able, solved = split_duplicates(able)
    refused = [*same, *solved, *refused, *unable]
    begun = not current.grid and current.opened  # a search that has results goes on
    if refused and not begun and (knobs.on_infeasible == "refuse" or not able):
        raise no_start(refused)
    return able, refused


def refuse_devices(current: Current, points: Sequence[Point]) -> None:
    """Raise ConfigError for more devices a point than this machine has."""
    wanted = current.knobs.devices_per_run or 0
    most = len(visible_devices(max((point.facts.devices for point in points), default=0)))
    if 0 < most < wanted:
        raise refuse("no_device", "sweep.devices_per_run", wanted, f"this host has {most}", most)


def record_refused(ledger: Ledger, refused: Sequence[LedgerEntry], taken: set[str]) -> None:
    """Record the points that are left out; `taken`: the folders of the others, and then of all."""
    for one in refused:
        asked = one.overrides
        there = (e for e in ledger.points if e.overrides == asked and e.folder not in taken)
        entry = next(there, None) or ledger.add(one.label, asked)
        taken.add(entry.folder)
        if entry.state != "finished":
            entry.refused = one_line(one.refused or "")
            ledger.look(entry)


def others(current: Current, asked: set[str]) -> list[Point]:
    """Return the points of earlier commands that are not finished, from their folders.

    Twins are left out: they are trained at the end.
    """
    ledger = current.ledger
    there = [e for e in ledger.points if not (e.is_twin or e.refused or e.folder in asked)]
    left = [e for e in there if is_left(ledger, e) and e.rung is None]
    return of_folders(current, left)


def open_ledger(current: Current) -> Ledger:
    """Make the sweep's folder with its ledger, or find it, and lock it. Raises ConfigError."""
    path, resumed = current.where, current.resumed
    if resumed and not os.access(path, os.W_OK | os.X_OK):
        way = "copy the sweep to one that can, with all its runs, and go on there"
        raise refuse(
            "disk", "sweep.resume", path, f"this folder cannot be written; {way}", "/tmp/sweep"
        )
    if not resumed:  # two of one second get two folders
        path = rundir.claim(path, current.fixed, "hydra.sweep.dir")
    current.stack.enter_context(rundir.locked(path, ledgers.LOCK, "running the sweep in"))
    arguments, name = recordable(current.arguments), str(current.cfg.name)
    if not ledgers.is_sweep(path) and resumed:
        ledger = ledgers.rebuilt(path, name, current.launcher, arguments)
        runs = plural(len(ledger.points), "run")
        say(f"{path / ledgers.LEDGER}: is not there and is written anew, from {runs}")
    elif resumed:
        ledger = ledgers.read_ledger(path)
        if ledger.grid != current.grid:
            kind, other = ("grid", "search") if ledger.grid else ("search", "grid")
            text = f"is a {kind}, which cannot go on as a {other}; leave sweep.resume out"
            raise refuse("other_run", "sweep.resume", path, text)
        ledger.launcher, ledger.arguments = current.launcher, arguments
    elif ledgers.is_sweep(path):
        again = typed("sweep.resume", path)
        raise ConfigError("exists", f"{path}: holds a sweep already; to go on with it: {again}")
    else:
        ledger = Ledger(path, name, str(path), current.launcher, arguments, [])
    given = any(o.lstrip("+").startswith("sweep.negligible=") for o in current.arguments)
    if given or ledger.negligible is None:  # else a sweep keeps what it began with
        ledger.negligible = current.knobs.negligible
    ledger.grid, ledger.screen = current.grid, current.knobs.screen is not None
    if (trials := current.knobs.search.trials) is not None:
        ledger.planned = trials + current.knobs.search.confirm * current.knobs.search.seeds
    current.opened = ledger
    # signals are noted; the launcher passes them on (`running.drive`)
    note = handling(PASSED_ON, lambda number, _: current.signals.append(number),
                    stay=lambda: current.stopped)  # fmt: skip
    current.stack.enter_context(note)
    # however the sweep ends, and while the lock is held
    current.stack.callback(conclude, current)
    return ledger


def conclude(current: Current) -> None:
    """End the ledger; print the answer, why points did not finish, and where everything is."""
    ledger = current.ledger
    states = {e.state for e in ledger.points if e.rung is None} - {"infeasible"}
    # else a signal came before a search, or the next look, could ask for more
    known = current.grid and not current.knobs.decide
    all_done = states <= {"finished"} and (known or not current.stopped)
    ledger.state = "finished" if all_done else "preempted" if current.stopped else "failed"
    ledger.save()
    say("")
    lines: list[str] = []
    try:
        lines = report_sweep(current)
    except Exception as error:  # the runs are recorded, so an error here is only printed
        # its repr may hold a page
        say(f"no comparison: {type(error).__name__}: {one_line(str(error))}")
    for line in lines or [show.results_table(ledger)]:
        say(line)
    for line in show.unfinished(ledger):
        say(line)
    if upload := upload_command(ledger.path):
        say(f"upload {upload}")
    say(f"folder {ledger.path}")


def report_sweep(current: Current) -> list[str]:
    """Compare the points that ran, write the page or the table of rates, and return the answer.

    It is empty where fewer than two ran or none finished.
    """
    ledger = current.ledger
    states = {e.folder: e.state for e in ledger.points if rundir.is_run(ledger.path / e.folder)}
    ran = [state for state in states.values() if state not in ("queued", "infeasible")]
    if len(ran) < 2 or "finished" not in ran:
        return []
    if current.knobs.report == "throughput":
        cells = throughput.write(reading.read(find([ledger.path])[0]), ledger.path)
        return [aligned(cells, left=2), f"table  {ledger.path / 'throughput.csv'}"]
    from llmexp.compare.page import mirrored, write_beside

    comparison = compare([ledger.path])
    written = write_beside(comparison, ledger.path)
    damage = [f"llmexp: {problem}" for problem in comparison.problems]
    lines = [*table.lines(comparison, columns()), *damage, f"page   {written}"]
    sent = deliver(ledger.path, lambda: mirrored(comparison), lambda: current.stopped)
    return [*lines, sent] if sent else lines


def leading(ledger: Ledger) -> LedgerEntry | None:
    """Return a finished point of the leading setting, as the answer at the end names it."""
    found = findings(reading.read(find([ledger.path])[0]))
    own = {ledger.path / e.folder: e for e in ledger.points if not e.is_twin}
    runs = (run.path for s in found.ranked for run in s.taking_part)
    return next((own[path] for path in runs if path in own), None)


def run_twins(current: Current) -> None:
    """Train twins of the leading point, and those of earlier commands that are not finished."""
    if current.over:
        return
    ledger = current.ledger
    # Twins that never began may be those of a setting that leads no more.
    never = [e for e in ledger.points if e.is_twin and not rundir.is_run(ledger.path / e.folder)]
    ledger.points = [e for e in ledger.points if e.state == "infeasible" or e not in never]
    lead, twins = leading(ledger) if current.knobs.twins else None, list[Point]()
    there = [e for e in ledger.points if e.is_twin]
    if lead is not None:
        twins = copies_of(ledger, lead, "twin", range(1, current.knobs.twins + 1))
        if new := sum(twin.entry not in there for twin in twins):
            name = name_of(lead, ledger.swept)
            other = ", where another setting led before," if there else ""
            say(f"{name}{other} leads; {plural(new, 'twin')} of it will show what rounding makes")
    run_copies(current, twins, [e for e in there if is_left(ledger, e)])


def run_copies(
    current: Current, copies: Sequence[Point], left: Sequence[LedgerEntry], why: str = ""
) -> None:
    """Train copies of points, and those that earlier commands have left; say `why` if any is."""
    ledger, asked = current.ledger, [copy.entry for copy in copies]
    points = startable(current, copies) + of_folders(current, [e for e in left if e not in asked])
    if all(ledger.look(point.entry) == "finished" for point in points):
        return
    if why:
        say(why)
    ledger.add_swept(key for copy in copies for key in copy.swept)
    ledger.save()
    run_points(current, points)


def copies_of(ledger: Ledger, lead: LedgerEntry, knob: str, values: Sequence[int]) -> list[Point]:
    """Return a finished point with other values of a knob of `train`, each in the ledger."""
    key, copies = f"train.{knob}", list[Point]()
    config = rundir.built_config(ledger.path / lead.folder)
    overrides = [o for o in lead.overrides if not o.startswith(f"{key}=")]
    there = {tuple(sorted(e.overrides)): e for e in ledger.points}
    for value in values:
        asked = [*overrides, f"{key}={value}"]
        entry = there.get(tuple(sorted(asked))) or ledger.add(f"{lead.label}+{knob}_{value}", asked)
        copy = with_knobs(config, train={knob: value, "stop_step": None})
        point = placed_point(ledger, entry, copy, key)
        entry.identity = point.identity
        copies.append(point)
    return copies
