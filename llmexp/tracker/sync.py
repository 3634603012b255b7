"""`llmexp sync`: replays runs and sweeps from metrics.jsonl into the tracker, complete and without
duplicates."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import glob
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp import fileio, rundir
from llmexp.config import ConfigError
from llmexp.redact import clean
from llmexp.rundir import ends_early
from llmexp.tracker import TrackerError, check_login, upload
from llmexp.tracker.local import (
    RUN_ID,
    SWEEP_ID,
    VARIABLES,
    Position,
    next_id,
    read_position,
    run_fields,
    upload_is_pending,
    write_position,
)

INCOMPLETE = 1
OF_ONE_RUN = (
    RUN_ID,
    SWEEP_ID,
    *(VARIABLES[key] for key in ("name", "group", "notes", "tags")),
)  # set for training


def sync(arguments: list[str]) -> int:
    """Upload what the tracker's server does not have yet; exit code 1 when something stayed
    behind."""
    parser = argparse.ArgumentParser(
        prog="llmexp sync",
        description="Upload runs and sweeps to wandb from their own records. What is there is not "
        "sent again.",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="run or sweep folders; globs in quotes work too"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be sent; asks no server"
    )
    parser.add_argument(
        "--anew",
        action="store_true",
        help="upload to new runs: the old ones were deleted, or differ from the records",
    )
    args = parser.parse_args(arguments)
    runs = find_runs(args.paths)
    if args.dry_run:
        return max([say(run, lambda run=run: plan(run, args.anew)) for run in runs])
    if unused := [
        name for name in OF_ONE_RUN if os.environ.pop(name, None)
    ]:  # wandb would put them over the records
        print(
            f"{', '.join(unused)}: not used here; names and ids are those of the runs' own records"
        )
    try:
        check_login()
    except TrackerError as error:
        raise ConfigError(
            f"nothing could be uploaded: {error}; then the same command again"
        ) from None
    done, in_a_row = [], 0
    for run in runs:
        done.append(say(run, lambda run=run: send(run, args.anew)))
        in_a_row = in_a_row + 1 if done[-1] == 2 else 0
        if in_a_row == 2 and len(done) < len(runs):
            print(f"stopped: two runs in a row were not uploaded; {len(runs) - len(done)} are left")
            return INCOMPLETE
    behind = sum(code > 0 for code in done)
    again = "the same command without --anew" if args.anew else "the same command"
    if behind:
        print(
            f"{behind} of {len(runs)} runs are not complete in the tracker; {again} completes them"
        )
    return INCOMPLETE if behind else 0


def upload_command(path: Path) -> str | None:
    """Return the command that uploads a run or a sweep, or None where nothing is known to be left
    to upload."""
    if not any(upload_is_pending(run) for run in runs_in(path)):
        return None
    return f"llmexp sync {shlex.quote(str(path))}"


def find_runs(paths: Sequence[str]) -> list[Path]:
    """Return the runs that the arguments mean, each once. Raises ConfigError for a path that has
    none."""
    found: list[Path] = []
    for text in paths:
        matches = (
            [Path(text)]
            if Path(text).exists()
            else [Path(match) for match in sorted(glob.glob(text))]
        )
        try:
            runs = [run for match in matches for run in runs_in(match)]
        except OSError as error:
            raise ConfigError(f"{text}: cannot be read: {error.strerror}") from None
        if not runs:
            why = "is neither a run nor a sweep" if matches else "there is no such folder"
            raise ConfigError(
                f"{text}: {why}; for example llmexp sync outputs/default/2030-01-01_12-00-00"
            )
        found += runs
    return list({run.resolve(): run for run in found}.values())


def runs_in(path: Path, depth: int = 2) -> list[Path]:
    """Return the run itself, the runs of a sweep by their numbers, or the runs and those of the
    sweeps in a folder."""
    if rundir.is_run(path):
        return [path]
    inner = (
        [p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")]
        if depth and path.is_dir()
        else []
    )
    inner.sort(key=lambda p: [int(t) if t.isdigit() else t for t in re.split(r"([0-9]+)", p.name)])
    return [run for p in inner for run in runs_in(p, depth - 1)]


class LeftOut(Exception):
    """Why a run is not uploaded now, although nothing is wrong."""


@dataclass(frozen=True)
class Records:
    """What a run's folder has for the tracker."""

    fields: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    state: str
    exit_code: int
    position: Position | None
    lost: str = ""  # where rows are lost at the end, in words

    @property
    def mark(self) -> dict[str, Any]:
        """Return how tracker.json says that all of this arrived, but for the url."""
        return {
            "project": self.fields["project"],
            "step": self.rows[-1]["step"],
            "exit_code": self.exit_code,
        }

    @property
    def is_there(self) -> bool:
        known = self.position.uploaded if self.position else None
        return not self.lost and known is not None and self.mark.items() <= known.items()

    @property
    def came_further(self) -> bool:
        """Return whether the tracker is known to have rows after those that are left here."""
        known = self.position.uploaded if self.position else None
        step = known.get("step") if known else None
        return bool(self.lost) and type(step) is int and step > self.rows[-1]["step"]


def say(run: Path, work: Any) -> int:
    """Run `work` on a run and print its line. 0: nothing is left to do; 1: its records are bad; 2:
    not uploaded."""
    try:
        rundir.check_plain(run)
        line, code = work()
    except LeftOut as reason:
        line, code = f"left out: {reason}", 0
    except TrackerError as error:
        line, code = f"not uploaded: {error}", 2
    except (ConfigError, OSError) as error:
        line, code = f"cannot be uploaded: {error}", 1
    print(clean(f"{run.name}: {line}"), flush=True)
    return code


def plan(run: Path, anew: bool) -> tuple[str, int]:
    """Return what `send` would do, as far as the folder alone can tell."""
    if in_training(run):
        raise LeftOut("it is in training")
    records = read_records(run, anew)
    fields = records.fields
    keys = ("entity", "project", "group", "name", "run_id")
    where = ", ".join(f"{key} {value}" for key in keys if (value := fields[key]) is not None)
    if records.is_there:
        return f"nothing to send, all {len(records.rows):,} rows are there ({where})", 0
    if records.came_further:
        return (
            f"nothing to send, and not complete here: it {records.lost}; the tracker has later "
            f"ones ({where})",
            1,
        )
    handed = records.position.step if records.position else -1
    known = sum(row["step"] <= handed for row in records.rows)
    already = (
        f"; {known:,} of them were handed to wandb before, and are sent if they did not arrive"
        if known
        else ""
    )
    tags = f"; tags {', '.join(fields['tags'])}" if fields["tags"] else ""
    lost = f"; not complete: it {records.lost}" if records.lost else ""
    return f"{len(records.rows):,} rows, {records.state} ({where}{tags}){already}{lost}", int(
        bool(lost)
    )


def send(run: Path, anew: bool) -> tuple[str, int]:
    """Upload one run: (what is to be said, 0 or 1). Raises LeftOut, ConfigError, TrackerError,
    OSError."""
    with held(run):
        records = read_records(run, anew)
        n, fields = len(records.rows), records.fields
        if records.is_there and records.position and records.position.uploaded:
            return (
                f"nothing to send, all {n:,} rows are there: "
                f"{records.position.uploaded.get('url')}",
                0,
            )
        if records.came_further:
            return (
                f"nothing sent, and not complete here: it {records.lost}; the tracker has later "
                "ones",
                1,
            )
        last = records.rows[-1]
        where = {key: fields[key] for key in ("run_id", "entity")}
        reached = {"tokens_seen": int(last.get("tokens_seen", -1)), "step": last["step"]}
        known = read_position(run) or Position(fields["run_id"])
        position = dataclasses.replace(known, uploaded=None, **where, **reached)
        # First the id: what it names must be found again if this is cut short.
        write_position(run, position)
        done = upload(run, records.rows, records.summary, records.exit_code, **fields)
        line = f"{done.sent:,} of {n:,} rows sent, {records.state}: {done.url}"
        if done.there < n:
            return (
                f"{line}; {n - done.there:,} earlier rows are missing there and wandb takes none "
                "in between: --anew",
                1,
            )
        if records.lost:
            return f"{line}; not complete: it {records.lost}", 1
        mark = records.mark | {"url": done.url}
        write_position(
            run, dataclasses.replace(position, uploaded=mark, entity=done.entity or position.entity)
        )
        if done.there > n:
            line += (
                f"; the tracker has {done.there - n:,} rows that the run does not have (--anew "
                "makes an exact copy)"
            )
        return line, 0


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
    """Yield the run's lock, so that no training starts in the folder meanwhile. Raises LeftOut
    while there is one."""
    if in_training(run):
        raise LeftOut("it is in training; sync it when that has ended")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(rundir.locked(run))
        except ConfigError:
            raise LeftOut("it is in training; sync it when that has ended") from None
        yield


def in_training(run: Path) -> bool:
    """Return whether its lock is held, or it still is at work on another host, whose locks may not
    be seen here."""
    status = rundir.read_status(run)
    return rundir.is_locked(run) or (
        status.get("state") == "running" and rundir.is_alive(run, status)
    )


def read_records(run: Path, anew: bool) -> Records:
    """Raise ConfigError for records that are damaged, LeftOut for a run without rows."""
    config, status = rundir.read_config(run), {}
    # of the status only the state and figures are missed
    with contextlib.suppress(ConfigError, TypeError, ValueError):
        status = rundir.read_status(run)
    recorded = fileio.read_json(run / rundir.RUN)
    rows = rundir.read_rows(run / rundir.METRICS)
    if not rows:
        raise LeftOut(f"it has no rows yet ({status.get('state', 'unknown state')})")
    steps = [row["step"] for row in rows]
    for number, step in enumerate(steps):
        if type(step) is not int or step < 0 or (number and step <= steps[number - 1]):
            raise ConfigError(
                f"{run / rundir.METRICS}: line {number + 1}: step {step!r} does not follow the one "
                "before"
            )
    try:
        fields = run_fields(run, config, recorded)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{run / rundir.CONFIG}: has no usable tracker section ({error!r})"
        ) from None
    if anew:
        fields["run_id"] = next_id(fields["run_id"])
    state = str(status.get("state", "unknown"))
    if state == "running":  # and nobody holds its lock
        state = "cut"
    code = status.get("exit_code")
    exit_code = code if type(code) is int else int(state != "finished")
    train = config.get("train")
    lost = ends_early(
        status, recorded, train.get("log_every") if isinstance(train, dict) else None, steps
    )
    if lost:  # never shown as a run that came to its end
        state, exit_code = "cut", exit_code or 1
    summary = status.get("summary")
    found = (
        summary
        if isinstance(summary, dict) and state in ("finished", "preempted")
        else figures(rows)
    )
    return Records(
        fields, rows, found, state, exit_code, None if anew else read_position(run), lost
    )


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run that could not write its own; what is not known is absent."""
    found: dict[str, Any] = {
        key: rows[-1][key]
        for key in ("tokens_seen", "skipped_steps", "outlier_steps")
        if key in rows[-1]
    }
    found["steps"] = rows[-1]["step"]
    for key in ("train/loss", "val/loss", "val/ppl", "val/bits_per_byte"):
        values = [
            row[key]
            for row in rows
            if isinstance(row.get(key), (int, float)) and math.isfinite(row[key])
        ]
        if values:
            found[f"latest {key}"] = values[-1]
            if key == "val/loss":
                found["best val/loss"] = min(values)
    return found
