"""Runs the points of a sweep: each to its end, or from rung to rung of successive halving; failed
ones again."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from pathlib import Path

from llmexp import rundir
from llmexp.child import REFUSED, say
from llmexp.config import ConfigError
from llmexp.labels import plural
from llmexp.sweep import launchers, show
from llmexp.sweep import ledger as ledgers
from llmexp.sweep.current import Current
from llmexp.sweep.ledger import Entry, Ledger
from llmexp.sweep.points import Point
from llmexp.sweep.settings import Sweep

ORPHAN_S = 60.0  # that a run whose sweep was killed has to save and leave


def rungs(settings: Sweep) -> list[float | None]:
    """Share of a run's steps at which successive halving compares the points; None is all of them.

    Each rung has 1/halving_keep times the steps of the one before it (Jamieson & Talwalkar 2016).
    """
    shares: list[float | None] = []
    share = settings.halving
    while share is not None and share < 1:
        shares.append(share)
        share /= settings.halving_keep
    return [*shares, None]


def run_rungs(current: Current, ledger: Ledger, pairs: list[tuple[Point, Entry]]) -> None:
    """Run the points to the end, or from rung to rung with the best of them."""
    for _, entry in pairs:
        # who goes on follows from the losses at the rungs, whatever was interrupted
        entry.rung = None
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
            (pair for pair in racing if scores[pair[1].folder] < math.inf),
            key=lambda r: scores[r[1].folder],
        )
        count = max(1, math.ceil(len(ranked) * current.settings.halving_keep))
        for _, entry in ranked[count:]:
            if entry.state != "finished":
                ledger.update(entry, rung=share)
        racing = ranked[:count]


def score(path: Path, step: int | None) -> float:
    """Return the loss of a run at a step, which says whether it goes on; inf for one that did not
    come so far."""
    with contextlib.suppress(ConfigError):
        for row in rundir.read_rows(path / rundir.METRICS):
            if row["step"] == step:
                loss = ledgers.figure(row.get("val/loss", row.get("train/loss")))
                return math.inf if loss is None else loss
    return math.inf


def reached(path: Path, step: int | None) -> bool:
    """Return whether a run has been at the step where it has to stop; None: it has to go to its
    end."""
    return step is not None and score(path, step) < math.inf


def run_points(
    current: Current, ledger: Ledger, todo: list[tuple[Point, Entry, int | None]]
) -> None:
    """Run points up to a step (None: to the end), where they have not been there before; failed
    ones again."""
    left = []
    for point, entry, stop_step in todo:
        state = ledger.look(entry).get("state")
        if state != "finished" and not reached(ledger.path / entry.folder, stop_step):
            left.append((point, entry, stop_step))
    if 0 < len(left) < len(todo):
        done = len(todo) - len(left)
        say(f"{done} of {len(todo)} points {'is' if done == 1 else 'are'} there already")
    for attempt in range(1 + current.settings.max_retries):
        if not left or current.over:
            return
        if attempt:
            names = ", ".join(show.name_of(e, ledger.swept) for _, e, _ in left)
            say(f"{plural(len(left), 'point')} failed or broke off, started again: {names}")
        run_once(current, ledger, left)
        left = [
            (p, e, s) for p, e, s in left
            if (e.state == "failed" and e.exit_code != REFUSED)
            or (e.state == "preempted" and not reached(ledger.path / e.folder, s))
        ]  # fmt: skip


def run_once(current: Current, ledger: Ledger, todo: list[tuple[Point, Entry, int | None]]) -> None:
    """Queue the points' runs and wait until all have ended, or have been stopped."""
    # jobs of an earlier command that are not over
    at_work = launchers.at_work(current, [p for p, _, _ in todo], say)
    new, deadline = [], time.monotonic() + ORPHAN_S
    for point, entry, stop_step in todo:
        if point.path in at_work:
            continue
        if not is_free(point.path, current, deadline):
            say(
                f"{show.name_of(entry, ledger.swept)}  left alone: another process is training "
                "there"
            )
            continue
        config = dataclasses.replace(
            point.config, train=dataclasses.replace(point.config.train, stop_step=stop_step)
        )
        new.append((dataclasses.replace(point, config=config), entry))
    queued = []
    for (point, entry), fact in zip(
        new, current.checker.ask("queue", [p for p, _ in new]), strict=True
    ):
        if "refused" in fact:
            error = ledgers.one_line(fact["refused"])
            ledger.update(entry, state="failed", exit_code=REFUSED, error=error)
            say(f"{show.name_of(entry, ledger.swept)}  not started: {error}")
            current.reasons.add(entry.folder)
        else:
            ledger.update(entry, state="queued", error=None, exit_code=None)
            queued.append((point, entry))
    if current.over:
        return
    # jobs are told of with their ids
    with show.Display(ledger, current.launcher != "slurm", current.reasons) as display:
        launchers.execute(current, ledger, queued, at_work, display)
        display.tick()
    current.halted |= current.settings.stop_on_failure and any(
        e.state == "failed" for _, e, _ in todo
    )


def is_free(path: Path, current: Current, deadline: float) -> bool:
    """Return whether nobody trains there. A run whose sweep was killed has until the deadline to
    save and leave."""
    while rundir.is_held(path):
        if time.monotonic() > deadline or current.over:
            return False
        time.sleep(0.2)
    return True
