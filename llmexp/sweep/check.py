"""Assemble points in a process of its own, for `Checker`: `python -m llmexp.sweep.check`."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from llmexp import features
from llmexp.config.convert import build
from llmexp.config.kinds import kind_of_error
from llmexp.config.sections import plain
from llmexp.config.values import ConfigError
from llmexp.folders import rundir
from llmexp.folders.ledger import PointFacts, config_identity
from llmexp.forecast.fitting import with_size
from llmexp.modes import micro_batch
from llmexp.system.child import STOP, die_with_parent, end_process, never_fail_to_print
from llmexp.system.redact import redacted
from llmexp.train import folder
from llmexp.train.assembly.assemble import Cache, Parts, admitted, assemble


def answer(
    purpose: str, request: dict[str, Any], shared: Cache, waiting: dict[str, tuple[str, Parts]]
) -> dict[str, Any]:
    """Return the facts of a point, assembled or from `waiting`; queue its run if that is asked.

    `shared`: what points have in common. `waiting`: the points that were checked and are not yet
    queued, by their folders, each with its request. Raises ConfigError.
    """
    path, known = Path(request["folder"]), folder.known_of(request)
    place = request["folder"] if rundir.is_run(path) else ""
    key = json.dumps([request["config"], place, str(known)], sort_keys=True)
    checked, parts = waiting.pop(request["folder"], ("", None))
    if parts is None or checked != key:
        config, assembled = (
            build(request["config"]),
            functools.partial(assemble, cache=shared, **known),
        )
        # of several hosts the ranks find it, once they are there
        find = with_size if config.parallelism.nnodes == 1 else None
        parts = admitted(micro_batch.run(config, assembled, path, find))
    if purpose == "check":
        waiting[request["folder"]] = key, parts
    if purpose == "queue":
        path, fresh = folder.open_folder(parts, request)
        if fresh or not folder.is_finished(path, parts.run.max_steps):
            with rundir.locked(path):
                folder.record_run(path, parts, request, "queued")
    if purpose == "lengthen" and place:
        folder.refuse_other_run(path, parts)
    run = parts.run
    devices = torch.cuda.device_count() if run.device == "cuda" else 0
    solved = config_identity(plain(parts.config))
    return vars(PointFacts(solved, devices, run.as_dict() | {"own_tokens": run.own_tokens}))


def serve() -> None:
    """Answer questions until standard input ends."""
    answers, waiting = sys.stdout, dict[str, tuple[str, Parts]]()
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            ((purpose, requests),) = json.loads(line).items()
            shared = Cache()  # for one question: files may change until the next one
            for request in requests:
                try:
                    found = answer(purpose, request, shared, waiting)
                except ConfigError as error:
                    found = {"kind": error.kind, "refused": redacted(str(error))}
                except Exception as error:  # of a function of the user's, or of the disk
                    text = redacted(f"{type(error).__name__}: {error}")
                    found = {"kind": kind_of_error(error, "bad_own_part"), "refused": text}
                try:
                    print(json.dumps(found), file=answers, flush=True)
                except BrokenPipeError:  # the command that asked is gone
                    end_process(0)


if __name__ == "__main__":
    die_with_parent()
    never_fail_to_print()
    STOP.install()
    for start in features.offered("folders", "start"):  # once, for all points
        start()
    serve()
