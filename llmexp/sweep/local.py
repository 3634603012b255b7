"""Runs of a sweep on this machine: a process tree each, as many at the same time as there are
devices for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from llmexp import rundir
from llmexp.child import (
    DONE,
    PASSED_ON,
    PREEMPTED,
    REFUSED,
    handling,
    kill_family,
    pass_on,
    start_worker,
)
from llmexp.config import ConfigError
from llmexp.ending import Left, conclude, how_it_left

POLL_S = 0.1
LOOK_S = 1.0  # between looks for a sign of life
# in the run folder: what its processes said; the console's rows are in train.log
STDERR = "stderr.log"


@dataclass(frozen=True)
class Job:
    """A run folder to train in, on so many ranks, each with a device or only with a share of the
    CPU's cores."""

    path: Path
    ranks: int
    cuda: bool = False


@dataclass
class Active:
    """A job under way."""

    job: Job
    process: subprocess.Popen[bytes]
    devices: list[str]
    sign: tuple[float, ...] = ()  # of life
    sign_at: float = 0.0
    cause: str = ""  # why it was ended from here


class Stopped:
    """Signals to this process, passed on to the jobs under way; no further job starts."""

    def __init__(self) -> None:
        self.requested = False
        self.active: list[Active] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with handling(PASSED_ON, self._pass_on, stay=lambda: self.requested):
            yield

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        for active in list(self.active):
            pass_on(active.process, number)


def visible_devices(count: int) -> list[str]:
    """Return the names of this process's CUDA devices, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [name.strip() for name in given.split(",") if name.strip()]
    return named[:count] if named else [str(i) for i in range(count)]


def run_all(
    jobs: Sequence[Job],
    devices: Sequence[str],
    stop: Stopped,
    *,
    max_parallel: int | None,
    devices_per_run: int | None,
    stop_on_failure: bool,
    silence_s: float | None,
    begun: Callable[[Job], None],
    ended: Callable[[Job], None],
    tick: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Run every job in the order given, each as soon as its devices are free, until `stop` is
    requested.

    `devices`: of this machine; empty on a CPU, where `max_parallel` jobs (default 1) share the
    cores. `tick` is called now and then.
    """
    slots = max_parallel or (len(devices) or 1)
    waiting, free, halted, told = list(jobs), list(devices), False, False
    active = stop.active = []
    while active or (waiting and not stop.requested and not halted):
        while waiting and not (stop.requested or halted) and len(active) < slots:
            need = (devices_per_run or waiting[0].ranks) if waiting[0].cuda else 0
            if need > len(free):
                break
            job = waiting.pop(0)
            taken, free = free[:need], free[need:]
            begun(job)
            try:
                process = start(job, taken, slots)
            except (ConfigError, OSError) as error:  # something is in the place of its files
                rundir.write_status(
                    job.path, "failed", error=str(error), exit_code=REFUSED, ended=time.time()
                )
                free += taken
                halted |= stop_on_failure
                ended(job)
                continue
            active.append(Active(job, process, taken, sign_at=time.monotonic()))
            if stop.requested:  # the signal came before this one was there to get it
                active[-1].process.send_signal(signal.SIGTERM)
        for one in list(active):
            code = one.process.poll()
            if code is None:
                end_if_silent(one, silence_s)
                continue
            active.remove(one)
            free += one.devices
            if settle(one.job.path, code, one.cause, stopped=stop.requested) and stop_on_failure:
                halted = True
            ended(one.job)
        if stop.requested and active and not told:
            told = True
            say(
                f"stopping: {len(active)} under way {'saves' if len(active) == 1 else 'save'} a "
                "checkpoint first"
            )
        tick()
        time.sleep(POLL_S)


def start(job: Job, devices: Sequence[str], slots: int) -> subprocess.Popen[bytes]:
    """Return the job's worker. It starts its own ranks, with a port and a process group of their
    own."""
    env = dict(os.environ)
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if slots > 1 and not devices:
        env.setdefault(
            "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // slots // job.ranks))
        )
    return start_worker(str(job.path), log=job.path / STDERR, env=env)


def end_if_silent(one: Active, silence_s: float | None) -> None:
    """Kill a job that has written nothing for too long: what hangs must not hold up the others."""
    now = time.monotonic()
    if silence_s is None or now - one.sign_at < min(LOOK_S, silence_s):
        return
    path = one.job.path
    files = (
        path / name
        for name in (rundir.METRICS, rundir.STATUS, rundir.LOG, STDERR, rundir.CHECKPOINTS, "logs")
    )
    sign = tuple(file.stat().st_mtime for file in files if file.exists())
    if sign != one.sign:
        one.sign, one.sign_at = sign, now
    elif now - one.sign_at > silence_s:
        one.cause = f"no sign of life for {silence_s:g} s (sweep.silence_s); it was ended"
        kill_family(one.process.pid)  # a rank that hangs heeds nothing less


def settle(path: Path, code: int, cause: str, *, stopped: bool) -> bool:
    """Return whether the run failed; records a death that it could not record itself."""
    left = how_it_left(code)
    if cause and left is not Left.WELL:
        left = Left.ENDED
    end = conclude(path, left, code=code, stopped=stopped, cause=cause or last_words(path, code))
    if end.state == "preempted" and not (stopped or end.error or by_plan(path)):
        text = "a signal that was not for the whole sweep stopped it"
        rundir.write_status(path, "preempted", error=text)
    return end.state == "failed"


def by_plan(path: Path) -> bool:
    """Return whether a run stopped where train.stop_step had it stop."""
    with contextlib.suppress(ConfigError, KeyError, TypeError):
        steps = rundir.read_status(path)["summary"]["steps"]
        return bool(steps == rundir.read_config(path)["train"]["stop_step"])
    return False


def last_words(path: Path, code: int) -> str:
    """Return the last line that the worker itself printed on standard error, such as why it
    refused; "" for one that a signal ended, or that left well."""
    if code < 0 or code in (DONE, PREEMPTED):
        return ""
    with contextlib.suppress(OSError):
        lines = (path / STDERR).read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line.removeprefix("llmexp: ") for line in lines if line.startswith("llmexp: ")]
        return said[-1] if said else ""
    return ""
