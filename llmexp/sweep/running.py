"""Run points to their ends, or from rung to rung of successive halving; failed ones again.

They run where the launcher says: on this machine, as Slurm jobs, or as tasks of Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmexp.config.labels import plural
from llmexp.config.values import ConfigError
from llmexp.folders import rundir
from llmexp.folders.rows import read_rows
from llmexp.folders.steps import STEP_RECORD, steps_up_to
from llmexp.run.stages import recorded_stages, step_after
from llmexp.sweep import ray, show, slurm
from llmexp.sweep.current import Current, Submitted
from llmexp.sweep.local import Local
from llmexp.sweep.points import Point
from llmexp.sweep.section import Sweep
from llmexp.sweep.show import Display
from llmexp.sweep.table import is_longer, startable
from llmexp.system.child import REFUSED, say
from llmexp.system.text import number

LAUNCHERS: dict[str, Any] = {"local": Local, "slurm": slurm.Slurm, "ray": ray.Ray}


class Launcher(Protocol):
    """A place where points run: made with the sweep, its points and the display."""

    pause_s: float  # between two looks
    slots: int  # points that run at once, where that is known
    found: list[Submitted]  # of these points, that are at work there already

    def submit(self, waiting: list[Point], jobs: Sequence[Submitted]) -> list[Submitted]:
        """Start what there is room for beside the jobs, and take it from the list of points."""

    def look(self, jobs: Sequence[Submitted]) -> list[Submitted]:
        """Show and record what has changed; return the jobs that have ended."""

    def cancel(self, jobs: list[Submitted], signal: int | None) -> int:
        """Pass a signal on; without one, take back what has not begun.

        Return how many runs save a checkpoint first. Jobs that are not waited for leave the list.
        """


def drive(launcher: Launcher, waiting: list[Point], current: Current, display: Display) -> None:
    """Run the waiting points until all have ended.

    None starts after a signal, which is passed on, or after a failure that ends the sweep.
    """
    passed_on, cancelled, jobs = 0, False, launcher.found
    display.slots = launcher.slots
    while jobs or (waiting and not current.over):
        for signal in current.signals[passed_on:]:
            saving = launcher.cancel(jobs, signal)
            if saving and not passed_on:
                verb = "saves" if saving == 1 else "save"
                display.line(f"stopping: {saving} under way {verb} a checkpoint first")
            passed_on += 1
        if current.halted and not cancelled:
            cancelled = True
            launcher.cancel(jobs, None)
        while waiting and not current.over and (started := launcher.submit(waiting, jobs)):
            jobs += started
        for job in launcher.look(jobs):
            jobs.remove(job)
            current.ended(job.point.entry)
        display.tick()
        time.sleep(launcher.pause_s if jobs or (waiting and not current.over) else 0)


def score(path: Path, step: int) -> float:
    """Return the loss of a run at a step; inf for a run that did not come so far.

    It is of validation where the run is evaluated, per byte where that is known, for points of
    several tokenizers.
    """
    keys, losses = ("val/bits_per_byte", "val/loss"), steps_up_to(path, step)
    with contextlib.suppress(ConfigError):
        rows = [row for row in read_rows(path / rundir.METRICS) if any(key in row for key in keys)]
        known = [row.get(key) for row in rows for key in keys if row["step"] == step]
        if not rows and len(losses) == step * STEP_RECORD.size:
            known = [number(STEP_RECORD.unpack(losses[-STEP_RECORD.size :])[0])]
        return next((loss for loss in known if loss is not None), math.inf)
    return math.inf


def at_its_stop(point: Point) -> bool:
    """Return whether a run has been at the step where it has to stop, if there is one."""
    return point.stop is not None and score(point.path, point.stop) < math.inf


def run_points(current: Current, points: Sequence[Point]) -> None:
    """Run points to their ends, or from rung to rung of successive halving; failed ones again.

    Those that have been there before are passed over.
    """
    ledger = current.ledger
    left = [
        point
        for point in points
        if (ledger.look(point.entry) != "finished" or is_longer(point)) and not at_its_stop(point)
    ]
    for attempt in range(1 + current.knobs.max_retries):
        if not left or current.over:
            return
        if attempt:
            names = ", ".join(show.name_of(point.entry, ledger.swept) for point in left)
            say(f"{plural(len(left), 'run')} failed or crashed, started again: {names}")
        # jobs are reported with their ids
        display = show.Display(ledger, current.launcher != "slurm")
        launcher: Launcher = LAUNCHERS[current.launcher](current, left, display)
        there, since = {job.point.path for job in launcher.found}, time.monotonic()
        free = [p for p in left if p.path not in there and is_free(p, current, since)]
        queued = startable(current, free, "queue")
        for point in queued:
            ledger.look(point.entry)
        if current.over:
            return
        with display:
            drive(launcher, queued, current, display)
            display.tick()
        left = [
            point
            for point in left
            if (point.entry.state == "failed" and point.entry.exit_code != REFUSED)
            or (point.entry.state == "preempted" and not at_its_stop(point))
        ]


def is_free(point: Point, current: Current, since: float) -> bool:
    """Return whether nobody trains there; report it where somebody does.

    A run whose sweep was killed has time to save and leave, `since` this one began.
    """
    while not rundir.is_vacant(point.path, since) and not current.over:
        time.sleep(0.2)
    if not rundir.is_held(point.path):
        return True
    name = show.name_of(point.entry, current.ledger.swept)
    say(f"{name}  left alone: another process is training there")
    return False


def halving_rungs(knobs: Sweep) -> list[float]:
    """Return the shares of a run's steps, less than all, at which halving compares the points.

    Each rung has 1/halving_keep times the steps of the one before it (Jamieson & Talwalkar 2016).
    """
    shares, share = list[float](), knobs.halving or 1.0
    while share < 1:
        shares.append(share)
        share /= knobs.halving_keep
    return shares


def run_rungs(current: Current, racing: list[Point]) -> None:
    """Run the points to the end, or from rung to rung with the best of them."""
    for point in racing:
        # who goes on follows from the losses at the rungs, whatever was interrupted
        current.ledger.update(point.entry, rung=None)
    for share in halving_rungs(current.knobs):
        rung = [dataclasses.replace(p, stop=stop_of(p.facts.run, share)) for p in racing]
        run_points(current, rung)
        if current.over:
            return
        racing = best(current, racing, share)
    run_points(current, racing)


def stop_of(run: Mapping[str, Any], share: float) -> int:
    """Return the step at which a run, or a fork after its parent, has done a share of its steps.

    With a ramp that is a share of its sequences. `run`: as in its run.json.
    """
    if "stages" not in run:
        first = (run.get("parent") or {}).get("step") or 0
        return first + max(1, math.ceil(share * (run["max_steps"] - first)))
    stages = recorded_stages(run)
    first = stages[0].first_sequence
    return step_after(stages, first + math.ceil(share * (run["total_sequences"] - first)))


def best(current: Current, racing: list[Point], share: float) -> list[Point]:
    """Return the points that go on after a rung, those with the lowest losses.

    The others are out at this share of their steps. Those of a search are held against the trials
    that have been there before, too.
    """
    ledger = current.ledger
    scores = {p.entry.folder: score(p.path, stop_of(p.facts.run, share)) for p in racing}
    for e in () if current.grid else ledger.points:
        path = ledger.path / e.folder
        if e.folder not in scores and rundir.is_run(path) and not ledger.is_fresh(e):
            scores[e.folder] = score(path, stop_of(rundir.read_run(path), share))
    arrived = sorted((name for name in scores if scores[name] < math.inf), key=scores.__getitem__)
    kept = arrived[: max(1, math.ceil(len(arrived) * current.knobs.halving_keep))]
    for point in racing:
        out = point.entry.folder in arrived and point.entry.folder not in kept
        if out and point.entry.state != "finished":
            ledger.update(point.entry, rung=share)
    by_folder = {point.entry.folder: point for point in racing}
    return [by_folder[name] for name in kept if name in by_folder]
