"""What all parts of a running sweep know of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from llmexp.sweep.checker import Checker
from llmexp.sweep.ledger import Ledger
from llmexp.sweep.local import Stopped
from llmexp.sweep.settings import Sweep


@dataclass
class Current:
    """The sweep of this process."""

    settings: Sweep
    where: Path
    fixed: bool  # the user named the folder
    name: str
    launcher: str  # local | slurm | ray
    cfg: DictConfig
    arguments: list[str]  # of its command line
    checker: Checker
    stack: contextlib.ExitStack
    ledger: Ledger | None = None  # once the first points have passed their checks
    # what the checker knows of a run, by its folder
    knobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    stop: Stopped = field(default_factory=Stopped)
    halted: bool = False  # by sweep.stop_on_failure
    grid: bool = True  # all points are known beforehand
    # folders of points whose failure was told in full
    reasons: set[str] = field(default_factory=set)

    @property
    def over(self) -> bool:
        """Return whether nothing more is started."""
        return self.stop.requested or self.halted


class PointFailed(RuntimeError):
    """What a sweeper gets for the value of a point that failed."""


CURRENT: list[
    Current
] = []  # one or none: Hydra makes the launchers, which get nothing else from here
