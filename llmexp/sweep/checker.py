"""Have points checked by another process, which keeps torch and the devices out of this one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Sequence
from typing import Any

from llmexp.runs.ledger import PointFacts
from llmexp.settings.values import ConfigError
from llmexp.sweep.composing import counted
from llmexp.sweep.points import Point, Refused
from llmexp.system.child import start


class Checker:
    """The process that assembles points; it imports torch while the points are composed."""

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

    def check(
        self, points: Sequence[Point], purpose: str = "check"
    ) -> tuple[list[Point], list[Refused]]:
        """Return the points that can run, with the facts of their runs, and the others.

        Data are prepared, which the runs need anyway. With `lengthen` each point goes on with the
        run in its folder. Raises ConfigError.
        """
        able: list[Point] = []
        refused: list[Refused] = []
        for point, found in zip(points, self._ask(purpose, points), strict=True):
            if "refused" in found:
                refused.append(point.refused(found["refused"]))
            else:
                able.append(dataclasses.replace(point, checked=PointFacts(**found)))
        return able, refused

    def queue(self, points: Sequence[Point]) -> list[str]:
        """Make the folders of the points' runs; return for each why that failed, or an empty text.

        Raises ConfigError.
        """
        return [found.get("refused", "") for found in self._ask("queue", points)]

    def _ask(self, purpose: str, points: Sequence[Point]) -> list[dict[str, Any]]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        question = json.dumps({purpose: [point.request() for point in points]})
        found = []
        with contextlib.suppress(BrokenPipeError):
            print(question, file=self._child.stdin, flush=True)
            for _ in counted(f"{purpose}ing", points):
                if line := self._child.stdout.readline():
                    found.append(json.loads(line))
        if len(found) < len(points):
            code = self._child.wait()
            raise ConfigError(f"the check of the sweep's points ended with exit code {code}")
        return found
