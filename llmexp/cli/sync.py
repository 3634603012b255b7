"""Run `llmexp sync PATH...`: upload runs, and the answers of sweeps."""

from __future__ import annotations

from pathlib import Path

from llmexp.tracker import sync
from llmexp.tracker.answer import SweepAnswer


def main(arguments: list[str]) -> int:
    """Upload what is asked for; return 1 when something stayed behind. Raises ConfigError."""
    return sync.sync(arguments, _answer_of)


def _answer_of(sweep: Path) -> SweepAnswer:
    """Compare the runs of a sweep; plotly is imported only where an answer is asked for."""
    from llmexp.compare.comparing import compare
    from llmexp.compare.page import mirrored

    return mirrored(compare([sweep]))
