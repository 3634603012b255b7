"""Call wandb. No other file imports it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from llmexp.system.child import PREEMPTED
from llmexp.system.redact import netrc_passwords
from llmexp.tracker.fields import Fields

Mode = Literal["online", "offline"]


def set_up(temporary: Path | None = None) -> Any:
    """Return wandb's settings. The folders for temporary files that wandb makes when it is imported
    go into `temporary`, which is made anew. Raises ImportError."""
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


def start_run(
    fields: Fields, mode: Mode, root: Path, start_timeout_s: float, finish_timeout_s: float
) -> Any:
    """Return the run in wandb, new or as its server knows it, with tokens_seen below every curve;
    wandb's own files go to `root`."""
    import wandb

    wanted: dict[str, Any] = {
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
        "init_timeout": start_timeout_s,
        # Shorter than our own wait, so that what is left of it closes the files.
        "finish_timeout": max(finish_timeout_s - 3, 1),
        "finish_timeout_raises": True,
        "x_transaction_log_flush_interval": 0.1,  # seconds of rows that a kill can lose
    }
    known = wandb.Settings.model_fields  # the x_ ones come and go between versions
    run = wandb.init(
        project=fields.project,
        entity=fields.entity,
        name=fields.name,
        group=fields.group,
        job_type=os.environ.get("WANDB_JOB_TYPE") or "train",
        tags=fields.tags,
        notes=fields.notes,
        config=fields.config,
        id=fields.run_id,
        mode=mode,
        resume="allow",
        reinit="finish_previous",
        settings=wandb.Settings(**{key: value for key, value in wanted.items() if key in known}),
    )
    run.define_metric("tokens_seen")
    run.define_metric("*", step_metric="tokens_seen")
    return run


def finish_run(run: Any, summary: dict[str, Any], exit_code: int) -> None:
    """Raise TimeoutError when the upload does not end in time."""
    run.summary.update(summary)
    if exit_code == PREEMPTED:
        run.mark_preempting()  # else wandb calls it failed
    run.finish(exit_code=exit_code)


def rows_there(path: str, wanted: int, wait_s: float) -> int:
    """Return how many rows the server has of a run; waits until they are `wanted`, about `wait_s`
    at most."""
    import wandb

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
    variables = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if settings.api_key or any(os.environ.get(name) for name in variables):
        return True
    passwords = netrc_passwords()
    return urlsplit(settings.base_url).netloc in passwords or "default" in passwords


def leave(exit_code: int) -> None:
    """End wandb now; else an exit hook of it does."""
    import wandb

    wandb.teardown(exit_code=exit_code)


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
