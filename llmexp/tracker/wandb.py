"""Call wandb. No other file but compare/projects.py imports it."""

from __future__ import annotations

import configparser
import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from llmexp.config import sections
from llmexp.config.kinds import Kind
from llmexp.config.values import ConfigError
from llmexp.system.child import PREEMPTED
from llmexp.system.fileio import text_sha256
from llmexp.system.redact import netrc_passwords
from llmexp.system.text import one_line
from llmexp.tracker.fields import SWEEP_ID, Fields, owe, write_position
from llmexp.tracker.stores import End, Store

MARKS = ("compare/mark", "compare/difference", "compare/ci_half")  # in the summary of each run
JOB_TYPE, PAGE, TABLE = "compare", "compare/page", "compare/table"  # of the answer of a sweep
ARRIVAL_S = 5.0  # for the server to count what it was sent
AT_A_TIME = 8  # runs whose summaries are changed
UPLOAD_START_S, UPLOAD_FINISH_S = 30.0, 120.0  # of a run that is over


class Wandb(Store):
    """A run on wandb's server.

    With `settings`, of a run in training, the rows go to files where no server can be reached, and
    `warn` gets a line about it.
    """

    _temporary: Path | None = None  # the folder for files that wandb leaves behind

    def __init__(
        self, settings: sections.Tracker | None = None, warn: Callable[[str], None] = print
    ) -> None:
        self._settings, self._warn = settings, warn

    def start(self, fields: Fields, run_dir: Path) -> str:
        """Open the run, new or as its server knows it, with tokens_seen below every curve."""
        self._fields, self._run_dir = fields, run_dir
        self._temporary = temporary = run_dir / ".wandb-temporary"
        position = owe(run_dir, fields.run_id)
        self._run = run = self._open(import_wandb(temporary), temporary)
        if fields.job_type != JOB_TYPE:  # an answer has no curves
            run.define_metric("tokens_seen")
            run.define_metric("*", step_metric="tokens_seen")
        # Online the server knows best: what was handed to a process that died may never have
        # arrived.
        self._after = run.starting_step - 1 if self._online else position.step
        self._position = replace(position, run_id=run.id, entity=run.entity or position.entity)
        # Its agent has chosen id and project, whatever was asked for.
        if sweep := os.environ.get(SWEEP_ID):
            self._position = replace(self._position, sweep=sweep, project=run.project)
        write_position(run_dir, self._position)
        return str(run.url) if self._online else "offline"

    def _open(self, server: Any, temporary: Path) -> Any:
        """Return the run in wandb: one in training goes on offline where online does not work."""
        chosen = self._settings
        if chosen is None:
            self._online = True
            temporary.mkdir(exist_ok=True)
            return self._init("online", temporary, UPLOAD_START_S, UPLOAD_FINISH_S)
        mode = os.environ.get("WANDB_MODE", "auto") if chosen.mode == "auto" else chosen.mode
        limits, given = (
            (chosen.start_timeout_s, chosen.finish_timeout_s),
            os.environ.get("WANDB_DIR"),
        )
        # an agent sets it to the current folder, which nobody asked for
        unasked = not given or (SWEEP_ID in os.environ and Path(given) == Path.cwd())
        files = self._run_dir if unasked else Path(str(given))
        # Asked here, because wandb would prompt for a key on a terminal.
        self._online = mode in ("auto", "online") and has_login(server)
        if mode == "online" and not self._online:
            self._warn("no login (WANDB_API_KEY, or `wandb login`); runs offline")
        if self._online:
            try:
                return self._init("online", files, *limits)
            except Exception as error:
                self._warn(f"{server.base_url} does not work ({one_line(error)}); runs offline")
                forget_wandb(kill=True)
                self._online = False
        return self._init("offline", files, *limits)

    def _init(
        self, mode: Literal["online", "offline"], root: Path, start_s: float, finish_s: float
    ) -> Any:
        """Return the run; wandb's own files go to `root`."""
        import wandb

        wanted = {
            "root_dir": str(root),
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
            "init_timeout": start_s,
            # Shorter than our own wait, so that what is left of it closes the files.
            "finish_timeout": max(finish_s - 3, 1),
            "finish_timeout_raises": True,
            "x_transaction_log_flush_interval": 0.1,  # seconds of rows that a kill can lose
        }
        there = wandb.Settings.model_fields  # the x_ ones come and go between versions
        known = {key: value for key, value in wanted.items() if key in there}
        fields = self._fields
        names = ("project", "entity", "name", "group", "tags", "notes", "config")
        return wandb.init(
            **{name: getattr(fields, name) for name in names},
            job_type=fields.job_type or os.environ.get("WANDB_JOB_TYPE") or "train",
            id=fields.run_id,
            mode=mode,
            resume="allow",
            reinit="finish_previous",
            settings=wandb.Settings(**known),
        )

    def position(self) -> int:
        return int(self._after)

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            # With its step, what is sent later lines up; and without `commit` a row with a step
            # would wait for the next one.
            self._run.log(_with_maps(row), step=row["step"], commit=True)
        step, tokens_seen = rows[-1]["step"], int(rows[-1].get("tokens_seen", -1))
        self._position = replace(self._position, tokens_seen=tokens_seen, step=step)
        write_position(self._run_dir, self._position)

    def has_page(self, page: str) -> bool:
        """Return whether the newest answer has this page, with its files."""
        known = dict(self._run.summary.get(PAGE) or {})
        same = known.get("sha256") == text_sha256(page)
        return same and rows_there(self._run.path, 1, 0, self._files()) > 0

    def _files(self) -> list[str]:
        """Return the names of the files that the newest answer consists of; none of a run."""
        kept = (dict(self._run.summary.get(key) or {}) for key in (PAGE, TABLE))
        return [str(one["path"]) for one in kept if "path" in one]

    def answer(self, step: int, page: str, table: dict[str, list[Any]]) -> None:
        """Keep a row with a page in HTML, and a table with a list a column."""
        import wandb

        assert self._temporary is not None
        os.environ["WANDB_DATA_DIR"] = str(self._temporary.resolve())  # for a copy of the table
        lines = list(map(list, zip(*table.values(), strict=True)))
        shown = wandb.Table(columns=list(table), data=lines, allow_mixed_types=True)
        html = wandb.Html(page, inject=False, data_is_not_path=True)
        self.rows([{"step": step, PAGE: html, TABLE: shown}])

    def finish(self, end: End) -> int | None:
        """Return how many rows the server has: wandb is silent about what it has refused.

        Raises TimeoutError when the upload does not end in time.
        """
        path, url = self._run.path, self._run.url if self._online else None
        files = self._files()
        self._run.summary.update(end.summary)
        if end.exit_code == PREEMPTED:
            self._run.mark_preempting()  # else wandb calls it failed
        self._run.finish(exit_code=end.exit_code)
        there = rows_there(path, end.rows, ARRIVAL_S, files) if self._online else None
        if there is not None and there >= end.rows > 0 and end.complete:
            uploaded = {
                "project": self._position.project or self._fields.project,
                "step": end.last_step,
                "exit_code": end.exit_code,
                "url": url,
            }
            write_position(self._run_dir, replace(self._position, uploaded=uploaded))
        if self._settings:  # the process ends next; an exit hook of wandb would do it too
            import wandb

            wandb.teardown(exit_code=end.exit_code)
        self._remove_temporary()
        return there

    def give_up(self, *, kill: bool) -> None:
        forget_wandb(kill=kill)
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _with_maps(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with each list over the layers as a histogram with a bin a layer.

    Over steps wandb draws these as a heat map. It takes no more than so many bins.
    """
    import wandb

    most = wandb.Histogram.MAX_LENGTH
    found = {key: value for key, value in row.items() if not isinstance(value, list)}
    for key in row.keys() - found:
        values, edges = np.array(row[key]), np.arange(len(row[key]) + 1)
        if len(values) <= most:
            found[key] = wandb.Histogram(np_histogram=(values, edges))
    return found


def import_wandb(temporary: Path | None = None) -> Any:
    """Import wandb and return its settings.

    The folders for temporary files that wandb makes then go into `temporary`, which is made anew.
    Raises ImportError.
    """
    # wandb reports its errors to its server, and at exit waits up to 20 s for a silent one.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    with contextlib.ExitStack() as stack:
        if temporary is not None and "wandb" not in sys.modules:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
            tempfile.tempdir = str(temporary)
        import wandb

    return wandb.setup(wandb.Settings(silent=True)).settings


def rows_there(path: str, wanted: int, wait_s: float, files: Sequence[str]) -> int:
    """Return how many rows the server has of a run; the last of `wanted` counts with its files.

    Waits until they are `wanted`, about `wait_s` at most.
    """
    import wandb

    api, deadline = wandb.Api(timeout=10), time.monotonic() + wait_s
    while True:
        run = api.run(path)
        there = int(run.historyLineCount or 0)
        if there >= wanted and files:
            # a file that was announced and never came has the md5 "0"
            came = {file.name for file in run.files(list(files)) if file.md5 != "0"}
            there = there if came >= set(files) else wanted - 1
        if there >= wanted or time.monotonic() >= deadline:
            return there
        time.sleep(0.5)
        api.flush()


def mark_runs(marks: dict[str, dict[str, Any]]) -> None:
    """Put values into the summaries of runs that are over, several at a time.

    None removes an earlier value.
    """
    import wandb

    api = wandb.Api(timeout=10)

    def mark(path: str) -> None:
        run = api.run(path)
        there = dict(run.summary_metrics)
        known = {key: value for key, value in marks[path].items() if value is not None}
        stale = (marks[path].keys() - known) & there.keys()
        for key in stale:
            del run.summary[key]
        if stale or known != {key: there.get(key) for key in known}:
            run.summary.update(known)

    # not an executor: Python would wait for its threads at the end, whatever hangs
    with ThreadPool(AT_A_TIME) as pool:
        pool.map(mark, marks, chunksize=1)


def has_login(settings: Any) -> bool:
    """Return whether wandb would find credentials for its server without asking for them."""
    return bool(settings.api_key) or _knows(settings.base_url)


def may_have_login() -> bool:
    """Return the same without importing wandb, from the files of settings that it would read."""
    found = {"base_url": "https://api.wandb.ai"}
    here = ".wandb" if Path(".wandb").exists() else "wandb"
    for folder in (os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", here):
        parser = configparser.ConfigParser()
        with contextlib.suppress(OSError, RuntimeError, UnicodeDecodeError, configparser.Error):
            parser.read(Path(folder, "settings").expanduser())
            found |= parser.items("default")
    server = os.environ.get("WANDB_BASE_URL") or found["base_url"]
    return bool(found.get("api_key")) or _knows(server)


def _knows(server: str) -> bool:
    variables = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    passwords = netrc_passwords()
    try:
        known = urlsplit(server).netloc in passwords
    except ValueError:  # not an address, which wandb says itself
        known = False
    return known or "default" in passwords or any(os.environ.get(name) for name in variables)


def check_login(what: str = "nothing could be uploaded") -> None:
    """Raise ConfigError when no server can be asked from here, with the way to change that."""
    problem = ""
    kind: Kind = "missing_value"
    try:
        settings = import_wandb()
        if not has_login(settings):
            problem = f"no login for {settings.base_url}; to log in: wandb login, or set "
            problem += "WANDB_API_KEY"
    except ImportError as error:
        kind = "missing_package"
        problem = f"wandb cannot be imported ({one_line(error)}); to install it: pip install wandb"
    if problem:
        raise ConfigError(kind, f"{what}: {problem}; then the same command again")


def forget_wandb(*, kill: bool) -> None:
    """Drop wandb's exit hook, which would wait again for what was given up; `kill` its process.

    There is no public way while a call hangs, and after a failed start the process keeps the run id
    taken. A process that is left alive ends by itself after this one.
    """
    with contextlib.suppress(Exception):
        setup = sys.modules["wandb.sdk.wandb_setup"]
        connection, setup._singleton = setup._singleton._connection, None  # type: ignore[attr-defined]
        connection._cleanup()
        if connection.owns_service:
            os.environ.pop("WANDB_SERVICE", None)
            if kill:
                connection._finalizer.close()  # else it would print a traceback when it finds out
                connection._proc._process.kill()
                connection._proc.join()
                ending = threading.Thread(target=connection._asyncer.join, daemon=True)
                ending.start()
                ending.join(5)  # else asyncio may print that a task of it is pending
