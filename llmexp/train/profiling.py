"""A trace of some steps by torch's profiler, in the run folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from llmexp.train.state import Loop


def start_profiler(loop: Loop) -> torch.profiler.profile | None:
    """Trace the steps from profile_start on, with torch.profiler, into the run folder."""
    chosen = loop.config.train
    first = chosen.profile_start
    if first is None or not loop.out.main or first <= loop.progress.step:
        return None
    target = loop.out.path / f"trace_step_{first:08d}.json"
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=first - 1 - loop.progress.step, warmup=0, active=chosen.profile_steps, repeat=1
        ),
        on_trace_ready=lambda done: export_trace(done, target),
    )
    profiler.start()
    return profiler


def export_trace(done: torch.profiler.profile, path: Path) -> None:
    """Write a trace whole, in the place of the file."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        done.export_chrome_trace(str(temporary))
        with contextlib.suppress(FileNotFoundError):  # torch has printed why it could not write it
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
