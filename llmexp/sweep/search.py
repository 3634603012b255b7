"""Run the points that a sweeper such as Optuna's chooses while it runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from llmexp.compose.errors import user_errors
from llmexp.compose.origin import CONFIG_NAME
from llmexp.runs.folder import RunFolder
from llmexp.runs.ledger import LedgerEntry
from llmexp.settings.values import ConfigError, quoted, refuse
from llmexp.sweep.batch import run_batch
from llmexp.sweep.current import Current
from llmexp.sweep.points import as_given, load_points
from llmexp.system.child import say
from llmexp.system.text import number

# One or none: Hydra makes the launchers, which get nothing else from here.
CURRENT: list[Current] = []


class PointFailed(RuntimeError):
    """The value of a point that failed, for a sweeper."""


def run(hydra: Any, current: Current, overrides: Sequence[str]) -> None:
    """Let the sweeper choose points until it has enough. Raises ConfigError."""
    if current.settings.twins:
        sweeper = str(current.cfg.hydra.sweeper.get("_target_")).rpartition(".")[2]
        text = f"needs a grid; {sweeper} chooses its points while it runs"
        text += ". Train twins of its best point afterwards"
        values = "0 and, with that point's values, -m train.twin=0,1"
        raise refuse("sweep.twins", current.settings.twins, text, values)
    if current.settings.decide:
        text = "needs a grid, whose settings are known beforehand; leave it out"
        raise refuse("sweep.decide", True, text, "false")
    if not sys.stderr.isatty():
        # for the log of Optuna, which is coloured in files too
        os.environ.setdefault("NO_COLOR", "1")
    CURRENT[:] = [current]
    here = f"hydra.sweep.dir={quoted(str(current.where))}"  # ${now:} has one value for all points
    try:
        with user_errors(hydra.config_loader, overrides), contextlib.suppress(KeyboardInterrupt):
            given = [*overrides, here]
            hydra.multirun(CONFIG_NAME, lambda _: None, given, with_log_configuration=False)
    except PointFailed as failure:
        say(f"the sweeper gives up for a point that failed: {failure}")
    except ValueError:  # it finds no best one where none has come to its end
        if current.opened is None or any(e.state == "finished" for e in current.ledger.points):
            raise
    finally:
        CURRENT.clear()
    if current.opened is None:
        raise ConfigError("hydra/sweeper: it asked for no point")


def launch(loader: Any, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
    """Run one batch of points that a sweeper chose, for our Hydra launchers.

    Raises KeyboardInterrupt when a signal stopped the sweep.
    """
    (current,) = CURRENT
    given = list(current.cfg.hydra.overrides.task)
    asked = [as_given(overrides, given) for overrides in job_overrides]
    points, refused = load_points(
        loader, current.cfg, asked, first, current.settings, current.where, given
    )
    tasks = run_batch(current, points, refused, again=True)
    if current.over:
        raise KeyboardInterrupt
    entries = {tuple(task.point.overrides): task.entry for task in tasks}
    return [result(current, overrides, entries.get(tuple(overrides))) for overrides in asked]


def result(current: Current, overrides: list[str], entry: LedgerEntry | None) -> JobReturn:
    """Return the final loss of a point for the sweeper, or why there is none.

    It is in bits per byte where the tokenizer is searched too.
    """

    def failed(why: str | None) -> JobReturn:
        return JobReturn(overrides, status=JobStatus.FAILED, _return_value=PointFailed(why))

    if entry is None:
        return failed("this point cannot run")
    summary = RunFolder(current.ledger.path / entry.folder).summary
    losses = ["final val/loss", "final train/loss", "latest train/loss"]
    if any(key.split(".")[0] == "tokenizer" for key in current.ledger.swept):
        losses.insert(0, "final val/bits_per_byte")
    known = [summary[key] for key in losses if number(summary.get(key)) is not None]
    if entry.state == "finished" and known:
        return JobReturn(overrides, status=JobStatus.COMPLETED, _return_value=known[0])
    return failed(entry.error)
