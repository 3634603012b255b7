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

from omegaconf import DictConfig, OmegaConf

from llmexp.compose.environment import refuse_secrets
from llmexp.compose.errors import user_errors
from llmexp.run.stages import recorded_stages, stages_of, step_after
from llmexp.runs import rundir
from llmexp.runs.ledger import LedgerEntry
from llmexp.runs.rows import read_rows
from llmexp.settings.convert import ramp_sizes, with_knobs
from llmexp.settings.labels import plural
from llmexp.settings.values import ConfigError
from llmexp.sweep import ray, show, slurm
from llmexp.sweep.current import Current
from llmexp.sweep.local import Local
from llmexp.sweep.matching import Task, is_longer
from llmexp.sweep.points import Point
from llmexp.sweep.section import Sweep
from llmexp.sweep.show import Display
from llmexp.system.child import REFUSED, say
from llmexp.system.text import number

ORPHAN_S = 60.0  # that a run whose sweep was killed has to save and leave
PLUGINS = "hydra_plugins.llmexp."
NAMES = {"LocalLauncher": "local", "SlurmLauncher": "slurm", "RayLauncher": "ray"}
KNOBS: dict[str, Any] = {"slurm": slurm, "ray": ray}  # modules with `Knobs` and `check`


class Launcher(Protocol):
    """A place where points run."""

    pause_s: float  # between two looks

    def start(self, waiting: list[Task]) -> None:
        """Start what there is room for, and take it from the list."""

    def poll(self) -> bool:
        """Record what has changed; return whether anything is left to wait for."""

    def stop(self, number: int) -> int:
        """Pass a signal on; return how many runs are under way and save a checkpoint first."""

    def cancel_waiting(self) -> None:
        """Take back what has not begun."""


def check_launcher(cfg: DictConfig) -> str:
    """Return local, slurm or ray; its knobs are checked. Raises ConfigError."""
    target = str(cfg.hydra.launcher.get("_target_"))
    name = NAMES.get(target.removeprefix(PLUGINS))
    if name is None:
        text = f"does not run here; it is one of {', '.join(NAMES.values())}"
        raise ConfigError(f"hydra/launcher: {target} {text}")
    if name in KNOBS:
        launcher_knobs(name, cfg)
    return name


def launcher_knobs(name: str, cfg: DictConfig) -> Any:
    """Return the checked knobs of the launcher. Raises ConfigError."""
    launcher = cfg.hydra.launcher
    with user_errors():
        given = OmegaConf.masked_copy(launcher, [k for k in launcher if k != "_target_"])
        typed = OmegaConf.create({"hydra": {"launcher": OmegaConf.structured(KNOBS[name].Knobs)}})
        OmegaConf.set_readonly(typed.hydra.launcher, False)  # as the dataclass is frozen
        merged = OmegaConf.merge(typed, {"hydra": {"launcher": given}})
        knobs: Any = OmegaConf.to_object(merged.hydra.launcher)
    refuse_secrets(dataclasses.asdict(knobs), "hydra.launcher")  # the jobs' scripts are files
    KNOBS[name].check(knobs)
    return knobs


def run_tasks(
    current: Current, tasks: list[Task], at_work: list[slurm.Submitted], display: Display
) -> None:
    """Run tasks where the launcher says; wait for them and for jobs of an earlier command."""
    launcher: Launcher
    if current.launcher == "local":
        launcher = Local(current, tasks)
        display.slots(launcher.slots)
    elif current.launcher == "ray":
        launcher = ray.Ray(current, launcher_knobs("ray", current.cfg), tasks)
    else:
        knobs = launcher_knobs("slurm", current.cfg)
        launcher = slurm.Slurm(current, knobs, at_work, display.line)
    drive(launcher, list(tasks), current, display)


def drive(launcher: Launcher, waiting: list[Task], current: Current, display: Display) -> None:
    """Run the waiting tasks until all have ended.

    None starts after a signal, which is passed on, or after a failure that ends the sweep.
    """
    passed_on, cancelled, left = 0, False, True
    while left:
        for signal in current.signals[passed_on:]:
            saving = launcher.stop(signal)
            if saving and not passed_on:
                verb = "saves" if saving == 1 else "save"
                display.line(f"stopping: {saving} under way {verb} a checkpoint first")
            passed_on += 1
        if current.halted and not cancelled:
            cancelled = True
            launcher.cancel_waiting()
        if not current.over:
            launcher.start(waiting)
        left = launcher.poll() or bool(waiting and not current.over)
        display.tick()
        time.sleep(launcher.pause_s if left else 0)


def at_work(current: Current, tasks: Sequence[Task]) -> list[slurm.Submitted]:
    """Return jobs of an earlier command for these tasks that have not ended, in Slurm."""
    if current.launcher != "slurm":
        return []
    jobs = slurm.live_jobs(tasks)
    if jobs:
        verb = "is" if len(jobs) == 1 else "are"
        say(f"{plural(len(jobs), 'job')} submitted before {verb} still there")
    return jobs


def rungs(knobs: Sweep) -> list[float | None]:
    """Return the shares of a run's steps at which halving compares the points; None is all of them.

    Each rung has 1/halving_keep times the steps of the one before it (Jamieson & Talwalkar 2016).
    """
    shares: list[float | None] = []
    share = knobs.halving
    while share is not None and share < 1:
        shares.append(share)
        share /= knobs.halving_keep
    return [*shares, None]


def run_rungs(current: Current, tasks: list[Task], earlier: Sequence[LedgerEntry] = ()) -> None:
    """Run the points to the end, or from rung to rung with the best of them.

    `earlier`: points of a search that these are held against as well.
    """
    for task in tasks:
        # who goes on follows from the losses at the rungs, whatever was interrupted
        current.ledger.update(task.entry, rung=None)
    racing = tasks
    for share in rungs(current.knobs):
        if share is None:
            run_points(current, racing)
            return
        stops = {task.entry.folder: stop_of(task, share) for task in racing}
        run_points(current, racing, stops)
        if current.over:
            return
        racing = best(current, racing, stops, share, earlier)


def stop_of(task: Task, share: float) -> int:
    """Return the step at which a run, or a fork after its parent, has done a share of its steps.

    With a ramp that is a share of its sequences.
    """
    config, facts = task.point.config, task.facts
    batch, first = config.batch, config.fork.step or 0
    if batch.ramp is None:
        return step_at(share, first, facts.max_steps)
    begin = first, 0, facts.max_tokens - facts.own_tokens
    stages = stages_of(ramp_sizes(batch.ramp), batch.sequence_length, 1, begin)
    return step_after(stages, math.ceil(share * (facts.own_tokens // batch.sequence_length)))


def stop_in(path: Path, share: float) -> int:
    """Return the same step for a run in its folder."""
    facts = rundir.read_run(path)
    parent = facts.get("parent") or {}
    if "stages" not in facts:
        return step_at(share, parent.get("step") or 0, facts["max_steps"])
    stages = recorded_stages(facts)
    first = stages[0].first_sequence
    return step_after(stages, first + math.ceil(share * (facts["total_sequences"] - first)))


def step_at(share: float, first: int, last: int) -> int:
    return first + max(1, math.ceil(share * (last - first)))


def best(
    current: Current,
    racing: list[Task],
    stops: Mapping[str, int],
    share: float,
    earlier: Sequence[LedgerEntry] = (),
) -> list[Task]:
    """Return the points that go on after a rung, those with the lowest losses.

    The others are out at this share of their steps. `earlier`: points that have been there before.
    """
    where = current.ledger.path
    scores = {name: score(where / name, stop) for name, stop in stops.items()}
    for e in earlier:
        if e.folder not in scores and rundir.is_run(where / e.folder):
            scores[e.folder] = score(where / e.folder, stop_in(where / e.folder, share))
    arrived = sorted((name for name in scores if scores[name] < math.inf), key=scores.__getitem__)
    kept = arrived[: max(1, math.ceil(len(arrived) * current.knobs.halving_keep))]
    for task in racing:
        out = task.entry.folder in arrived and task.entry.folder not in kept
        if out and task.entry.state != "finished":
            current.ledger.update(task.entry, rung=share)
    by_folder = {task.entry.folder: task for task in racing}
    return [by_folder[name] for name in kept if name in by_folder]


def score(path: Path, step: int) -> float:
    """Return the loss of a run at a step; inf for a run that did not come so far.

    It is per byte where that is known, for points of several tokenizers.
    """
    with contextlib.suppress(ConfigError):
        for row in read_rows(path / rundir.METRICS):
            if row["step"] == step:
                keys = ("val/bits_per_byte", "val/loss", "train/loss")
                known = (number(row.get(key)) for key in keys)
                return next((loss for loss in known if loss is not None), math.inf)
    return math.inf


def at_its_stop(task: Task, stops: Mapping[str, int]) -> bool:
    """Return whether a run has been at the step where it has to stop, if there is one."""
    step = stops.get(task.entry.folder)
    return step is not None and score(task.path, step) < math.inf


def run_points(
    current: Current, tasks: Sequence[Task], stops: Mapping[str, int] | None = None
) -> None:
    """Run points to their ends, or to the steps in `stops`, by folder; failed ones again.

    Those that have been there before are passed over.
    """
    stops, ledger = stops or {}, current.ledger
    left = [
        task
        for task in tasks
        if (ledger.look(task.entry) != "finished" or is_longer(task.point))
        and not at_its_stop(task, stops)
    ]
    done = len(tasks) - len(left)
    if left and done:
        say(f"{done} of {len(tasks)} points {'is' if done == 1 else 'are'} there already")
    for attempt in range(1 + current.knobs.max_retries):
        if not left or current.over:
            return
        if attempt:
            names = ", ".join(show.name_of(task.entry, ledger.swept) for task in left)
            say(f"{plural(len(left), 'point')} failed or broke off, started again: {names}")
        run_once(current, left, stops)
        left = [task for task in left if goes_again(task, stops)]


def goes_again(task: Task, stops: Mapping[str, int]) -> bool:
    """Return whether a point that has ended is worth another attempt."""
    entry = task.entry
    if entry.state == "failed":
        return entry.exit_code != REFUSED
    return entry.state == "preempted" and not at_its_stop(task, stops)


def run_once(current: Current, tasks: Sequence[Task], stops: Mapping[str, int]) -> None:
    """Queue the points' runs and wait until all have ended, or have been stopped."""
    # jobs of an earlier command that are not over
    jobs = at_work(current, tasks)
    busy = {job.task.path for job in jobs}
    free, deadline = [], time.monotonic() + ORPHAN_S
    for task in tasks:
        if task.path in busy:
            continue
        if is_free(task.path, current, deadline):
            free.append(task)
        else:
            name = show.name_of(task.entry, current.ledger.swept)
            say(f"{name}  left alone: another process is training there")
    queued = queue(current, free, stops)
    if current.over:
        return
    # jobs are reported with their ids
    with show.Display(current.ledger, current.launcher != "slurm") as display:
        run_tasks(current, queued, jobs, display)
        display.tick()


def queue(current: Current, tasks: Sequence[Task], stops: Mapping[str, int]) -> list[Task]:
    """Make the folders of the points' runs; return the points where that succeeded."""
    ledger, queued, points = current.ledger, list[Task](), list[Point]()
    for task in tasks:
        stop = {"stop_step": stops.get(task.entry.folder)}
        config = with_knobs(task.point.config, train=stop)
        points.append(dataclasses.replace(task.point, config=config))
    for task, refused in zip(tasks, current.checker.queue(points), strict=True):
        if not refused:
            ledger.look(task.entry)
            queued.append(task)
            continue
        task.entry.not_started(refused)
        say(f"{show.name_of(task.entry, ledger.swept)}  not started: {task.entry.error}")
        current.halted |= current.knobs.stop_on_failure
    return queued


def is_free(path: Path, current: Current, deadline: float) -> bool:
    """Return whether nobody trains there.

    A run whose sweep was killed has until the deadline to save and leave.
    """
    while rundir.is_held(path):
        if time.monotonic() > deadline or current.over:
            return False
        time.sleep(0.2)
    return True
