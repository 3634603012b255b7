"""`llmexp sync`: upload runs and sweeps from their own records, complete and without duplicates."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmexp.config.commands import command
from llmexp.config.labels import plural
from llmexp.config.values import ConfigError
from llmexp.folders import ledger, rundir
from llmexp.folders.find import runs_meant, runs_under
from llmexp.folders.folder import RunFolder, clean_name
from llmexp.folders.rows import LINEAGE, read_rows, walk_rows
from llmexp.metrics.keys import figures_in
from llmexp.system.redact import clean
from llmexp.system.text import one_line
from llmexp.tracker.answer import MISSING, SweepAnswer, is_installed, send_answer, workspace
from llmexp.tracker.fields import (
    OF_ONE_RUN,
    Fields,
    MirrorPosition,
    next_id,
    read_position,
    run_fields,
    upload_is_pending,
)
from llmexp.tracker.mirror import BESIDE, TrackerError, upload
from llmexp.tracker.stores import End, check_stores
from llmexp.tracker.wandb import Wandb, check_login

COMPLETE, INCOMPLETE, NOT_UPLOADED = 0, 1, 2


def sync(
    paths: Sequence[str],
    to: str,
    answer_of: Callable[[Path], SweepAnswer],
    *,
    dry_run: bool = False,
    anew: bool = False,
    answer: bool = False,
) -> int:
    """Upload what the server of a tracker does not have yet: see `llmexp sync --help`.

    `answer_of` finds the answer of a sweep. Return exit code 1 when something stayed behind.
    """
    runs = find_runs(paths)
    if to != "wandb":
        check_stores([to], "--to")
        if anew or dry_run or answer:
            raise ConfigError(
                "conflict", f"--to {to}: has neither --new nor --dry-run nor --answer"
            )
        return upload_all(runs, False, to)
    sweeps = [s for s in dict.fromkeys(run.parent for run in runs) if ledger.is_sweep(s)]
    if answer and not sweeps:
        example = "llmexp sync --answer outputs/default/2030-01-01_12-00-00"
        raise ConfigError(
            "not_a_run", f"--answer {paths[0]}: is not a sweep; for example {example}"
        )
    sweeps = [s for s in sweeps if answer or upload_is_pending(s)]
    if dry_run:
        code = max([_take(run, anew, dry=True) for run in runs])
        for sweep in sweeps:
            print(f"{clean_name(sweep)}: its answer")
        return code
    if unused := [name for name in OF_ONE_RUN if os.environ.pop(name, None)]:
        names = ", ".join(unused)
        print(f"{names}: not used here; names and ids are those of the runs' own records")
    check_login()
    code = upload_all(runs, anew)
    behind = [sweep for sweep in sweeps if not upload_answer(sweep, answer_of, anew, answer)]
    return INCOMPLETE if behind else code


def upload_answer(
    sweep: Path, answer_of: Callable[[Path], SweepAnswer], anew: bool, asked: bool
) -> bool:
    """Upload the answer of a sweep, print its lines, and return whether all is there."""
    lines, complete = list[str](), True
    try:
        lines.append(f"answer: {send_answer(Wandb(), answer_of(sweep), sweep, anew)}")
        if is_installed():
            lines.append(f"workspace: {workspace(sweep)}")
        elif asked:
            lines.append(MISSING)
    except Exception as error:  # the runs are there, whatever became of their comparison
        why = error if isinstance(error, TrackerError) else one_line(error)
        lines.append(f"{'workspace' if lines else 'answer'} not uploaded: {why}")
        complete = False
    for line in lines:
        print(f"{clean_name(sweep)}: {clean(line)}", flush=True)
    return complete


def upload_all(runs: Sequence[Path], anew: bool, to: str = "wandb") -> int:
    """Stop after two runs in a row that could not be uploaded: the server is what fails then."""
    codes = []
    for run in runs:
        codes.append(_take(run, anew, dry=False, to=to))
        if codes[-2:] == [NOT_UPLOADED] * 2 and len(codes) < len(runs):
            left = plural(len(runs) - len(codes), "run")
            print(f"stopped: two runs in a row were not uploaded; left: {left}")
            return INCOMPLETE
    behind = sum(code != COMPLETE for code in codes)
    if not behind:
        return COMPLETE
    again = "the same command without --new" if anew else "the same command"
    of = f"{behind} of {plural(len(runs), 'run')} {'is' if behind == 1 else 'are'} not complete"
    print(f"{of} in the tracker; {again} tries once more")
    return INCOMPLETE


def upload_command(path: Path) -> str | None:
    """Return the command that uploads a run or a sweep; None where nothing is left to upload."""
    if not any(upload_is_pending(folder) for folder in [path, *runs_under(path)]):
        return None
    return command("sync", path)


def find_runs(paths: Sequence[str]) -> list[Path]:
    """Return the runs that the arguments mean, each once.

    Raises ConfigError for a path that has none.
    """
    runs, problems = runs_meant(paths)
    if problems:
        example = "llmexp sync outputs/default/2030-01-01_12-00-00"
        raise ConfigError("not_a_run", f"{problems[0]}; for example {example}")
    return runs


class LeftOut(Exception):
    """Report why a run is not uploaded now, although nothing is wrong."""


@dataclass(frozen=True)
class _Records:
    """The records of a run, as the tracker needs them."""

    fields: Fields
    rows: int
    last_step: int
    end: End
    state: str
    position: MirrorPosition | None
    lost: str  # where rows are lost at the end, in words

    def settled(self) -> str:
        """Return why nothing is to be sent; empty where something is."""
        known = (self.position and self.position.uploaded) or {}
        mark = {
            "project": self.fields.project,
            "step": self.last_step,
            "exit_code": self.end.exit_code,
        }
        if not self.lost and mark.items() <= known.items():
            return f"all {self.rows:,} rows are there: {known.get('url')}"
        step = known.get("step")
        if self.lost and type(step) is int and step > self.last_step:
            return f"and not complete here: it {self.lost}; the tracker has later rows"
        return ""


def _take(run: Path, anew: bool, dry: bool, to: str = "wandb") -> int:
    """Upload a run (`dry`: do not), print its line, and return one of the codes above."""
    try:
        rundir.check_plain(run)
        status = rundir.read_status(run)  # locks of another host may not be seen here
        at_work = status.get("state") == "running" and rundir.is_alive(run, status)
        if at_work or rundir.is_locked(run):
            raise LeftOut("it is in training; sync it when that has ended")
        # so that no training starts in the folder meanwhile
        with contextlib.nullcontext() if dry else rundir.locked(run):
            records = records_to_upload(run, anew)
            if to == "wandb" and (settled := records.settled()):
                line, complete = f"nothing to send, {settled}", not records.lost
            else:
                line, complete = planned_line(records) if dry else upload_run(run, records, to)
                if complete and records.lost:
                    line, complete = f"{line}; not complete: it {records.lost}", False
            code = COMPLETE if complete else INCOMPLETE
    except LeftOut as reason:
        line, code = f"left out: {reason}", COMPLETE
    except TrackerError as error:
        line, code = f"not uploaded: {error}", NOT_UPLOADED
    except (ConfigError, OSError) as error:
        line, code = f"cannot be uploaded: {error}", INCOMPLETE
    print(f"{clean_name(run)}: {clean(line)}", flush=True)
    return code


def planned_line(records: _Records) -> tuple[str, bool]:
    """Return what `send` would do, as far as the folder alone can tell."""
    fields, position = records.fields, records.position
    where = [f"project {fields.project}"]
    for key in ("entity", "group", "name", "run_id"):
        if (value := getattr(fields, key)) is not None:
            where.append(f"{key} {value}")
    tags = f"; tags {', '.join(fields.tags)}" if fields.tags else ""
    line = f"{plural(records.rows, 'row')}, {records.state} ({', '.join(where)}{tags})"
    if position and position.step >= 0:
        line += f"; those up to step {position.step:,} were handed to wandb before, and are sent "
        line += "if they did not arrive"
    return line, True


def upload_run(run: Path, records: _Records, to: str) -> tuple[str, bool]:
    """Upload one run, and return its line and whether all of it is there.

    Raises TrackerError, OSError.
    """
    done = upload(to, run, records.fields, records.end)
    line = f"{done.sent:,} of {done.rows:,} rows sent, {records.state}: {done.where}"
    more = 0 if done.there is None else done.there - done.rows
    if more < 0:
        text = "earlier rows are missing there, and wandb only appends: --new"
        return f"{line}; {-more:,} {text}", False
    if more > 0 and not records.lost:
        text = "rows that the run does not have (--new makes an exact copy)"
        line += f"; the tracker has {more:,} {text}"
    return line, True


def records_to_upload(run: Path, anew: bool) -> _Records:
    """Raise ConfigError for records that are damaged, LeftOut for a run without rows."""
    folder = RunFolder(run)
    for name in BESIDE:
        for _ in walk_rows(run / name):
            pass  # raises for damage
    rows, status = folder.rows, folder.status
    state = str(status.get("state", "unknown"))
    if not rows:
        raise LeftOut(f"it has no rows yet ({state})")
    steps = [row["step"] for row in rows]
    parents = [row["step"] for row in read_rows(run / LINEAGE)]
    if parents and steps[0] <= parents[-1]:
        text = f"step {steps[0]} does not follow the last one of {LINEAGE}"
        raise ConfigError("damaged_file", f"{run / rundir.METRICS}: line 1: {text}")
    try:
        fields = run_fields(run, folder.config, folder.facts)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "damaged_file", f"{run}: config.yaml or run.json is not that of a run ({error!r})"
        ) from None
    if anew:
        fields = replace(fields, run_id=next_id(fields.run_id))
    code = status.get("exit_code")
    if code is None:
        code = COMPLETE if state == "finished" else 1
    lost = folder.lost()
    # Nobody holds its lock; and a run that lost rows is never shown as one that came to its end.
    if state == "running" or lost:
        state, code = "crashed", code or 1
    summary = folder.summary
    if state not in ("finished", "preempted") or not summary:
        summary = summary_of_rows(rows)
    position = None if anew else read_position(run)
    end = End(summary, code, complete=not lost)
    return _Records(fields, len(parents) + len(rows), steps[-1], end, state, position, lost)


def summary_of_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run that could not write its own; what is not known is absent."""
    last = rows[-1]
    found = {"steps": last["step"]}
    for key in ("tokens_seen", "skipped_steps", "outlier_steps"):
        if key in last:
            found[key] = last[key]
    for key in figures_in(rows):
        if values := [row[key] for row in rows if key in row]:
            found[f"latest {key}"] = values[-1]
            if key == "val/loss":
                found["best val/loss"] = min(values)
    return found
