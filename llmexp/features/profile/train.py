from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from llmexp.config.sections import knobs_of
from llmexp.data.window import Window
from llmexp.features.profile.config import Knobs
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.state import Loop
from llmexp.train.step import Setup


def make(parts: Parts, setup: Setup) -> Profile:
    chosen = knobs_of(parts.config, Knobs)
    assert chosen.profile_start is not None
    return Profile(chosen.profile_start, chosen)


class Profile(Feature):
    """Trace the steps from `first` on, with torch.profiler, into the run folder."""

    name = "profile"
    loop: Loop

    def __init__(self, first: int, chosen: Knobs) -> None:
        self._first, self._steps = first, chosen.profile_steps
        self._profiler: Any = None

    def train_start(self) -> None:
        before = self._first - self.loop.progress.step - 1
        if not self.loop.main or before < 0:
            return
        target = self.loop.path / f"trace_step_{self._first:08d}.json"
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=before, warmup=0, active=self._steps, repeat=1),
            on_trace_ready=lambda done: export_trace(done, target),
        )
        self._profiler.start()

    def step_end(self, window: Window, row: dict[str, Any] | None) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def train_end(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()  # writes a trace that the end of the run has cut short


def export_trace(done: torch.profiler.profile, path: Path) -> None:
    """Write a trace whole, in the place of the file."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        done.export_chrome_trace(str(temporary))
        with contextlib.suppress(FileNotFoundError):  # torch has printed why it could not write it
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
