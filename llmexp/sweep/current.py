"""Hold what all parts of a running sweep share, and the process that checks its points.

That keeps torch and the devices out of this one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from llmexp.config.values import ConfigError
from llmexp.folders.ledger import Ledger, LedgerEntry, PointFacts
from llmexp.sweep.composer import Composer
from llmexp.sweep.points import Point, counted
from llmexp.sweep.section import Sweep
from llmexp.system.workers import start_worker


class Checker:
    """The process that assembles points.

    It imports torch while the points are composed, or is a fork of what does so, made `later`.
    """

    def __init__(self, later: bool) -> None:
        self._child = None if later else self._started()

    def _started(self) -> subprocess.Popen[str]:
        pipe, module = subprocess.PIPE, "llmexp.sweep.check"
        return start_worker("", module=module, stdin=pipe, stdout=pipe, text=True)

    def close(self) -> None:
        if self._child is not None:
            with contextlib.suppress(BrokenPipeError), self._child:  # which may not have read all
                self._child.kill()

    def check(
        self, points: Sequence[Point], purpose: str = "check"
    ) -> tuple[list[Point], list[LedgerEntry]]:
        """Return the points that can run, with the facts of their runs, and the others.

        Data are prepared, which the runs need anyway. With `lengthen` each point goes on with the
        run in its folder; with `queue` the folders of the runs are made. Raises ConfigError.
        """
        able, refused = list[Point](), list[LedgerEntry]()
        child = self._child = self._child or self._started()
        assert child.stdin is not None
        assert child.stdout is not None
        question = json.dumps({purpose: [point.request() for point in points]})
        with contextlib.suppress(BrokenPipeError):
            print(question, file=child.stdin, flush=True)
        for point in counted(f"{purpose}ing", points):
            if not (line := child.stdout.readline()):
                text = f"the check of the sweep's runs ended with exit code {child.wait()}"
                raise ConfigError("failed", text)
            found = json.loads(line)
            if "refused" in found:
                refused.append(point.refused(found["kind"], found["refused"]))
            else:
                able.append(replace(point, checked=PointFacts(**found)))
        return able, refused


@dataclass
class Submitted:
    """A run that was submitted, and what its launcher knows of it."""

    point: Point
    handle: Any  # a process, a task of Ray, or the id of a Slurm job
    devices: list[str] = field(default_factory=list)
    seen: Any = None  # by the last look: signs of life, or what was shown
    seen_at: float = field(default_factory=time.monotonic)
    ended_at: float = math.inf  # when it was first found to have ended
    cause: str = ""  # why it was ended from here


@dataclass
class Current:
    """The sweep of this process."""

    knobs: Sweep
    cfg: DictConfig
    arguments: list[str]  # of its command line
    where: Path
    fixed: bool  # the user named the folder
    grid: bool  # all points are known beforehand
    launcher: str  # local | slurm | ray
    place: Any  # the knobs of the launcher, if it has any
    checker: Checker
    stack: contextlib.ExitStack
    opened: Ledger | None = None  # at once for one that goes on, else with the first points
    begun: bool = False  # the ledger may be written: the first points have passed their checks
    signals: list[int] = field(default_factory=list)  # that asked this process to stop
    seeds: list[int] = field(default_factory=list)  # of each setting at first, with sweep.decide
    halted: bool = False  # by sweep.stop_on_failure

    @property
    def ledger(self) -> Ledger:
        assert self.opened is not None
        return self.opened

    @functools.cached_property
    def composer(self) -> Composer:
        return Composer(self.cfg)

    @property
    def resumed(self) -> bool:
        return self.knobs.resume is not None

    @property
    def stopped(self) -> bool:
        return bool(self.signals)

    @property
    def over(self) -> bool:
        """Return whether nothing more is started."""
        return self.stopped or self.halted

    def began(self, entry: LedgerEntry) -> None:
        """Record that a point's run has begun."""
        self.ledger.update(entry, attempts=entry.attempts + 1)
        entry.state, entry.started, entry.ended = "running", time.time(), None

    def ended(self, entry: LedgerEntry) -> None:
        """Record what became of a point's run, which may halt the sweep."""
        self.ledger.look(entry)
        if entry.state == "failed":
            self.ledger.update(entry, failures=entry.failures + 1)
            self.halted |= self.knobs.stop_on_failure
