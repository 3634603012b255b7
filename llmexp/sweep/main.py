"""A sweep from its points to its answer: ledger, what is left to do, rungs, the tables and the exit code.

points -> check them all -> ledger and run folders -> local | slurm | ray -> table, comparison, exit code
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from llmexp import folder
from llmexp.config import ConfigError, Sweep, build_sweep, refuse
from llmexp.guard import BY_HAND
from llmexp.process import PREEMPTED, REFUSED
from llmexp.sweep import ledger as ledgers
from llmexp.sweep.ledger import Entry, Ledger
from llmexp.sweep.local import Stopped, visible_devices
from llmexp.sweep.matching import Pair, match, next_number
from llmexp.sweep.points import (
    Checker,
    Point,
    Refused,
    as_given,
    expand,
    is_grid,
    load_points,
    no_start,
    refuse_hosts,
    twins,
)

LOCK = ".lock-sweep"
ORPHAN_S = 60.0  # that a run whose sweep was killed has to save and leave


@dataclass
class Current:
    """The sweep of this process."""

    settings: Sweep
    where: Path
    fixed: bool  # the user named the folder
    name: str
    launcher: str  # local | slurm | ray
    cfg: DictConfig
    arguments: list[str]
    checker: Checker
    stack: contextlib.ExitStack
    ledger: Ledger | None = None  # once the first points have passed their checks
    knobs: dict[str, dict[str, Any]] = field(default_factory=dict)  # what the checker knows of a run, by its folder
    stop: Stopped = field(default_factory=Stopped)
    halted: bool = False  # by sweep.stop_on_failure
    grid: bool = True  # all points are known beforehand

    @property
    def over(self) -> bool:
        """Whether nothing more is started."""
        return self.stop.requested or self.halted


class PointFailed(RuntimeError):
    """What a sweeper gets for the value of a point that failed."""


CURRENT: list[Current] = []  # one or none: Hydra makes the launchers, which get nothing else from here


def sweep(hydra: Hydra, cfg: DictConfig, overrides: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs a sweep, or goes on with one. `arguments`: the command line, for the way to go on.

    Exit code: 0; 1 if a point did not finish; 75 when a signal stopped it. Raises ConfigError.
    """
    from llmexp.launch import CONFIG_NAME, fixed_folder, quoted, refuse_secrets, say, user_errors
    from llmexp.sweep.launchers import check_launcher

    with contextlib.ExitStack() as stack:
        checker = stack.enter_context(Checker())
        settings, where = settings_of(cfg)
        refuse_secrets(list(arguments), "the command line")
        current = Current(
            settings, where, settings.resume is not None or fixed_folder(overrides, "hydra.sweep.dir"), str(cfg.name),
            check_launcher(cfg), cfg, recordable(arguments), checker, stack, grid=is_grid(cfg),
        )  # fmt: skip
        CURRENT[:] = [current]
        stack.callback(CURRENT.clear)
        if current.grid:
            points, refused = load_points(hydra.config_loader, cfg, expand(hydra, cfg, overrides), 0, settings, where)
            run_batch(current, points, refused)
        else:
            here = f"hydra.sweep.dir={quoted(str(where))}"  # what ${now:} says is said once
            try:
                with user_errors(hydra.config_loader, overrides), contextlib.suppress(KeyboardInterrupt):
                    hydra.multirun(
                        CONFIG_NAME,
                        task_function=lambda _: None,
                        overrides=[*overrides, here],
                        with_log_configuration=False,
                    )
            except PointFailed as failure:
                say(f"the sweeper gives up for a point that failed: {failure}")
            except ValueError:  # it finds no best one where none has come to its end
                if current.ledger is None or any(e.state == "finished" for e in current.ledger.points):
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
    """The section `sweep`, checked, and the sweep's folder. Raises ConfigError."""
    from llmexp.launch import chosen_folder, user_errors

    with user_errors():
        settings = build_sweep(OmegaConf.to_container(cfg.sweep, resolve=True, throw_on_missing=True))  # type: ignore
    if settings.halving_keep == 1 and settings.halving is not None:
        raise refuse("sweep.halving_keep", settings.halving_keep, "keeps all points at every rung", 0.5)
    if settings.resume is not None:
        where = Path(settings.resume)
        if not ledgers.is_sweep(where) and not ledgers.runs_in(where):
            text = f"is no sweep (it has no {ledgers.LEDGER}, and no runs)"
            raise refuse("sweep.resume", where, text, "outputs/default/2030-01-01_12-00-00")
        return settings, where
    where = chosen_folder(cfg, "hydra.sweep.dir")
    folder.check_writable(where, "hydra.sweep.dir")
    if ledgers.is_sweep(where):
        raise refuse("hydra.sweep.dir", where, f"holds a sweep already; to go on with it: sweep.resume={where}")
    return settings, where


# What runs code of the user's choosing comes from a command line, never from a file alone.
KEPT_BACK = tuple(f"hydra.launcher.{key}" for key in BY_HAND)


def recordable(arguments: Sequence[str]) -> list[str]:
    """Of a command line, what goes on with its sweep later, and may be taken from a file."""
    rest, given = [], iter(arguments)
    for argument in given:
        if argument == "--allow":
            next(given, None)
        elif not argument.lstrip("+~").startswith(("--allow=", "sweep.resume=", *KEPT_BACK)):
            rest.append(argument)
    return rest


def kept_back(arguments: Sequence[str]) -> str:
    """The rest of it, to be typed again."""
    allowed = ["--allow", os.environ["LLMEXP_ALLOW"]] if os.environ.get("LLMEXP_ALLOW") else []
    words = [*allowed, *(a for a in arguments if a.lstrip("+").startswith(KEPT_BACK))]
    return "".join(f" {shlex.quote(word)}" for word in words)


def launch(loader: Any, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
    """What our Hydra launchers do: the points of one batch of a sweeper that chooses them while it runs.

    The value of a point is its final validation loss. Raises KeyboardInterrupt when a signal stopped the sweep.
    """
    from llmexp.sweep import show

    (current,) = CURRENT
    given = list(current.cfg.hydra.overrides.task)
    asked = [as_given(overrides, given) for overrides in job_overrides]
    points, refused = load_points(loader, current.cfg, asked, first, current.settings, current.where, given)
    done = run_batch(current, points, refused, again=True)
    if current.over:
        raise KeyboardInterrupt
    results = []
    for overrides in asked:
        point, entry = next(((p, e) for p, e in done if p.overrides == list(overrides)), (None, None))
        result = JobReturn(overrides=overrides, cfg=point.cfg if point else None, status=JobStatus.COMPLETED)
        assert current.ledger is not None
        summary = show.summary_of(current.ledger.path / entry.folder) if entry else {}
        losses = ("final val/loss", "final train/loss", "latest train/loss")
        value = next((summary[key] for key in losses if ledgers.figure(summary.get(key)) is not None), None)
        if entry is None or entry.state != "finished" or value is None:
            result.status, value = JobStatus.FAILED, PointFailed(entry.error if entry else "this point cannot run")
        result.return_value = value
        results.append(result)
    return results


def run_batch(
    current: Current, points: list[Point], refused: list[Refused], *, again: bool = False
) -> list[tuple[Point, Entry]]:
    """Checks all points, then runs those that are not finished; the points with their entries in the ledger.

    `again`: a sweeper may ask twice for the same point. Raises ConfigError, before anything is written.
    """
    from llmexp.launch import visible

    if current.launcher != "slurm":
        for point in points:
            refuse_hosts(point.config, "for several use hydra/launcher=slurm")
    if not again and (same := twins(points, [p.identity for p in points])):
        raise no_start([*same, *refused])
    found = current.checker.ask("check", points)
    refused += [p.refused(f["refused"]) for p, f in zip(points, found, strict=True) if "refused" in f]
    feasible = [(p, f) for p, f in zip(points, found, strict=True) if "refused" not in f]
    if current.launcher == "local":
        most = len(visible_devices(max((f["devices"] for _, f in feasible), default=0)))
        if most and (current.settings.devices_per_run or 0) > most:
            raise refuse("sweep.devices_per_run", current.settings.devices_per_run, f"this host has {most}", most)
    if not again and (same := twins([p for p, _ in feasible], [f["solved"] for _, f in feasible])):
        raise no_start([*same, *refused])
    if refused and (current.settings.on_infeasible == "refuse" or not (feasible or again)):
        raise no_start(refused)
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
    return [(p, e) for p, e, _ in pairs]


def others(current: Current, ledger: Ledger, asked: set[str]) -> list[Pair]:
    """The points of earlier commands that are not finished, from their folders."""
    found = []
    for entry in ledger.points:
        path = ledger.path / entry.folder
        if entry.folder in asked or entry.state == "infeasible" or not folder.is_run(path):
            continue
        if ledger.look(entry).get("state") == "finished" or entry.rung is not None:
            continue
        try:
            config = folder.built_config(path)
            told = (entry.number, entry.overrides, ledger.swept, current.cfg, config, entry.label, path, ledger.group)
            point = Point(*told)
            (fact,) = current.checker.ask("check", [point])
            if "refused" in fact:
                raise ConfigError(fact["refused"])
            found.append((point, entry, fact))
        except ConfigError as error:
            ledger.update(entry, state="failed", exit_code=REFUSED, error=ledgers.one_line(str(error)))
    return found


def open_ledger(current: Current) -> Ledger:
    """The sweep's folder with its ledger, made now or found; locked until the sweep ends. Raises ConfigError."""
    from llmexp.launch import say

    resumed = current.settings.resume is not None
    if resumed and not os.access(current.where, os.W_OK | os.X_OK):
        text = "this folder cannot be written; copy the sweep to one that can, with all its runs, and go on there"
        raise refuse("sweep.resume", current.where, text, "/tmp/sweep")
    # Two of one second get two folders.
    path = current.where if resumed else folder.claim(current.where, current.fixed, "hydra.sweep.dir")
    current.stack.enter_context(folder.locked(path, LOCK, "running the sweep in"))
    if resumed:
        if ledgers.is_sweep(path):
            ledger = ledgers.read(path)
        else:
            ledger = ledgers.rebuilt(path, current.name, current.launcher, current.arguments)
            say(f"{path / ledgers.LEDGER}: is not there and is written anew, from {len(ledger.points)} runs")
        ledger.launcher, ledger.arguments = current.launcher, current.arguments
    elif ledgers.is_sweep(path):
        raise ConfigError(f"{path}: holds a sweep already; to go on with it: sweep.resume={path}")
    else:
        ledger = Ledger(path, current.name, str(path), current.launcher, current.arguments, [])
    current.ledger = ledger
    current.stack.enter_context(current.stop.installed())
    current.stack.callback(conclude, current, say)  # however the sweep ends, and while the lock is held
    return ledger


def rungs(settings: Sweep) -> list[float | None]:
    """Shares of a run's steps at which successive halving compares the points; None is all of them.

    Each rung has 1/halving_keep times the steps of the one before it (Jamieson & Talwalkar 2016).
    """
    shares: list[float | None] = []
    share = settings.halving
    while share is not None and share < 1:
        shares.append(share)
        share /= settings.halving_keep
    return [*shares, None]


def run_rungs(current: Current, ledger: Ledger, pairs: list[tuple[Point, Entry]]) -> None:
    """Runs the points to the end, or from rung to rung with the best of them."""
    for _, entry in pairs:
        entry.rung = None  # who goes on follows from the losses at the rungs, whatever was interrupted
    racing = pairs
    for share in rungs(current.settings):
        stops = {}
        for _, entry in racing:
            steps = current.knobs[entry.folder]["max_steps"]
            stops[entry.folder] = None if share is None else max(1, math.ceil(share * steps))
        run_points(current, ledger, [(p, e, stops[e.folder]) for p, e in racing])
        if current.over or share is None:
            return
        scores = {e.folder: score(ledger.path / e.folder, stops[e.folder]) for _, e in racing}
        ranked = sorted(
            (pair for pair in racing if scores[pair[1].folder] < math.inf), key=lambda r: scores[r[1].folder]
        )
        count = max(1, math.ceil(len(ranked) * current.settings.halving_keep))
        for _, entry in ranked[count:]:
            if entry.state != "finished":
                ledger.update(entry, rung=share)
        racing = ranked[:count]


def score(path: Path, step: int | None) -> float:
    """The loss of a run at a step, which says whether it goes on; inf for one that did not come so far."""
    with contextlib.suppress(ConfigError):
        for row in folder.read_rows(path / folder.METRICS):
            if row["step"] == step:
                loss = ledgers.figure(row.get("val/loss", row.get("train/loss")))
                return math.inf if loss is None else loss
    return math.inf


def reached(path: Path, step: int | None) -> bool:
    """Whether a run has been at the step where it has to stop; None: it has to go to its end."""
    return step is not None and score(path, step) < math.inf


def run_points(current: Current, ledger: Ledger, todo: list[tuple[Point, Entry, int | None]]) -> None:
    """Runs points up to a step (None: to the end), where they have not been there before; failed ones again."""
    from llmexp.launch import say

    left = []
    for point, entry, stop_step in todo:
        state = ledger.look(entry).get("state")
        if state != "finished" and not reached(ledger.path / entry.folder, stop_step):
            left.append((point, entry, stop_step))
    if 0 < len(left) < len(todo):
        say(f"{len(todo) - len(left)} of {len(todo)} points are there already")
    for attempt in range(1 + current.settings.max_retries):
        if not left or current.over:
            return
        if attempt:
            say(f"{len(left)} failed or broke off, started again: {', '.join(e.folder for _, e, _ in left)}")
        run_once(current, ledger, left)
        left = [
            (p, e, s) for p, e, s in left
            if (e.state == "failed" and e.exit_code != REFUSED)
            or (e.state == "preempted" and not reached(ledger.path / e.folder, s))
        ]  # fmt: skip


def run_once(current: Current, ledger: Ledger, todo: list[tuple[Point, Entry, int | None]]) -> None:
    """Queues the points' runs and waits until all have ended, or have been stopped."""
    from llmexp.launch import say
    from llmexp.sweep import launchers, show

    at_work = launchers.at_work(current, [p for p, _, _ in todo], say)  # jobs of an earlier command that are not over
    new, deadline = [], time.monotonic() + ORPHAN_S
    for point, entry, stop_step in todo:
        if point.path in at_work:
            continue
        if not is_free(point.path, current, deadline):
            say(f"{entry.folder}  left alone: another process is training there")
            continue
        config = dataclasses.replace(point.config, train=dataclasses.replace(point.config.train, stop_step=stop_step))
        new.append((dataclasses.replace(point, config=config), entry))
    queued = []
    for (point, entry), fact in zip(new, current.checker.ask("queue", [p for p, _ in new]), strict=True):
        if "refused" in fact:
            error = ledgers.one_line(fact["refused"])
            ledger.update(entry, state="failed", exit_code=REFUSED, error=error)
            say(f"{entry.folder}  not started: {error}")
        else:
            ledger.update(entry, state="queued", error=None, exit_code=None)
            queued.append((point, entry))
    if current.over:
        return
    with show.Display(ledger, lines=current.launcher != "slurm") as display:  # its jobs are told of with their ids
        launchers.execute(current, ledger, queued, at_work, display)
        display.tick()
    current.halted |= current.settings.stop_on_failure and any(e.state == "failed" for _, e, _ in todo)


def is_free(path: Path, current: Current, deadline: float) -> bool:
    """Whether nobody trains there. A run whose sweep was killed has until the deadline to save and leave."""
    while folder.is_held(path):
        if time.monotonic() > deadline or current.over:
            return False
        time.sleep(0.2)
    return True


def conclude(current: Current, say: Callable[[str], None]) -> None:
    """The end of the ledger, the table, what can be said from it, and the page. The runs are recorded: what goes wrong
    here is only said."""
    from llmexp.sweep import show
    from llmexp.sync import upload_command

    if (ledger := current.ledger) is None:
        return
    states = {e.state for e in ledger.points if e.rung is None} - {"infeasible"}
    all_done = states <= {"finished"} and (current.grid or not current.stop.requested)
    ledger.state = "finished" if all_done else "preempted" if current.stop.requested else "failed"
    ledger.save()
    say("")
    say(show.results_table(ledger))
    ran = [
        e for e in ledger.points if folder.is_run(ledger.path / e.folder) and e.state not in ("queued", "infeasible")
    ]
    if len(ran) > 1 and any(e.state == "finished" for e in ran):
        try:
            from llmexp.compare import reading, throughput
            from llmexp.compare.comparing import compare
            from llmexp.compare.page import page

            say("")
            if current.settings.report == "throughput":
                say(throughput.write(reading.read(reading.find([ledger.path])[0]), ledger.path))
                say(f"tables {ledger.path / 'throughput.md'}, .csv, .png")
            else:
                comparison = compare([ledger.path])
                for sentence in comparison.sentences:
                    say(show.fitted(sentence))
                folder.write_whole(ledger.path / "compare.html", page(comparison))
                say(f"page   {ledger.path / 'compare.html'}")
        except Exception as error:
            say(f"no comparison: {type(error).__name__}: {ledgers.one_line(str(error))}")  # its repr may hold a page
    if upload := upload_command(ledger.path):
        say(f"upload {upload}")
    say(f"folder {ledger.path}")
