"""Hold what all parts of a running sweep share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from llmexp.runs.ledger import Ledger, LedgerEntry
from llmexp.sweep.checker import Checker
from llmexp.sweep.settings import Sweep
from llmexp.system.child import PASSED_ON, handling


@dataclass
class Current:
    """The sweep of this process."""

    settings: Sweep
    cfg: DictConfig
    arguments: list[str]  # of its command line
    where: Path
    fixed: bool  # the user named the folder
    grid: bool  # all points are known beforehand
    launcher: str  # local | slurm | ray
    checker: Checker
    stack: contextlib.ExitStack
    opened: Ledger | None = None  # once the first points have passed their checks
    signals: list[int] = field(default_factory=list)  # that asked this process to stop
    seeds: list[int] = field(default_factory=list)  # of each setting at first, with sweep.decide
    halted: bool = False  # by sweep.stop_on_failure

    @property
    def ledger(self) -> Ledger:
        assert self.opened is not None
        return self.opened

    @property
    def stopped(self) -> bool:
        return bool(self.signals)

    @property
    def over(self) -> bool:
        """Return whether nothing more is started."""
        return self.stopped or self.halted

    @contextlib.contextmanager
    def signals_noted(self) -> Iterator[None]:
        """Note signals for a while; the launcher passes them on (`launchers.drive`)."""
        note = lambda number, frame: self.signals.append(number)  # noqa: E731
        with handling(PASSED_ON, note, stay=lambda: self.stopped):
            yield

    def began(self, entry: LedgerEntry) -> None:
        """Record that a point's run has begun."""
        attempts = entry.attempts + 1
        self.ledger.update(entry, attempts=attempts)
        entry.state, entry.started, entry.ended = "running", time.time(), None

    def ended(self, entry: LedgerEntry) -> None:
        """Record what became of a point's run, which may halt the sweep."""
        self.ledger.look(entry)
        self.halted |= self.settings.stop_on_failure and entry.state == "failed"
