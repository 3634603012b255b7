"""Decide how a run ended: one table for everybody who watches runs.

A run records itself how it ended, in status.json. Its watcher (the command, a sweep, Slurm, Ray, an
agent of ranks, a later look) decides by ENDING_RULES whether that stands, and writes what is
missing.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from llmexp.config.values import ConfigError
from llmexp.config.variables import fill
from llmexp.data.files import cut_files
from llmexp.folders import rundir
from llmexp.system.child import DONE, FAILED, PREEMPTED, REFUSED, STOP_SIGNALS, how_it_died
from llmexp.system.redact import redacted

COMES_AGAIN = "resumed, the same would come again"  # in the error of a run that must not be resumed
GOES_ON = "such as {}, it goes on"  # in the error of a run that is to be resumed with that
# the error that is shown of such a run
CUT_OFF = "crashed: no end was recorded (power failure or reboot?)"


class Left(Enum):
    """List how a run's processes may leave, as its watcher saw it."""

    WELL = auto()  # exit code 0 or 75
    REFUSED = auto()  # exit code 2
    BAD = auto()  # another exit code
    STOPPED = auto()  # by a stop signal, or with the exit code of one
    KILLED = auto()  # by another signal
    ENDED = auto()  # its watcher ended it, or knows what did
    GONE = auto()  # unseen: its job or its host is no more
    UNKNOWN = auto()  # nobody watched it


def how_it_left(code: int) -> Left:
    """Return how a process left, by its exit code; a negative one is a signal."""
    if code in (-number for number in STOP_SIGNALS) or code > 128:
        return Left.STOPPED
    if code < 0:
        return Left.KILLED
    return {DONE: Left.WELL, PREEMPTED: Left.WELL, REFUSED: Left.REFUSED}.get(code, Left.BAD)


@dataclass(frozen=True)
class EndingRule:
    """A line of the table; an empty condition holds always."""

    on_disk: tuple[str, ...] = ()  # the state in status.json; "" for none
    left: tuple[Left, ...] = ()
    stopped: bool | None = None  # whether its watcher asked it to stop
    held: bool | None = None  # whether a process still is at work in the folder
    state: str = ""  # how the run ended; "" for what is on disk
    cause: str = ""  # its error, unless the watcher knows a better one
    exit_code: int = FAILED  # where a state is given

    def holds(self, on_disk: str, left: Left, stopped: bool, held: bool) -> bool:
        return (
            (not self.on_disk or on_disk in self.on_disk)
            and (not self.left or left in self.left)
            and self.stopped in (None, stopped)
            and self.held in (None, held)
        )


SPOKE = (Left.WELL, Left.REFUSED, Left.BAD, Left.STOPPED)  # it could write its status
EARLY = "the process ended with exit code {code} before its last step"
# The first rule that holds decides.
ENDING_RULES = (
    EndingRule(on_disk=("finished",)),
    # another command's process trains there
    EndingRule(left=(Left.REFUSED,), held=True),
    EndingRule(("running",), (Left.WELL, Left.STOPPED), stopped=True, held=False,
         state="preempted", cause="stopped before it could save"),
    EndingRule(left=(Left.WELL, Left.STOPPED), stopped=True),
    EndingRule(("preempted",), (Left.WELL, Left.STOPPED, Left.GONE)),
    EndingRule(("failed",), (*SPOKE, Left.GONE)),
    EndingRule(("running",), (Left.GONE,), held=True),
    EndingRule(("running",), (Left.UNKNOWN,), held=False, state="crashed", cause=CUT_OFF),
    EndingRule(left=(Left.UNKNOWN,)),
    EndingRule(left=(Left.WELL,), state="failed", cause=EARLY),
    EndingRule(left=(Left.REFUSED,), state="failed", cause="{death}", exit_code=REFUSED),
    EndingRule(state="failed", cause="{death}"),
)  # fmt: skip


def rule_for(on_disk: str | None, left: Left, *, stopped: bool, held: bool) -> EndingRule:
    """Return the rule for a run: how it ended, why, and with which exit code."""
    return next(rule for rule in ENDING_RULES if rule.holds(on_disk or "", left, stopped, held))


@dataclass(frozen=True)
class Ending:
    """Describe how a run ended."""

    state: str
    error: str | None
    exit_code: int
    found: bool  # by its watcher; else it stood in status.json


def conclude_run(
    path: Path, left: Left, *, code: int = FAILED, stopped: bool = False, cause: str = ""
) -> Ending:
    """Return how the run in a folder ended, and record it there if the run could not.

    `cause`: what its watcher knows of it. Ranks may outlive a process that was killed: its watcher
    waits until the folder `is_vacant`.
    """
    status = rundir.read_status(path)
    on_disk = status.get("state", "")
    # a refusal may come from a process of another host, whose locks may not be seen here
    held = rundir.is_alive(path, status) if left is Left.REFUSED else rundir.is_held(path)
    rule = rule_for(on_disk, left, stopped=stopped, held=held)
    if not rule.state:
        known = {"finished": DONE, "preempted": PREEMPTED}.get(on_disk, code)
        return Ending(on_disk, status.get("error"), known, found=False)
    death = how_it_died(code, stopped) + bus_error(path, code)
    error = cause or rule.cause.format(code=code, death=death)
    with contextlib.suppress(OSError):  # the disk may be what failed
        record_end(path, rule.state, rule.exit_code, error)
    return Ending(rule.state, error, rule.exit_code, found=True)


def record_end(path: Path, state: str, exit_code: int, error: str | None, **more: Any) -> None:
    """Write the end of a run to its status. Raises OSError."""
    rundir.write_status(path, state, error=error, exit_code=exit_code, ended=time.time(), **more)


def state_now(path: Path, status: Mapping[str, Any]) -> str:
    """Return the state of a run that nobody watches.

    It is that of its status, "" where it has none, and "crashed" for a running one that no process
    is at work in.
    """
    state = str(status.get("state", ""))
    if state != "running":  # the others do not depend on who is there
        return state
    held = rundir.is_alive(path, dict(status))
    return rule_for(state, Left.UNKNOWN, stopped=False, held=held).state or state


def bus_error(path: Path, code: int) -> str:
    """Return the likely cause of a death by SIGBUS, to be added to a message.

    Empty for any other exit code.
    """
    if code != -signal.SIGBUS:
        return ""
    states: dict[str, int] = {}
    with contextlib.suppress(ConfigError):
        sizes = rundir.read_run(path).get("data_files", {})
        states = {str(fill(name, "data_files")): size for name, size in sizes.items()}
    cause = cut_files(states) or "a data file may have been truncated, or its disk has failed"
    return redacted(f"; {cause}")


def goes_on(key: str, value: int) -> str:
    """Return, for an error, with which knob the run goes on when it is resumed."""
    return GOES_ON.format(f"{key}={value}")


def what_is_left(path: Path, error: str) -> str:
    """Return the newest checkpoint of a run that failed, and the way to go on."""
    step = rundir.newest_step(path)
    intact = "no checkpoint yet" if step is None else f"the last checkpoint is step_{step:08d}"
    if COMES_AGAIN in error:
        rate: list[str] = []
        with contextlib.suppress(ConfigError, KeyError, TypeError):
            rate = [f"optimizer.lr={rundir.read_config(path)['optimizer']['lr'] / 10:g}"]
        if step is None:
            return ", such as ".join([f"{intact}; start again with other settings", *rate])
        fork = rundir.command_on(path, "train", ("fork.run", path), *rate)
        return f"{intact}; if its weights are still good, from there with other settings: {fork}"
    again = "the same command"  # where not even a config could be written
    with contextlib.suppress(ConfigError, KeyError, TypeError):
        hosts = rundir.read_config(path)["parallelism"]["nnodes"]
        on_each = f"start it on each of the {hosts} hosts again"
        knob = re.search(GOES_ON.format(r"(\S+)"), error)
        resume = rundir.how_to_resume(path, *(knob.groups() if knob else ()))
        again = resume if hosts == 1 else on_each
    return f"{intact}; to continue: {again}"
