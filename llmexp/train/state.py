"""The state of the loop: what a checkpoint restores, where a run writes to, what is under way."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.config.sections import Config
from llmexp.data.window import Window
from llmexp.folders.rows import Rows
from llmexp.mesh import Mesh
from llmexp.metrics.meter import Meter
from llmexp.run import Run
from llmexp.system.console import Console
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Features
from llmexp.train.step import Outcome, Setup, seed_step
from llmexp.train.windows import read_ahead


@dataclass
class Progress:
    """Hold how far the run is."""

    step: int = 0  # windows consumed
    updates: int = 0  # applied updates: the schedule's position
    skipped_steps: int = 0
    consecutive_skips: int = 0
    best_val_loss: float = math.inf  # of the evaluations by their interval
    loss: tuple[int, float] | None = None  # the last step that had a loss, and its loss
    least_loss: float = math.inf


@dataclass
class Saving:
    """Hold a checkpoint on its way: all ranks write their files, then rank 0 commits them."""

    step: int
    commit: Callable[[], Path]
    task: Future[Any]  # what this rank does for it now
    committing: bool = False


@dataclass
class Loop:
    """The state of the loop on this rank."""

    parts: Parts
    setup: Setup
    path: Path
    main: bool  # it is rank 0, which alone writes
    console: Console
    rows: Rows | None  # of rank 0
    progress: Progress
    meter: Meter
    fixed: dict[str, Any]  # of the run, for manifests (see folder.fixed_facts)
    peak_flops: float | None
    outcome: Outcome | None = None  # of the last step, until `finish_step`
    writer: ThreadPoolExecutor = dataclasses.field(default_factory=lambda: ThreadPoolExecutor(1))
    saving: Saving | None = None  # the checkpoint that is on its way to the disk
    # steps of checkpoints loaded or committed here, or by the processes before
    saved: list[int] = dataclasses.field(default_factory=list)
    failed_saves: int = 0  # in a row, since the last one committed
    # clock at the last save, tried or done, else at the start
    saved_at: float = dataclasses.field(default_factory=time.monotonic)
    warned_of_data: bool = False  # that a data file was replaced
    row_is_due: bool = False  # after the step that is under way
    evaluates: bool = False  # likewise
    shown: tuple[float | None, ...] = (None, None, None)  # loss, tokens/s and eta of the bar

    @property
    def features(self) -> Features:
        return self.setup.features

    @property
    def config(self) -> Config:
        return self.parts.config

    @property
    def run(self) -> Run:
        return self.parts.run

    @property
    def mesh(self) -> Mesh:
        return self.setup.mesh

    def windows(self, start_step: int) -> Iterator[Window]:
        """Yield this rank's windows from a step on, read ahead in the background."""
        marks = self.features.on("mark")
        return read_ahead(self.parts, self.mesh, start_step, marks[0] if marks else None)

    def seed(self, step: int) -> None:
        """Seed the random numbers of the window that follows `step` steps."""
        seed_step(self.config.train.seed, step, self.mesh.random_stream)

    @property
    def is_writing(self) -> bool:
        """Return whether this rank is at a task of a save."""
        return self.saving is not None and not self.saving.task.done()

    @property
    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint that this run has loaded or committed."""
        return self.saved[-1] if self.saved else None
