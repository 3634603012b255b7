"""The mirror of metrics.jsonl in an experiment tracker. The only file that knows wandb.

Whatever wandb does (is missing, is slow, cannot reach its server, dies), training neither waits nor fails:
everything runs on one daemon thread behind a queue, and what goes wrong is said in one line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import netrc
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

Row = dict[str, Any]
Mode = Literal["auto", "online", "offline"]

MAX_TAG_CHARS = 64  # wandb refuses longer ones
POSITION_FILE = "tracker.json"
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
    """Mirrors rows to one wandb run, from a thread of its own. No method raises, and only `finish` waits."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._queue: queue.SimpleQueue[Row | _Finish] = queue.SimpleQueue()
        self._closing = False
        self._run: Any = None
        self._failed = False
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self.url_or_path: str | None = None
        self._started = False

    def log(self, row: Row) -> None:
        """Hand over one row of metrics.jsonl (a copy is taken); returns at once."""
        self._begin()
        if self._thread.is_alive():
            self._queue.put(dict(row))

    def _begin(self) -> None:
        """With the first row: importing wandb would hold up the first steps, and a run without rows needs none."""
        if not self._started:
            self._started = True
            self._thread.start()

    def finish(self, summary: Row, exit_code: int) -> None:
        """Write `summary`, close the run and wait for its upload, `finish_timeout_s` at most."""
        if self._closing:
            return
        self._closing = True
        self._begin()
        self._queue.put(_Finish(dict(summary), exit_code))
        self._thread.join(self._plan.finish_timeout_s)
        if self._thread.is_alive():
            self._fail(f"not done after {self._plan.finish_timeout_s:g} s; left behind")
            _forget_wandb(kill=False)

    def _fail(self, text: str) -> None:
        """Say what happened, once: whoever reads it needs the first cause, not its echoes."""
        if not self._failed:
            self._failed = True
            with contextlib.suppress(Exception):
                self._plan.say(f"wandb: {text}; metrics.jsonl has every row")

    def _work(self) -> None:
        try:
            self._run = self._start()
            if self._run is not None:
                self._pump()
        except Exception as error:  # whatever it is, it is not worth a training run
            self._fail(f"stopped ({_one_line(error)})")
            _forget_wandb(kill=False)

    def _start(self) -> Any:
        """The open run, offline where online does not work; None where there is to be none."""
        # wandb reports its errors to its server, and at exit waits up to 20 s for a silent one.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError as error:
            self._fail(f"cannot be imported ({_one_line(error)}), going on without it")
            return None

        settings = wandb.setup(wandb.Settings(silent=True)).settings
        wanted = os.environ.get("WANDB_MODE", "auto") if self._plan.mode == "auto" else self._plan.mode
        if wanted == "disabled":
            return None
        logged_in = _has_login(settings)  # asked here, because wandb would prompt for a key on a terminal
        if wanted == "online" and not logged_in:
            self._fail("no login (WANDB_API_KEY, or `wandb login`), going on offline")
        mode = "online" if logged_in and wanted not in ("offline", "dryrun") else "offline"

        try:
            run = self._init(wandb, mode)
        except Exception as error:
            if mode == "offline":
                raise
            self._fail(f"{settings.base_url} does not work ({_one_line(error)}), going on offline")
            _forget_wandb(kill=True)
            mode = "offline"
            run = self._init(wandb, mode)
        self.url_or_path = run.url if mode == "online" else run.settings.sync_dir
        run.define_metric("tokens_seen")
        run.define_metric("*", step_metric="tokens_seen")
        return run

    def _init(self, wandb: Any, mode: str) -> Any:
        plan = self._plan
        wanted = {
            "root_dir": str(plan.run_dir),
            "use_dot_wandb": False,
            "silent": True,
            "console": "off",
            "save_code": False,
            "disable_code": True,
            "disable_git": True,
            "disable_job_creation": True,
            # run.json has versions, host and commit; a command line may have a secret in it.
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "x_save_requirements": False,
            "init_timeout": plan.start_timeout_s,
            # Shorter than our own wait, so that what is left of it closes the files.
            "finish_timeout": max(plan.finish_timeout_s - 3, 1),
            "finish_timeout_raises": True,
            "x_transaction_log_flush_interval": 0.1,  # seconds of rows that a kill can lose
        }
        known = wandb.Settings.model_fields  # the x_ ones come and go between versions
        return wandb.init(
            project=plan.project,
            name=plan.name,
            group=plan.group,
            tags=plan.tags,
            notes=plan.notes,
            config=plan.config,
            id=plan.run_id,
            mode=mode,
            resume="allow",
            reinit="finish_previous",
            settings=wandb.Settings(**{key: value for key, value in wanted.items() if key in known}),
        )

    def _pump(self) -> None:
        """Pass rows on until `finish`; the position file follows at most once a second."""
        sent_before = _read_position(self._plan)
        position, written, written_at = sent_before, sent_before, time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=POSITION_INTERVAL_S)
            except queue.Empty:
                item = None
            if isinstance(item, _Finish):
                break
            if item is not None and _position(item) > sent_before:
                # With its step, parts that were resumed offline line up when they are synced; and without
                # `commit` a row with a step would wait in wandb for the next one.
                self._run.log(item, step=item["step"], commit=True)
                position = max(position, _position(item))
            if position != written and time.monotonic() - written_at >= POSITION_INTERVAL_S:
                self._write_position(position)
                written, written_at = position, time.monotonic()

        if position != written:
            self._write_position(position)
        self._run.summary.update(item.summary)
        try:
            self._run.finish(exit_code=item.exit_code)
        except TimeoutError:
            folder = self._run.settings.sync_dir
            self._fail(f"the upload did not end in time, `wandb sync {folder}` completes it")
            _forget_wandb(kill=False)
        else:
            import wandb

            wandb.teardown(exit_code=item.exit_code)  # else an exit hook of wandb does it

    def _write_position(self, position: tuple[float, float]) -> None:
        tokens_seen, step = position
        path = self._plan.run_dir / POSITION_FILE
        temporary = path.with_name(path.name + ".tmp")
        saved = {"run_id": self._plan.run_id, "tokens_seen": int(tokens_seen), "step": int(step)}
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(saved, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:  # of a full disk this is the only sign: wandb-core says nothing
            self._fail(f"{path} cannot be written ({_one_line(error)}), the mirror may be incomplete")


Tracker = NoTracker | WandbTracker


def open_tracker(
    kind: Literal["wandb", "none"],
    *,
    run_dir: Path,
    project: str,
    name: str,
    group: str | None,
    tags: list[str],
    notes: str | None,
    config: dict[str, Any],
    run_id: str,
    mode: Mode,
    say: Callable[[str], None],
    start_timeout_s: float = 10,
    finish_timeout_s: float = 15,
) -> Tracker:
    """Start mirroring a run; returns at once, before wandb is even imported.

    Rows carry the keys of metrics.jsonl: `step` and `tokens_seen` in every one, each step in one row only,
    and `tokens_seen` as the step metric of all. With the same `run_dir` and `run_id` as before the wandb run
    is continued, and rows that it already has are not sent again. wandb's own files go to `run_dir`/wandb.
    `mode` auto is online where there is a login and WANDB_MODE does not say otherwise; it never asks for one.
    `say` gets at most one line, from another thread.

    Raises ValueError for an unknown `kind` or `mode`, before anything has started.
    """
    if kind not in ("wandb", "none"):
        raise ValueError(f"tracker.kind={kind!r} is unknown: use wandb or none")
    if mode not in ("auto", "online", "offline"):
        raise ValueError(f"tracker.mode={mode!r} is unknown: use auto, online or offline")
    if kind == "none":
        return NoTracker()
    return WandbTracker(
        _Plan(
            run_dir=run_dir,
            project=project,
            name=name,
            group=group,
            tags=[tag[:MAX_TAG_CHARS] for tag in tags if tag],
            notes=notes,
            config=config,
            run_id=_safe_id(run_id),
            mode=mode,
            start_timeout_s=start_timeout_s,
            finish_timeout_s=finish_timeout_s,
            say=say,
        )
    )


@dataclass(frozen=True)
class _Plan:
    run_dir: Path
    project: str
    name: str
    group: str | None
    tags: list[str]
    notes: str | None
    config: dict[str, Any]
    run_id: str
    mode: Mode
    start_timeout_s: float
    finish_timeout_s: float
    say: Callable[[str], None]


@dataclass(frozen=True)
class _Finish:
    summary: Row = field(default_factory=dict)
    exit_code: int = 0


def _position(row: Row) -> tuple[float, float]:
    """What orders the rows of a run: tokens_seen stands still in a step without targets, step does not."""
    return (row["tokens_seen"], row["step"])


def _read_position(plan: _Plan) -> tuple[float, float]:
    try:
        saved = json.loads((plan.run_dir / POSITION_FILE).read_text(encoding="utf-8"))
        if saved["run_id"] == plan.run_id:
            return (float(saved["tokens_seen"]), float(saved["step"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the worst that follows is a row twice in the mirror
    return (-1.0, -1.0)


def _has_login(settings: Any) -> bool:
    """Whether wandb would find credentials for its server without asking for them."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or settings.api_key:
        return True
    for candidate in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        if candidate and (path := Path(candidate).expanduser()).exists():
            try:
                login = netrc.netrc(path).authenticators(urlsplit(settings.base_url).netloc)
            except (OSError, netrc.NetrcParseError):
                return False
            return bool(login and login[2])
    return False


def _forget_wandb(*, kill: bool) -> None:
    """Drop wandb's exit hook, which would wait again for what has already been given up; `kill` its process.

    There is no public way while a call hangs, and after a failed start the process keeps the run id taken.
    A process that is left alive ends by itself after this one.
    """
    with contextlib.suppress(Exception):
        setup = sys.modules["wandb.sdk.wandb_setup"]
        connection, setup._singleton = setup._singleton._connection, None  # type: ignore[attr-defined]
        connection._cleanup()
        if connection.owns_service:
            os.environ.pop("WANDB_SERVICE", None)
            if kill:
                connection._proc._process.kill()
                connection._proc.join()


def _safe_id(run_id: str) -> str:
    """`run_id` in the letters that wandb and a shell both take as they are; changed ones stay distinct."""
    if re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", run_id):
        return run_id
    digest = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{re.sub(r'[^a-z0-9]+', '-', run_id.lower())[:48]}-{digest}".lstrip("-")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
