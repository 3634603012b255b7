"""Start the process that trains while the command composes, hand it the run, and wait for it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from llmexp.config.values import Plain, refusal
from llmexp.folders import rundir
from llmexp.folders.ending import conclude_run, how_it_left, what_is_left
from llmexp.system.child import DONE, FAILED, REFUSED, hand_over, how_it_died, signals_passed_on
from llmexp.system.redact import warn
from llmexp.system.workers import start_worker


class Worker:
    """A worker process that imports torch while the parent composes; unused, it is ended."""

    def __init__(self) -> None:
        report, self._child_end = os.pipe()
        self._report, pipe = os.fdopen(report, encoding="utf-8"), subprocess.PIPE
        self._process = start_worker("-", stdin=pipe, pass_fds=(self._child_end,), text=True)
        os.close(self._child_end)

    def close(self) -> None:
        """End a worker that got nothing to do; another one has ended."""
        with self._process:
            self._process.kill()
        self._report.close()

    def run(self, request: Plain) -> tuple[int, Path | None]:
        """Send the request and wait; return the exit code and the run folder, if one was made.

        Signals are passed on. Raises ConfigError for what the worker refuses before there is a
        folder."""
        with signals_passed_on([self._process]) as passed:
            hand_over(self._process, {**request, "report_fd": self._child_end})
            code = self._process.wait()
        found = json.loads(self._report.read() or "{}")
        if "error" in found:
            raise refusal(found["error"])
        path = Path(found["path"]) if found else None
        return concluded(code, path, bool(passed)), path


def concluded(code: int, path: Path | None, stopped: bool) -> int:
    """Return the exit code of the run in the folder.

    A death that the worker could not record itself is printed and recorded."""
    if path is None:
        if code >= 0:
            return code
        warn(f"{how_it_died(code, stopped)} before the run started")
        return FAILED
    running = rundir.read_status(path).get("state") == "running"
    if code in (DONE, REFUSED) or (code > 0 and not running):
        return code
    if code < 0:  # its ranks save
        rundir.wait_until_vacant(path)
    end = conclude_run(path, how_it_left(code), code=code, stopped=stopped)
    if end.found:
        what = "training failed: " if end.state == "failed" else ""
        warn(f"{what}{end.error}; {what_is_left(path, end.error or '')}")
    return end.exit_code
