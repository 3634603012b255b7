"""Run points on this machine: a process tree each, as many at once as there are devices for."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from llmexp.config.values import ConfigError
from llmexp.folders import rundir
from llmexp.folders.ending import Left, conclude_run, how_it_left, record_end
from llmexp.sweep.current import Current, Submitted
from llmexp.sweep.points import Point
from llmexp.system.child import DONE, PREEMPTED, REFUSED, kill_family, pass_on
from llmexp.system.fileio import last_line
from llmexp.system.workers import start_worker, why_fresh

_LOOK_S = 1.0  # between looks for a sign of life
# in the run folder: what its processes printed; the console's rows are in train.log
STDERR = "stderr.log"
# what a run that lives writes to
_SIGNS = (rundir.METRICS, rundir.STATUS, rundir.LOG, STDERR, rundir.CHECKPOINTS, "logs")


class Local:
    """Run each point as soon as its devices are free; on a CPU, sweep.max_parallel at once."""

    pause_s = 0.1

    def __init__(self, current: Current, points: Sequence[Point], display: object = None) -> None:
        self._current, self._knobs = current, current.knobs
        self._free = visible_devices(max((p.facts.devices for p in points), default=0))
        self._most = self._knobs.max_parallel or len(self._free) or 1
        self.slots = self._knobs.at_once(len(self._free), [self._need(p) for p in points])
        self.found: list[Submitted] = []

    def _need(self, point: Point) -> int:
        return self._knobs.devices_of(point.facts.ranks, point.facts.devices)

    def submit(self, waiting: list[Point], jobs: Sequence[Submitted]) -> list[Submitted]:
        """Start a point, the first one that waits."""
        if len(jobs) >= self._most or (need := self._need(waiting[0])) > len(self._free):
            return []
        point, devices, self._free = waiting.pop(0), self._free[:need], self._free[need:]
        self._current.began(point.entry)
        env = dict(os.environ)
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        elif self._most > 1:
            share = len(os.sched_getaffinity(0)) // self._most // point.facts.ranks
            env.setdefault("OMP_NUM_THREADS", str(max(1, share)))
        try:  # a worker, which starts its own ranks
            process = start_worker(str(point.path), log=point.path / STDERR, env=env)
        except (ConfigError, OSError) as error:  # something is in the place of its files
            record_end(point.path, "failed", REFUSED, str(error))
            self._free += devices
            self._current.ended(point.entry)
            return []
        why = why_fresh(process)
        self._current.ledger.update(point.entry, forked=why is None, fresh=why)
        return [Submitted(point, process, devices)]

    def look(self, jobs: Sequence[Submitted]) -> list[Submitted]:
        ended = []
        for job in jobs:
            code, path, now = job.handle.poll(), job.point.path, time.monotonic()
            limit_s, silent_s = self._knobs.hang_timeout_s or math.inf, now - job.seen_at
            if code is None and silent_s < min(_LOOK_S, limit_s):
                continue
            if code is None:  # what hangs must not hold up the others
                files = [path / name for name in _SIGNS]
                seen = [file.stat().st_mtime for file in files if file.exists()]
                if seen != job.seen:
                    job.seen, job.seen_at = seen, now
                elif silent_s > limit_s:
                    job.cause = f"no output for {limit_s:g} s (sweep.hang_timeout_s): killed"
                    kill_family(job.handle.pid)  # a rank that hangs heeds nothing less
                continue
            job.ended_at = min(job.ended_at, now)
            if code < 0 and not rundir.is_vacant(path, job.ended_at):
                continue  # its ranks save
            self._free += job.devices
            record_left(path, code, job.cause, stopped=self._current.stopped)
            ended.append(job)
        return ended

    def cancel(self, jobs: list[Submitted], signal: int | None) -> int:
        if signal is not None:
            for job in jobs:
                pass_on(job.handle, signal)
        return len(jobs)


def visible_devices(count: int) -> list[str]:
    """Return the names of this process's CUDA devices, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [name.strip() for name in given.split(",") if name.strip()]
    return named[:count] if named else [str(i) for i in range(count)]


def record_left(path: Path, code: int, cause: str, *, stopped: bool) -> None:
    """Record how a run ended, if it could not itself."""
    left = how_it_left(code)
    if cause and left is not Left.WELL:
        left = Left.ENDED
    if not cause and code > 0 and code not in (DONE, PREEMPTED):
        cause = last_line(path / STDERR, "llmexp: ")  # such as why it refused
    end = conclude_run(path, left, code=code, stopped=stopped, cause=cause)
    if end.state == "preempted" and not (stopped or end.error or by_plan(path)):
        text = "a signal that was not for the whole sweep stopped it"
        rundir.write_status(path, "preempted", error=text)


def by_plan(path: Path) -> bool:
    """Return whether a run stopped as train.stop_step has it, at that step or past it."""
    with contextlib.suppress(ConfigError, KeyError, TypeError):
        steps = rundir.read_status(path)["summary"]["steps"]
        return bool(steps >= rundir.read_config(path)["train"]["stop_step"])
    return False
