"""Send the rows of metrics.jsonl to wandb: by a thread while a run trains, or all at once.

Training neither waits nor fails, whatever wandb does; an error is one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmexp.runs import rundir
from llmexp.settings import config
from llmexp.tracker import calls
from llmexp.tracker.fields import SWEEP_ID, Fields, Position, owe, write_position

INTERVAL_S = 1.0  # between two looks at metrics.jsonl
ARRIVAL_S = 5.0  # for the server to count what it was sent
UPLOAD_START_S, UPLOAD_FINISH_S = 30.0, 120.0


class TrackerError(Exception):
    """Why a run could not be uploaded, in one line."""


@dataclass(frozen=True)
class End:
    """The end of a run in wandb."""

    summary: dict[str, Any]
    exit_code: int
    complete: bool = True  # whether metrics.jsonl has all its rows


class NewRows:
    """The rows of metrics.jsonl as they are written."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the rows that were written since the last call."""
        with open(self._path, "rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # still being written
            lines.pop()
        self._read += sum(map(len, lines))
        return [json.loads(line) for line in lines]


class Feed:
    """The rows of metrics.jsonl, from the first one that an open run of wandb lacks."""

    def __init__(self, run_dir: Path, run: Any, position: Position, online: bool) -> None:
        self.run, self.online = run, online
        self.url = run.url if online else None
        self.rows, self.sent, self.last_step = 0, 0, -1
        self._run_dir, self._new = run_dir, NewRows(run_dir / rundir.METRICS)
        # Online the server knows best: what was handed to a process that died may never have
        # arrived.
        self._after = run.starting_step - 1 if online else position.step
        self.position = replace(position, run_id=run.id, entity=run.entity or position.entity)
        # Its agent has chosen id and project, whatever was asked for.
        if sweep := os.environ.get(SWEEP_ID):
            self.position = replace(self.position, sweep=sweep, project=run.project)
        write_position(run_dir, self.position)

    def send_new(self) -> None:
        """Hand over the rows that were written since the last call."""
        before = self.sent
        for row in self._new.read():
            self.rows, self.last_step = self.rows + 1, row["step"]
            if row["step"] > self._after:
                # With its step, what is sent later lines up; and without `commit` a row with a step
                # would wait for the next one.
                self.run.log(row, step=row["step"], commit=True)
                self.sent += 1
                tokens_seen = int(row.get("tokens_seen", -1))
                self.position = replace(self.position, tokens_seen=tokens_seen, step=row["step"])
        if self.sent > before:
            write_position(self._run_dir, self.position)

    def close(self, end: End, project: str) -> int:
        """End the run, wait for its upload, and return how many rows the server has; all of them
        count as there offline."""
        path = self.run.path
        calls.finish_run(self.run, end.summary, end.exit_code)
        if not self.online:
            return self.rows
        # wandb is silent about rows that the server has refused.
        there = calls.rows_there(path, self.rows, ARRIVAL_S)
        if there >= self.rows > 0 and end.complete:
            uploaded = {
                "project": self.position.project or project,
                "step": self.last_step,
                "exit_code": end.exit_code,
                "url": self.url,
            }
            write_position(self._run_dir, replace(self.position, uploaded=uploaded))
        return there


def upload(run_dir: Path, fields: Fields, end: End) -> tuple[Feed, int]:
    """Send what wandb's server does not have yet of a run that is over, and its end; wait for it.

    Returns what was sent, and how many rows the server has then. Raises TrackerError when not
    everything that was sent is there: the same call again sends the rest.
    """
    position = owe(run_dir, fields.run_id)
    with tempfile.TemporaryDirectory(prefix="llmexp-sync-", ignore_cleanup_errors=True) as root:
        try:
            calls.set_up()
            run = calls.start_run(fields, "online", Path(root), UPLOAD_START_S, UPLOAD_FINISH_S)
            feed = Feed(run_dir, run, position, online=True)
            feed.send_new()
            there = feed.close(end, fields.project)
        except BaseException as error:  # Ctrl-C too must not wait for what hangs
            calls.forget_wandb(kill=True)
            if isinstance(error, Exception):
                raise TrackerError(one_line(error)) from None
            raise
    if feed.sent and there < feed.rows:
        raise TrackerError(f"the server has {there} of {feed.rows} rows")
    return feed, there


def check_login() -> None:
    """Raise TrackerError when nothing can be uploaded from here, with the way to change that."""
    try:
        settings = calls.set_up()
    except ImportError as error:
        raise TrackerError(
            f"wandb cannot be imported ({one_line(error)}); to install it: pip install wandb"
        ) from None
    if not calls.has_login(settings):
        raise TrackerError(
            f"no login for {settings.base_url}; to log in: wandb login, or set WANDB_API_KEY"
        )


class Mirror:
    """Mirrors a run while it trains, from a thread of its own. No method raises, and only `finish`
    waits.

    `say` gets at most one line, from another thread.
    """

    name, to = "wandb", ""  # of the tracker, and the argument of `llmexp sync` that names it

    def __init__(
        self, settings: config.Tracker, run_dir: Path, fields: Fields, say: Callable[[str], None]
    ) -> None:
        self._settings, self._run_dir, self._fields, self._say = settings, run_dir, fields, say
        self._over, self._end = threading.Event(), End({}, 0)
        self._failed = False
        self._size_before = (run_dir / rundir.METRICS).stat().st_size
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Write `summary`, close the run and wait for its upload, `finish_timeout_s` at most."""
        self._end = End(summary, exit_code)
        self._over.set()
        self._thread.join(self._settings.finish_timeout_s)
        if self._thread.is_alive():
            self._fail(f"not done after {self._settings.finish_timeout_s:g} s; left behind")
            self._leave_behind()

    def _leave_behind(self) -> None:
        calls.forget_wandb(kill=False)
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        shutil.rmtree(temporary_files(self._run_dir), ignore_errors=True)

    def _fail(self, text: str) -> None:
        """Say what happened, once: its reader needs the first cause, not its echoes."""
        if not self._failed:
            self._failed = True
            again = f"llmexp sync {shlex.quote(str(self._run_dir))}{self.to}"
            with contextlib.suppress(Exception):
                rest = f"metrics.jsonl has every row, to upload them: {again}"
                self._say(f"{self.name}: {text}; {rest}")

    def _work(self) -> None:
        try:
            self._mirror()
        except Exception as error:  # none is worth a training run
            self._fail(f"stopped ({one_line(error)})")
            self._leave_behind()

    def _mirror(self) -> None:
        mode = self._settings.mode
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE", "auto")
        if mode == "disabled":
            return
        self._wait_for_a_row()
        feed = self._start(mode, owe(self._run_dir, self._fields.run_id))
        while not self._over.wait(INTERVAL_S):
            feed.send_new()
        feed.send_new()
        there = feed.close(self._end, self._fields.project)
        if there < feed.rows:
            self._fail(f"the server has {there} of {feed.rows} rows")
        calls.leave(self._end.exit_code)
        self._remove_temporary()

    def _wait_for_a_row(self) -> None:
        """Wait for the first row of this process: importing wandb would hold up the first steps."""
        path = self._run_dir / rundir.METRICS
        while path.stat().st_size == self._size_before:
            if self._over.wait(INTERVAL_S):
                return

    def _start(self, mode: str, position: Position) -> Feed:
        """Start the run in wandb, offline where online does not work."""
        settings = calls.set_up(temporary_files(self._run_dir))
        # Asked here, because wandb would prompt for a key on a terminal.
        online = calls.has_login(settings) and mode in ("auto", "online")
        if mode == "online" and not online:
            self._fail("no login (WANDB_API_KEY, or `wandb login`), going on offline")
        if online:
            try:
                return self._feed("online", position)
            except Exception as error:
                self._fail(
                    f"{settings.base_url} does not work ({one_line(error)}), going on offline"
                )
                calls.forget_wandb(kill=True)
        return self._feed("offline", position)

    def _feed(self, mode: calls.Mode, position: Position) -> Feed:
        chosen = self._settings
        root = own_files(self._run_dir)
        run = calls.start_run(
            self._fields, mode, root, chosen.start_timeout_s, chosen.finish_timeout_s
        )
        return Feed(self._run_dir, run, position, mode == "online")


def own_files(run_dir: Path) -> Path:
    """Return the folder for wandb's own files. An agent sets WANDB_DIR to the current one, which
    nobody asked for."""
    given = os.environ.get("WANDB_DIR")
    if not given or (SWEEP_ID in os.environ and Path(given) == Path.cwd()):
        return run_dir
    return Path(given)


def temporary_files(run_dir: Path) -> Path:
    """Return the folder for what wandb would leave in the system's temporary folder."""
    return run_dir / ".wandb-temporary"


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
