"""Describe a run that is not started. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmexp.config.sections import Config
from llmexp.forecast.duration import Cost
from llmexp.run import Run
from llmexp.system.console import banner

_Rows = list[tuple[str, str]]
NO_MEMORY = "not planned; add plan.device=h200 (or another device)"
NO_TIME = "not known; add --measure, which trains a few steps here, or plan.device=h200"


@dataclass(frozen=True)
class Memory:
    """Hold what is known of a run's memory: in words, as plain values, and whether it fits."""

    rows: _Rows
    figures: dict[str, Any]
    peak_bytes: float | None = None
    fits: bool | None = None


@dataclass(frozen=True)
class Planned:
    """A run that is not started: its banner, the same as plain values, and what is known of it."""

    run: Run
    config: Config
    rows: _Rows
    data: dict[str, Any]  # what `llmexp plan --json` prints
    memory: Memory
    cost: Cost | None
    gpus_here: int

    def __str__(self) -> str:
        return banner(self.rows)
