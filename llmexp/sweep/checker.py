"""Checks points in a process of its own, so that torch and the devices stay out of the sweep's.

Its two ends: `Checker` in the sweep's process, `serve` in the other one.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from llmexp.config import ConfigError, build, plain
from llmexp.environment import redacted
from llmexp.process import die_with_parent, never_fail_to_print
from llmexp.sweep.ledger import identity
from llmexp.sweep.points import Point
from llmexp.sweep.progress import counted


class Checker:
    """A process that assembles points (the end of this file), so that torch and the devices stay out of this one. It
    imports torch while the points are composed."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "llmexp.sweep.checker"]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0)

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
        """An answer for each point: {"refused": reason}, or what is known of its run. `purpose` check prepares the
        data, which the runs need anyway; queue also makes the folders of the runs. Raises ConfigError."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        found = []
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({purpose: [p.request() for p in points]}), file=self._child.stdin, flush=True)
            for _ in counted({"check": "checking", "queue": "queueing"}[purpose], points):
                if line := self._child.stdout.readline():
                    found.append(json.loads(line))
        if len(found) < len(points):
            code = self._child.wait()
            raise ConfigError(f"the check of the sweep's points ended with exit code {code}")
        return found


def answer(purpose: str, request: dict[str, Any], shared: Any) -> dict[str, Any]:
    """In the checker's process: what becomes of a point. `shared`: what the points have in common. Raises
    ConfigError."""
    from llmexp import folder
    from llmexp.assemble import assemble
    from llmexp.train import worker

    parts = assemble(build(request["config"]), write=True, shared=shared)
    if purpose == "queue":
        path, fresh = worker.open_folder(parts, request)
        if fresh or not worker.is_finished(path):
            with folder.locked(path):
                worker.record(path, parts, request, "queued")
    import torch

    run = parts.run
    return {
        "solved": identity(plain(parts.config)),  # also what was null
        "max_steps": run.max_steps,
        "max_tokens": run.max_tokens,
        "ranks": run.facts.layout.nproc_per_node,
        "devices": torch.cuda.device_count() if run.facts.device == "cuda" else 0,
    }


def serve() -> None:
    """Answers questions until standard input ends."""
    from llmexp.building import Shared

    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            ((purpose, requests),) = json.loads(line).items()
            shared = Shared()  # for one question: files may change until the next one
            for request in requests:
                try:
                    found = answer(purpose, request, shared)
                except ConfigError as error:
                    found = {"refused": redacted(str(error))}
                except Exception as error:  # of a function of the user's, or of the disk
                    found = {"refused": redacted(f"{type(error).__name__}: {error}")}
                print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    die_with_parent()
    never_fail_to_print()
    from llmexp import provenance

    provenance.begin()  # once, for all points
    import llmexp.train.worker  # noqa: F401 (slow; before there is anything to do)

    serve()
