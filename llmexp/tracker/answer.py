"""Keep the answer of a sweep in wandb: a run with its page, a verdict in each run's summary.

Beside it stands a saved workspace: curves over tokens, a line a setting, seeds as bands.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmexp.config.commands import how_to_install
from llmexp.config.knobs import is_seed
from llmexp.folders.find import runs_under
from llmexp.folders.folder import RunFolder
from llmexp.system.text import one_line
from llmexp.tracker.fields import (
    Fields,
    next_id,
    owe,
    read_position,
    run_fields,
    upload_is_pending,
    write_position,
)
from llmexp.tracker.mirror import TrackerError
from llmexp.tracker.stores import End
from llmexp.tracker.wandb import JOB_TYPE, MARKS, Wandb, check_login, mark_runs

PANELS = ("val/loss", "train/loss", "grad_norm", "lr")
MISSING = (
    "no saved workspace: the package wandb-workspaces is not installed; to install it: "
    f"{how_to_install('wandb_workspaces')}"
)


@dataclass(frozen=True)
class SweepAnswer:
    """The answer of a sweep, as wandb shows it."""

    notes: str  # the headline, and what the comparison says besides
    table: dict[str, list[Any]]  # a list a column
    page: str  # HTML in one file
    marks: dict[Path, dict[str, Any]]  # for the summary of each run; None: nothing is known


def answer_fields(sweep: Path, folder: RunFolder) -> Fields:
    """Return what wandb shows of an answer besides its content, from a run of the sweep."""
    recorded = folder.facts | {"label": "answer", "overrides": [], "parent": None}
    return replace(run_fields(sweep, folder.config, recorded), config={}, job_type=JOB_TYPE)


def send_answer(store: Wandb, answer: SweepAnswer, sweep: Path, anew: bool = False) -> str:
    """Put the answer in the place of an earlier one, and return where it is.

    The verdicts go first: the answer counts as uploaded when all is there. Raises TrackerError.
    """
    runs = {run: position for run in answer.marks if (position := read_position(run))}
    marks, lacking = {}, 0
    for run, p in runs.items():
        lacking += p.uploaded is None
        project = (p.uploaded or {}).get("project")
        marks["/".join(filter(None, (p.entity, project, p.run_id)))] = answer.marks[run]
    if lacking or not runs:
        what = f"{lacking} of its runs are" if lacking else "none of its runs is"
        raise TrackerError(f"{what} not complete there")
    try:
        fields = replace(answer_fields(sweep, RunFolder(next(iter(runs)))), notes=answer.notes)
        fields = replace(fields, run_id=next_id(fields.run_id)) if anew else fields
        where = store.start(fields, sweep)
        mark_runs(marks)
        last = store.position()
        if not store.has_page(answer.page):
            last += 1
            store.answer(last, answer.page, answer.table)
        there = store.finish(End({}, 0, rows=last + 1, last_step=last))
    except BaseException as error:  # Ctrl-C too must not wait for what hangs
        store.give_up(kill=True)
        if isinstance(error, Exception):
            raise TrackerError(one_line(error)) from None
        raise
    if not there or there <= last:
        raise TrackerError("the server does not have its page and table")
    return where


def deliver(sweep: Path, answer_of: Callable[[], SweepAnswer], stopped: Callable[[], bool]) -> str:
    """Send the answer at the end of a sweep, and return a line about it; empty where none is due.

    It never raises, and waits as long as the end of a run does, `tracker.finish_timeout_s`, or
    until the sweep is `stopped`.
    """
    try:
        runs = [run for run in runs_under(sweep) if read_position(run)]
        if stopped() or not runs:
            return ""
        folder = RunFolder(runs[-1])  # the newest
        limit_s = float(folder.config["tracker"].get("finish_timeout_s", 15.0))
        owe(sweep, answer_fields(sweep, folder).run_id)
        offline = os.environ.get("WANDB_MODE", "online") in ("offline", "dryrun", "disabled")
        if offline or any(map(upload_is_pending, runs)):
            return ""  # llmexp sync sends the runs, then the answer
        return _sent_within(limit_s, sweep, answer_of(), stopped)
    except Exception as error:  # no answer there is worth the end of a sweep
        return f"wandb: the answer is not there ({one_line(error)})"


def _sent_within(
    limit_s: float, sweep: Path, answer: SweepAnswer, stopped: Callable[[], bool]
) -> str:
    store, ended = Wandb(), list[str]()

    def work() -> None:
        try:
            check_login()
            ended.append(f"wandb  {send_answer(store, answer, sweep)}")
            if is_installed():
                ended.append(f"view   {workspace(sweep)}")
        except TrackerError as error:
            ended.append(lacking(str(error)))
        except BaseException as error:  # nobody else hears of it
            ended.append(lacking(one_line(error)))

    def lacking(why: str) -> str:
        return f"wandb: the {'workspace' if ended else 'answer'} is not there ({why})"

    thread = threading.Thread(target=work, name="answer", daemon=True)
    thread.start()
    until = time.monotonic() + limit_s
    while thread.is_alive() and time.monotonic() < until and not stopped():
        thread.join(0.1)
    alive = thread.is_alive()
    lines = list(ended)  # after the look at the thread, which may end meanwhile
    if alive:
        lines.append(lacking("stopped" if stopped() else f"not done after {limit_s:g} s"))
        store.give_up(kill=True)  # which the thread reports as an error
    return "\n".join(lines)


def is_installed() -> bool:
    """Return whether a workspace can be saved."""
    return importlib.util.find_spec("wandb_workspaces") is not None


def workspace(sweep: Path) -> str:
    """Return where the workspace of a sweep is whose answer is there; the first call saves it.

    Raises what wandb raises.
    """
    position = read_position(sweep)
    assert position is not None
    if position.workspace is not None:
        return position.workspace
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import (
        Config,
        Metric,
        RunsetSettings,
        Section,
        Workspace,
        WorkspaceSettings,
    )

    folder = next(RunFolder(run) for run in runs_under(sweep) if read_position(run))
    fields = run_fields(sweep, folder.config, folder.facts)
    keys = [key for key in folder.facts.get("swept") or () if not is_seed(key)]
    # of a group, such as optimizer, the function that it names
    groups = [Config(k if k in folder.flat_config else f"{k}._target_") for k in keys]
    panels = [
        LinePlot(x="tokens_seen", y=[key], groupby_aggfunc="mean", groupby_rangefunc="minmax")
        for key in PANELS
    ]
    view = Workspace(
        entity=position.entity or "",
        project=(position.uploaded or {}).get("project") or fields.project,
        name=fields.group or fields.name,
        sections=[Section(name="sweep", panels=panels, is_open=True)],
        settings=WorkspaceSettings(x_axis="tokens_seen", max_runs=100),
        runset_settings=RunsetSettings(
            filters=[Metric("Group") == fields.group, Metric("JobType") != JOB_TYPE],
            groupby=groups or [Metric("Group")],
            pinned_columns=[f"summary:{key}" for key in MARKS],
        ),
    )
    position = replace(position, workspace=str(view.save().url))
    write_position(sweep, position)
    return str(position.workspace)
