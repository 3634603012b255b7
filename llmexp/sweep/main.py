"""A sweep from its points to its answer: ledger, what is left to do, rungs, the tables and the exit
code.

points -> check them all -> ledger and run folders -> local | slurm | ray -> table, comparison, exit
code
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from omegaconf import DictConfig, OmegaConf

from llmexp import rundir
from llmexp.child import PREEMPTED, say
from llmexp.compare import reading, table, throughput
from llmexp.compare.budgets import Spent
from llmexp.compare.comparing import compare
from llmexp.compare.table import columns
from llmexp.compose.app import chosen_folder, fixed_folder, quoted, refuse_hosts, visible
from llmexp.compose.command_line import kept_back, recordable
from llmexp.compose.environment import refuse_secrets
from llmexp.compose.errors import user_errors
from llmexp.compose.origin import CONFIG_NAME
from llmexp.config import ConfigError, refuse
from llmexp.labels import plural
from llmexp.sweep import ledger as ledgers
from llmexp.sweep import show
from llmexp.sweep.budget_warning import warn
from llmexp.sweep.checker import Checker
from llmexp.sweep.current import CURRENT, Current, PointFailed
from llmexp.sweep.launchers import check_launcher
from llmexp.sweep.ledger import Entry, Ledger
from llmexp.sweep.local import visible_devices
from llmexp.sweep.matching import Pair, match, next_number, of_folder
from llmexp.sweep.points import Point, Refused, duplicates, expand, is_grid, load_points, no_start
from llmexp.sweep.running import run_rungs
from llmexp.sweep.settings import Sweep, build_sweep
from llmexp.sweep.twins import is_twin, run_twins
from llmexp.tracker.sync import upload_command

LOCK = ".lock-sweep"


def sweep(hydra: Hydra, cfg: DictConfig, overrides: Sequence[str], arguments: Sequence[str]) -> int:
    """Run a sweep, or goes on with one. `arguments`: the command line, for the way to go on.

    Exit code: 0; 1 if a point did not finish; 75 when a signal stopped it. Raises ConfigError.
    """
    with contextlib.ExitStack() as stack:
        checker = stack.enter_context(Checker())
        settings, where = settings_of(cfg)
        refuse_secrets(list(arguments), "the command line")
        current = Current(
            settings, where, settings.resume is not None or fixed_folder(overrides,
            "hydra.sweep.dir"), str(cfg.name),
            check_launcher(cfg), cfg, list(arguments), checker, stack, grid=is_grid(cfg),
        )  # fmt: skip
        CURRENT[:] = [current]
        stack.callback(CURRENT.clear)
        if settings.twins and not current.grid:
            sweeper = str(cfg.hydra.sweeper.get("_target_")).rpartition(".")[2]
            text = (
                f"needs a grid; {sweeper} chooses its points while it runs. Train twins of its "
                "best point afterwards"
            )
            raise refuse(
                "sweep.twins",
                settings.twins,
                text,
                "0 and, with that point's values, -m train.twin=0,1",
            )
        if current.grid:
            points, refused = load_points(
                hydra.config_loader, cfg, expand(hydra, cfg, overrides), 0, settings, where
            )
            run_batch(current, points, refused)
        else:
            if not sys.stderr.isatty():
                # for the log of Optuna, which is coloured in files too
                os.environ.setdefault("NO_COLOR", "1")
            here = f"hydra.sweep.dir={quoted(str(where))}"  # what ${now:} says is said once
            try:
                with (
                    user_errors(hydra.config_loader, overrides),
                    contextlib.suppress(KeyboardInterrupt),
                ):
                    hydra.multirun(
                        CONFIG_NAME,
                        task_function=lambda _: None,
                        overrides=[*overrides, here],
                        with_log_configuration=False,
                    )
            except PointFailed as failure:
                say(f"the sweeper gives up for a point that failed: {failure}")
            except ValueError:  # it finds no best one where none has come to its end
                if current.ledger is None or any(
                    e.state == "finished" for e in current.ledger.points
                ):
                    raise
        if current.ledger is None:
            raise ConfigError("hydra/sweeper: it asked for no point")
    again = f"to go on: llmexp resume {shlex.quote(str(current.ledger.path))}{kept_back(arguments)}"
    if current.ledger.state == "finished":
        return 0
    if current.stop.requested:
        say(f"stopped; {again}")
        return PREEMPTED
    say(f"not all finished; {again}")
    return 1


def settings_of(cfg: DictConfig) -> tuple[Sweep, Path]:
    """Return the section `sweep`, checked, and the sweep's folder. Raises ConfigError."""
    with user_errors():
        section: Any = OmegaConf.to_container(cfg.sweep, resolve=True, throw_on_missing=True)
        settings = build_sweep(section)
    if settings.halving is None and settings.halving_keep != 0.5 and settings.resume is None:
        text = (
            "does nothing without sweep.halving, the share of its steps that each point gets at "
            "first"
        )
        raise refuse("sweep.halving_keep", settings.halving_keep, text, "0.25 sweep.halving=0.125")
    if settings.twins and settings.report == "throughput":
        raise refuse(
            "sweep.twins",
            settings.twins,
            "measures losses, which sweep.report=throughput does not compare",
            0,
        )
    if settings.halving_keep == 1 and settings.halving is not None:
        raise refuse(
            "sweep.halving_keep", settings.halving_keep, "keeps all points at every rung", 0.5
        )
    if settings.resume is not None:
        where = Path(settings.resume)
        if not ledgers.is_sweep(where) and not ledgers.runs_in(where):
            text = f"is no sweep (it has no {ledgers.LEDGER}, and no runs)"
            raise refuse("sweep.resume", where, text, "outputs/default/2030-01-01_12-00-00")
        return settings, where
    where = chosen_folder(cfg, "hydra.sweep.dir")
    rundir.check_writable(where, "hydra.sweep.dir")
    if ledgers.is_sweep(where):
        raise refuse(
            "hydra.sweep.dir",
            where,
            f"holds a sweep already; to go on with it: sweep.resume={where}",
        )
    return settings, where


def run_batch(
    current: Current, points: list[Point], refused: list[Refused], *, again: bool = False
) -> list[tuple[Point, Entry]]:
    """Check all points, then run those that are not finished; the points with their entries in the
    ledger.

    `again`: a sweeper may ask twice for the same point. Raises ConfigError, before anything is
    written.
    """
    if current.launcher != "slurm":
        for point in points:
            refuse_hosts(point.config, "for several use hydra/launcher=slurm")
    if not again and (same := duplicates(points, [p.identity for p in points])):
        raise no_start([*same, *refused])
    found = current.checker.ask("check", points)
    refused += [
        p.refused(f["refused"]) for p, f in zip(points, found, strict=True) if "refused" in f
    ]
    feasible = [(p, f) for p, f in zip(points, found, strict=True) if "refused" not in f]
    if current.launcher == "local":
        most = len(visible_devices(max((f["devices"] for _, f in feasible), default=0)))
        if most and (current.settings.devices_per_run or 0) > most:
            raise refuse(
                "sweep.devices_per_run",
                current.settings.devices_per_run,
                f"this host has {most}",
                most,
            )
    if not again and (
        same := duplicates([p for p, _ in feasible], [f["solved"] for _, f in feasible])
    ):
        raise no_start([*same, *refused])
    if refused and (current.settings.on_infeasible == "refuse" or not (feasible or again)):
        raise no_start(refused)
    if current.grid and current.settings.resume is None:
        spent = [Spent(p.values, f["max_tokens"], f["max_steps"]) for p, f in feasible]
        warn(spent, current.settings, current.arguments)
    ledger = current.ledger or open_ledger(current)
    pairs = match(ledger, feasible)
    for one in refused:
        asked = visible(one.overrides)
        entry = next((e for e in ledger.points if e.overrides == asked), None)
        if entry is None:
            number = next_number(ledger)
            entry = Entry(number, one.label, f"{number}-{one.label}", None, asked)
            ledger.points.append(entry)
        if entry.state != "finished":
            entry.state, entry.error = "infeasible", ledgers.one_line(one.reason)
    if current.settings.resume is not None and not again:
        pairs += others(current, ledger, {e.folder for _, e, _ in pairs})
    current.knobs |= {entry.folder: fact for _, entry, fact in pairs}
    ledger.swept = sorted({*ledger.swept, *(key for p, _, _ in pairs for key in p.swept)})
    ledger.state = "running"
    ledger.save()
    run_rungs(current, ledger, list({e.folder: (p, e) for p, e, _ in pairs}.values()))
    if current.grid:
        run_twins(current, ledger)
    return [(p, e) for p, e, _ in pairs]


def others(current: Current, ledger: Ledger, asked: set[str]) -> list[Pair]:
    """Return the points of earlier commands that are not finished, from their folders. Twins have
    their time at the end."""
    found = []
    for entry in ledger.points:
        if entry.folder in asked or entry.state == "infeasible" or is_twin(entry):
            continue
        if not rundir.is_run(ledger.path / entry.folder):
            continue
        if ledger.look(entry).get("state") == "finished" or entry.rung is not None:
            continue
        if pair := of_folder(current.checker, ledger, entry):
            found.append(pair)
    return found


def open_ledger(current: Current) -> Ledger:
    """Return the sweep's folder with its ledger, made now or found; locked until the sweep ends.
    Raises ConfigError."""
    resumed = current.settings.resume is not None
    if resumed and not os.access(current.where, os.W_OK | os.X_OK):
        text = (
            "this folder cannot be written; copy the sweep to one that can, with all its runs, "
            "and go on there"
        )
        raise refuse("sweep.resume", current.where, text, "/tmp/sweep")
    if resumed:
        rundir.check_plain(current.where)
    # Two of one second get two folders.
    path = (
        current.where if resumed else rundir.claim(current.where, current.fixed, "hydra.sweep.dir")
    )
    current.stack.enter_context(rundir.locked(path, LOCK, "running the sweep in"))
    if resumed:
        if ledgers.is_sweep(path):
            ledger = ledgers.read(path)
        else:
            ledger = ledgers.rebuilt(
                path, current.name, current.launcher, recordable(current.arguments)
            )
            runs = plural(len(ledger.points), "run")
            say(f"{path / ledgers.LEDGER}: is not there and is written anew, from {runs}")
        ledger.launcher, ledger.arguments = current.launcher, recordable(current.arguments)
    elif ledgers.is_sweep(path):
        raise ConfigError(f"{path}: holds a sweep already; to go on with it: sweep.resume={path}")
    else:
        ledger = Ledger(
            path, current.name, str(path), current.launcher, recordable(current.arguments), []
        )
    given = any(o.lstrip("+").startswith("sweep.negligible=") for o in current.arguments)
    if given or ledger.negligible is None:  # else a sweep keeps what it began with
        ledger.negligible = current.settings.negligible
    current.ledger = ledger
    current.stack.enter_context(current.stop.installed())
    # however the sweep ends, and while the lock is held
    current.stack.callback(conclude, current, say)
    return ledger


def conclude(current: Current, say: Callable[[str], None]) -> None:
    """End the ledger; print the answer of the comparison, or a table where there is nothing to
    compare, why points did not finish, and where everything is."""
    if (ledger := current.ledger) is None:
        return
    states = {e.state for e in ledger.points if e.rung is None} - {"infeasible"}
    all_done = states <= {"finished"} and (current.grid or not current.stop.requested)
    ledger.state = "finished" if all_done else "preempted" if current.stop.requested else "failed"
    ledger.save()
    say("")
    lines: list[str] = []
    try:
        lines = report(current, ledger)
    except Exception as error:  # the runs are recorded, so what goes wrong here is only told
        # its repr may hold a page
        say(f"no comparison: {type(error).__name__}: {ledgers.one_line(str(error))}")
    for line in lines or [show.results_table(ledger)]:
        say(line)
    for line in show.unfinished(ledger, current.reasons):
        say(line)
    if upload := upload_command(ledger.path):
        say(f"upload {upload}")
    say(f"folder {ledger.path}")


def report(current: Current, ledger: Ledger) -> list[str]:
    """Compare the points that ran, write the page or the tables of rates, and return what to print;
    nothing where fewer than two ran or none finished."""
    ran = [
        e
        for e in ledger.points
        if e.state not in ("queued", "infeasible") and rundir.is_run(ledger.path / e.folder)
    ]
    if len(ran) < 2 or not any(e.state == "finished" for e in ran):
        return []
    from llmexp.compare.page import write_beside

    if current.settings.report == "throughput":
        text = throughput.write(reading.read(reading.find([ledger.path])[0]), ledger.path)
        return [text, f"tables {ledger.path / 'throughput.md'}, .csv, .png"]
    comparison = compare([ledger.path], negligible=ledger.negligible)
    written = write_beside(comparison, ledger.path)
    damage = [f"llmexp: {problem}" for problem in comparison.problems]
    return [*table.lines(comparison, columns()), *damage, f"page   {written}"]
