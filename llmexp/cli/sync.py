"""`llmexp sync PATH...`: upload runs, and the answers of sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from llmexp.config.values import choice
from llmexp.tracker import sync as uploading
from llmexp.tracker.answer import SweepAnswer
from llmexp.tracker.stores import STORES

_TRACKERS = " | ".join(["wandb", *STORES])


def sync(
    path: Annotated[str, "PATH", "run or sweep folders; globs in quotes work too"],
    *paths: Annotated[str, "PATH", "more of them"],
    dry_run: Annotated[bool, "say what would be sent; asks no server"] = False,
    new: Annotated[
        bool, "upload to new runs: the old ones were deleted, or differ from the records"
    ] = False,
    answer: Annotated[
        bool, "then also the answer of each sweep, in the place of an earlier one"
    ] = False,
    to: Annotated[str, choice("tracker", _TRACKERS)] = "wandb",
) -> int:
    """Upload runs and sweeps to a tracker from their own records.

    What is there is not sent again.
    """
    how = {"dry_run": dry_run, "anew": new, "answer": answer}
    return uploading.sync([path, *paths], to, _answer_of, **how)


def _answer_of(sweep: Path) -> SweepAnswer:
    """Compare the runs of a sweep; plotly is imported only where an answer is asked for."""
    from llmexp.compare.comparing import compare
    from llmexp.compare.page import mirrored

    return mirrored(compare([sweep]))
