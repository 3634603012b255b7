"""The calls to wandb that a run in training and a later upload share. wandb itself is handed in."""

from __future__ import annotations

import contextlib
import netrc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

Row = dict[str, Any]
Mode = Literal["auto", "online", "offline"]

PREEMPTED = os.EX_TEMPFAIL  # the exit code of a run that was stopped with a checkpoint


@dataclass(frozen=True)
class Plan:
    """How a run is shown and where its files go; see `open_tracker`."""

    run_dir: Path
    project: str
    entity: str | None
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
    earlier: Sequence[Row] = ()


@dataclass(frozen=True)
class End:
    """The last thing in the queue."""

    summary: Row = field(default_factory=dict)
    exit_code: int = 0


def start_run(wandb: Any, plan: Plan, mode: str, root: Path) -> Any:
    """Return the run in wandb, new or as its server knows it, with tokens_seen below every
    curve."""
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
        "init_timeout": plan.start_timeout_s,
        # Shorter than our own wait, so that what is left of it closes the files.
        "finish_timeout": max(plan.finish_timeout_s - 3, 1),
        "finish_timeout_raises": True,
        "x_transaction_log_flush_interval": 0.1,  # seconds of rows that a kill can lose
    }
    known = wandb.Settings.model_fields  # the x_ ones come and go between versions
    run = wandb.init(
        project=plan.project,
        entity=plan.entity,
        name=plan.name,
        group=plan.group,
        job_type=os.environ.get("WANDB_JOB_TYPE") or "train",
        tags=plan.tags,
        notes=plan.notes,
        config=plan.config,
        id=plan.run_id,
        mode=mode,
        resume="allow",
        reinit="finish_previous",
        settings=wandb.Settings(**{key: value for key, value in wanted.items() if key in known}),
    )
    run.define_metric("tokens_seen")
    run.define_metric("*", step_metric="tokens_seen")
    return run


def log_row(run: Any, row: Row) -> None:
    # With its step, what is sent later lines up; and without `commit` a row with a step would wait
    # for the next one.
    run.log(row, step=row["step"], commit=True)


def finish_run(run: Any, end: End) -> None:
    """Raise TimeoutError when the upload does not end in time."""
    run.summary.update(end.summary)
    if end.exit_code == PREEMPTED:
        run.mark_preempting()  # else wandb calls it failed
    run.finish(exit_code=end.exit_code)


def rows_there(wandb: Any, path: str, wanted: int, wait_s: float) -> int:
    """Return how many rows the server has of a run; waits until they are `wanted`, about `wait_s`
    at most."""
    deadline = time.monotonic() + wait_s
    api = wandb.Api(timeout=10)
    while True:
        there = int(api.run(path).historyLineCount or 0)
        if there >= wanted or time.monotonic() >= deadline:
            return there
        time.sleep(0.5)
        api.flush()


def has_login(settings: Any) -> bool:
    """Return whether wandb would find credentials for its server without asking for them."""
    if (
        os.environ.get("WANDB_API_KEY")
        or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
        or settings.api_key
    ):
        return True
    for candidate in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        if candidate and (path := Path(candidate).expanduser()).exists():
            try:
                login = netrc.netrc(path).authenticators(urlsplit(settings.base_url).netloc)
            except (OSError, netrc.NetrcParseError):
                return False
            return bool(login and login[2])
    return False


def forget_wandb(*, kill: bool) -> None:
    """Drop wandb's exit hook, which would wait again for what has already been given up; `kill` its
    process.

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
                connection._proc._process.kill()
                connection._proc.join()


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
