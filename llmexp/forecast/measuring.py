"""Train a few steps of a run in a process of its own, with all its ranks, in a folder that goes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from llmexp.runs import rundir
from llmexp.settings.config import Config, plain
from llmexp.settings.convert import with_knobs
from llmexp.system import fileio
from llmexp.system.child import DONE, how_it_died, kill_family, start_worker
from llmexp.train.calibration import ASKED, FILE

ERRORS = "stderr.log"


class Died(Exception):
    """The process did not reach its end; the text is what it printed last."""


def measured(config: Config, what: str, disk: Path | None = None) -> dict[str, Any]:
    """Return what the run's steps took, with the seconds of its start and its end.

    With `what` "all" return the rest of it too (calibration). `disk`: a folder on the one that
    checkpoints are saved to. Raises Died.
    """
    prefix = "llmexp-steps-"
    with tempfile.TemporaryDirectory("", prefix, disk, ignore_cleanup_errors=True) as there:
        path = Path(there) / "run"
        path.mkdir()
        quiet = with_knobs(
            config,
            tracker={"kind": "none", "also": []},
            train={"stop_step": None, "profile_start": None},
            parallelism={"max_restarts": 0},
        )
        fileio.write_whole(path / rundir.CONFIG, yaml.safe_dump(plain(quiet)))
        started = time.time()
        env = {**os.environ, ASKED: what}
        process = start_worker(str(path), log=path / ERRORS, env=env)
        with contextlib.suppress(OSError):  # it goes first where memory runs out
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        try:
            code = process.wait()
        except BaseException:
            kill_family(process.pid)
            process.wait()
            raise
        ended = time.time()
        if code != DONE or not (path / FILE).is_file():
            printed = fileio.last_line(path / ERRORS).removeprefix("llmexp: ") if code > 0 else ""
            why = rundir.read_status(path).get("error") or printed
            raise Died(str(why) or how_it_died(code, stopped=False))
        found: dict[str, Any] = fileio.read_json(path / FILE)
    found["start_s"] = found.pop("began") - started
    found["end_s"] = ended - found.pop("ended")
    return found
