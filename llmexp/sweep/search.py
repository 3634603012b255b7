"""Run the points that a sweeper such as Optuna's chooses while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from llmexp.sweep import ledger as ledgers
from llmexp.sweep import show
from llmexp.sweep.current import CURRENT, PointFailed
from llmexp.sweep.main import run_batch
from llmexp.sweep.points import as_given, load_points


def launch(loader: Any, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
    """Return what our Hydra launchers do: the points of one batch of a sweeper that chooses them
    while it runs.

    The value of a point is its final validation loss. Raises KeyboardInterrupt when a signal
    stopped the sweep.
    """
    (current,) = CURRENT
    given = list(current.cfg.hydra.overrides.task)
    asked = [as_given(overrides, given) for overrides in job_overrides]
    points, refused = load_points(
        loader, current.cfg, asked, first, current.settings, current.where, given
    )
    done = run_batch(current, points, refused, again=True)
    if current.over:
        raise KeyboardInterrupt
    results = []
    for overrides in asked:
        entry = next((e for p, e in done if p.overrides == list(overrides)), None)
        result = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
        assert current.ledger is not None
        summary = show.summary_of(current.ledger.path / entry.folder) if entry else {}
        losses = ("final val/loss", "final train/loss", "latest train/loss")
        value = next(
            (summary[key] for key in losses if ledgers.figure(summary.get(key)) is not None), None
        )
        if entry is None or entry.state != "finished" or value is None:
            result.status, value = (
                JobStatus.FAILED,
                PointFailed(entry.error if entry else "this point cannot run"),
            )
        result.return_value = value
        results.append(result)
    return results
