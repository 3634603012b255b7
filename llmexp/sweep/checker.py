"""Have the points of a sweep checked by another process, so that torch and the devices stay out of
this one."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence
from typing import Any

from llmexp.child import start
from llmexp.config import ConfigError
from llmexp.sweep.points import Point
from llmexp.sweep.progress import counted


class Checker:
    """The process that assembles points (sweep/check.py). It imports torch while the points are
    composed."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._child = start("llmexp.sweep.check", stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Checker:
        return self

    def __exit__(self, *unused: object) -> None:
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()

    def ask(self, purpose: str, points: Sequence[Point]) -> list[dict[str, Any]]:
        """Return an answer for each point: {"refused": reason}, or what is known of its run.
        `purpose` check prepares the data, which the runs need anyway; queue also makes the folders
        of the runs. Raises ConfigError."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        found = []
        with contextlib.suppress(BrokenPipeError):
            print(
                json.dumps({purpose: [p.request() for p in points]}),
                file=self._child.stdin,
                flush=True,
            )
            for _ in counted({"check": "checking", "queue": "queueing"}[purpose], points):
                if line := self._child.stdout.readline():
                    found.append(json.loads(line))
        if len(found) < len(points):
            code = self._child.wait()
            raise ConfigError(f"the check of the sweep's points ended with exit code {code}")
        return found
