"""Mirror metrics.jsonl in a tracker, by a daemon thread with a queue. Only this file imports wandb.

Training neither waits nor fails, whatever wandb does; an error is one line. Next to read:
calls (calls to wandb), local (fields and position of the mirror), sync (`llmexp sync`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmexp.tracker.calls import (
    End,
    Mode,
    Plan,
    Row,
    finish_run,
    forget_wandb,
    has_login,
    log_row,
    one_line,
    rows_there,
    start_run,
)
from llmexp.tracker.local import (
    POSITION_FILE,
    SWEEP_ID,
    Position,
    cut_tags,
    read_position,
    safe_id,
    upload_is_pending,
    write_position,
)

POSITION_INTERVAL_S = 1.0


@dataclass(frozen=True)
class NoTracker:
    """The tracker of `tracker=none`: takes everything and keeps nothing."""

    url_or_path: str | None = None

    def log(self, row: Row) -> None:
        pass

    def finish(self, summary: Row, exit_code: int) -> None:
        pass


class WandbTracker:
    """Mirrors rows to one wandb run, from a thread of its own. No method raises, and only `finish`
    waits."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._queue: queue.SimpleQueue[Row | End] = queue.SimpleQueue()
        self._closing = False
        self._run: Any = None
        self._online = False
        self._failed = False
        saved = read_position(plan.run_dir)
        self._known = saved if saved and saved.run_id == plan.run_id else Position(plan.run_id)
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self.url_or_path: str | None = None
        self._started = False

    def log(self, row: Row) -> None:
        """Hand over one row of metrics.jsonl (a copy is taken); returns at once."""
        self._begin()
        if self._thread.is_alive():
            self._queue.put(dict(row))

    def _begin(self) -> None:
        """With the first row: importing wandb would hold up the first steps, and a run without rows
        needs none."""
        if not self._started:
            self._started = True
            self._thread.start()

    def finish(self, summary: Row, exit_code: int) -> None:
        """Write `summary`, close the run and wait for its upload, `finish_timeout_s` at most."""
        if self._closing:
            return
        self._closing = True
        self._begin()
        self._queue.put(End(dict(summary), exit_code))
        self._thread.join(self._plan.finish_timeout_s)
        if self._thread.is_alive():
            self._fail(f"not done after {self._plan.finish_timeout_s:g} s; left behind")
            forget_wandb(kill=False)

    def _fail(self, text: str) -> None:
        """Say what happened, once: whoever reads it needs the first cause, not its echoes. From
        then on rows are owed, which tracker.json says too, also where wandb never came so far as to
        be given one."""
        if not self._failed:
            self._failed = True
            if not upload_is_pending(self._plan.run_dir):
                self._write_position(self._handed_before())
            with contextlib.suppress(Exception):
                again = f"llmexp sync {shlex.quote(str(self._plan.run_dir))}"
                self._plan.say(
                    f"wandb: {text}; metrics.jsonl has every row, to upload them: {again}"
                )

    def _work(self) -> None:
        try:
            self._run = self._start()
            if self._run is not None:
                self._pump()
        except Exception as error:  # whatever it is, it is not worth a training run
            self._fail(f"stopped ({one_line(error)})")
            forget_wandb(kill=False)

    def _start(self) -> Any:
        """Return the open run, offline where online does not work; None where there is to be
        none."""
        try:
            wandb, settings = _set_up()
        except ImportError as error:
            self._fail(f"cannot be imported ({one_line(error)}), going on without it")
            return None

        wanted = (
            os.environ.get("WANDB_MODE", "auto") if self._plan.mode == "auto" else self._plan.mode
        )
        if wanted == "disabled":
            return None
        # asked here, because wandb would prompt for a key on a terminal
        logged_in = has_login(settings)
        if wanted == "online" and not logged_in:
            self._fail("no login (WANDB_API_KEY, or `wandb login`), going on offline")
        mode = "online" if logged_in and wanted not in ("offline", "dryrun") else "offline"

        try:
            run = start_run(wandb, self._plan, mode, _root(self._plan.run_dir))
        except Exception as error:
            if mode == "offline":
                raise
            self._fail(f"{settings.base_url} does not work ({one_line(error)}), going on offline")
            forget_wandb(kill=True)
            mode = "offline"
            run = start_run(wandb, self._plan, mode, _root(self._plan.run_dir))
        self._online = mode == "online"
        self._known = replace(self._known, run_id=run.id, entity=run.entity or self._known.entity)
        # its agent has chosen id and project, whatever was asked for
        if sweep := os.environ.get(SWEEP_ID):
            self._known = replace(self._known, sweep=sweep, project=run.project)
        if run.id != self._plan.run_id:
            self._write_position(self._handed_before())
        self.url_or_path = run.url if self._online else run.settings.sync_dir
        return run

    def _pump(self) -> None:
        """Pass rows on until `finish`; the position file follows at most once a second."""
        plan, run = self._plan, self._run
        sent_before = self._handed_before()
        position, written, written_at = sent_before, sent_before, time.monotonic()
        # of these, offline, the position tells
        earlier = deque(plan.earlier if self._online else ())
        rows, last = 0, -1
        while True:
            try:
                item = (
                    earlier.popleft() if earlier else self._queue.get(timeout=POSITION_INTERVAL_S)
                )
            except queue.Empty:
                item = None
            if isinstance(item, End):
                break
            if item is not None:
                rows, last = rows + 1, item["step"]
                # Online the server knows best: what was handed to a process that died may never
                # have arrived.
                if (
                    item["step"] >= run.starting_step
                    if self._online
                    else _position(item) > sent_before
                ):
                    log_row(run, item)
                    position = max(position, _position(item))
            if position != written and time.monotonic() - written_at >= POSITION_INTERVAL_S:
                self._write_position(position)
                written, written_at = position, time.monotonic()

        if position != written:
            self._write_position(position)
        path, run_project = run.path, self._known.project or plan.project
        try:
            finish_run(run, item)
        except TimeoutError:
            self._fail("the upload did not end in time")
            forget_wandb(kill=False)
            return
        import wandb

        if self._online:  # finish is silent about rows that the server has refused
            there = rows_there(wandb, path, rows, 3)
            if there < rows:
                self._fail(f"the server has {there} of {rows} rows")
            elif rows:
                mark = {
                    "project": run_project,
                    "step": last,
                    "exit_code": item.exit_code,
                    "url": self.url_or_path,
                }
                self._write_position(position, mark)
        wandb.teardown(exit_code=item.exit_code)  # else an exit hook of wandb does it

    def _handed_before(self) -> tuple[int, int]:
        """Return how far this run came in the tracker by tracker.json, as `_position` of its last
        row there."""
        saved = read_position(self._plan.run_dir)
        if saved is None or saved.run_id != self._known.run_id:
            return (-1, -1)
        return (saved.tokens_seen, saved.step)

    def _write_position(self, position: tuple[int, int], uploaded: Row | None = None) -> None:
        try:
            tokens_seen, step = position
            known = replace(self._known, tokens_seen=tokens_seen, step=step, uploaded=uploaded)
            write_position(self._plan.run_dir, known)
        except OSError as error:  # of a full disk this is the only sign: wandb-core says nothing
            path = self._plan.run_dir / POSITION_FILE
            self._fail(
                f"{path} cannot be written ({one_line(error)}), the mirror may be incomplete"
            )


Tracker = NoTracker | WandbTracker


def open_tracker(
    kind: Literal["wandb", "none"],
    *,
    run_dir: Path,
    project: str,
    entity: str | None = None,
    name: str,
    group: str | None,
    tags: list[str],
    notes: str | None,
    config: dict[str, Any],
    run_id: str,
    mode: Mode,
    say: Callable[[str], None],
    earlier: Sequence[Row] = (),
    start_timeout_s: float = 10,
    finish_timeout_s: float = 15,
) -> Tracker:
    """Start mirroring a run; returns at once, before wandb is even imported.

    Rows carry the keys of metrics.jsonl: `step` and `tokens_seen` in every one, each step in one
    row only, and `tokens_seen` as the step metric of all. With the same `run_dir` and `run_id` as
    before the wandb run is continued, and rows that it already has are not sent again; those that
    its server lacks are sent, also of the `earlier` ones of metrics.jsonl. wandb's own files go to
    `run_dir`/wandb. `mode` auto is online where there is a login and WANDB_MODE does not say
    otherwise; it never asks for one. `say` gets at most one line, from another thread.

    Raises ValueError for an unknown `kind` or `mode`, before anything has started.
    """
    if kind not in ("wandb", "none"):
        raise ValueError(f"tracker.kind={kind!r} is unknown: use wandb or none")
    if mode not in ("auto", "online", "offline"):
        raise ValueError(f"tracker.mode={mode!r} is unknown: use auto, online or offline")
    if kind == "none":
        return NoTracker()
    return WandbTracker(
        Plan(
            run_dir=run_dir,
            project=project,
            entity=entity,
            name=name,
            group=group,
            tags=cut_tags(tags),
            notes=notes,
            config=config,
            run_id=safe_id(run_id),
            mode=mode,
            start_timeout_s=start_timeout_s,
            finish_timeout_s=finish_timeout_s,
            say=say,
            earlier=earlier,
        )
    )


class TrackerError(Exception):
    """Why a run could not be uploaded, in one line."""


@dataclass(frozen=True)
class Upload:
    """What came of an upload: the rows that were sent now, and all that the server has."""

    url: str
    sent: int
    there: int
    entity: str | None  # where it is, as wandb said


def check_login() -> None:
    """Raise TrackerError when nothing can be uploaded from here, with the way to change that."""
    try:
        _, settings = _set_up()
    except ImportError as error:
        raise TrackerError(
            f"wandb cannot be imported ({one_line(error)}); to install it: pip install wandb"
        ) from None
    if not has_login(settings):
        raise TrackerError(
            f"no login for {settings.base_url}; to log in: wandb login, or set WANDB_API_KEY"
        )


def upload(
    run_dir: Path,
    rows: Sequence[Row],
    summary: Row,
    exit_code: int,
    *,
    start_timeout_s: float = 30,
    finish_timeout_s: float = 120,
    **fields: Any,
) -> Upload:
    """Send what wandb's server does not have yet of a run that is over, and its end.

    `rows` are all of the run's, in order of their steps; `fields` are those of `open_tracker` that
    describe the run. The server's last step says where to go on, and its count of rows whether they
    arrived. Waits for the upload.

    Raises TrackerError when not everything that was sent is there; the same call again sends the
    rest.
    """
    plan = Plan(
        run_dir=run_dir,
        mode="online",
        start_timeout_s=start_timeout_s,
        finish_timeout_s=finish_timeout_s,
        say=lambda text: None,
        **fields,
    )
    with tempfile.TemporaryDirectory(prefix="llmexp-sync-", ignore_cleanup_errors=True) as root:
        try:
            wandb, _ = _set_up()
            run = start_run(wandb, plan, "online", Path(root))
            path, url, entity = run.path, run.url, run.entity
            before = rows_there(wandb, path, 0, 0) if run.resumed else 0
            missing = [row for row in rows if row["step"] >= run.starting_step]
            for row in missing:
                log_row(run, row)
            finish_run(run, End(summary, exit_code))
            there = rows_there(wandb, path, before + len(missing), 5)
        except BaseException as error:  # Ctrl-C too must not wait for what hangs
            forget_wandb(kill=True)
            if isinstance(error, Exception):
                raise TrackerError(one_line(error)) from None
            raise
    if there < before + len(missing):
        raise TrackerError(f"the server took {there - before} of {len(missing)} rows")
    return Upload(url, len(missing), there, entity)


def _position(row: Row) -> tuple[int, int]:
    """Return what orders the rows of a run: tokens_seen stands still in a step without targets,
    step does not."""
    return (row["tokens_seen"], row["step"])


def _root(run_dir: Path) -> Path:
    """Return the folder for wandb's own files. An agent sets WANDB_DIR to the current one, which
    nobody asked for."""
    given = os.environ.get("WANDB_DIR")
    if not given or (SWEEP_ID in os.environ and Path(given) == Path.cwd()):
        return run_dir
    return Path(given)


def _set_up() -> tuple[Any, Any]:
    """Return (wandb, its settings). Raises ImportError."""
    # wandb reports its errors to its server, and at exit waits up to 20 s for a silent one.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return wandb, wandb.setup(wandb.Settings(silent=True)).settings
