"""Turn an exception into the end of a run: state, exit code, words, and where they are written."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from llmexp import mesh
from llmexp.config.kinds import Kind, kind_of_error
from llmexp.config.targets import own_line
from llmexp.config.values import ConfigError
from llmexp.data.stream import DataChanged
from llmexp.folders import ending, rundir
from llmexp.mesh.groups import STARTED
from llmexp.system.child import FAILED, REFUSED, STOP
from llmexp.system.fileio import Unwritable
from llmexp.system.redact import redacted
from llmexp.train import group
from llmexp.train.assembly.assemble import Parts
from llmexp.train.step import TrainingFailed

# These say all in their text, and would come again: they need no trace and no restart.
EXPLAINED = (ConfigError, TrainingFailed, Unwritable, DataChanged)


@dataclass(frozen=True)
class Failure:
    """Hold the meaning of an exception for the run."""

    exit_code: int
    text: str
    trace: str = ""
    kind: Kind = "failed"
    final: bool = True  # a restart would only meet it again
    state: str = "failed"


def failure_of(
    error: BaseException,
    path: Path | None = None,
    parts: Parts | None = None,
    joined: mesh.Mesh | None = None,
) -> Failure:
    """Return how an exception ends the run: exit code, words, and whether a restart would help."""
    if isinstance(error, SystemExit) and not STOP.training:  # by a signal
        code = error.code if isinstance(error.code, int) else FAILED
        return Failure(code, "stopped before the first step", "", "interrupted", state="preempted")
    code = REFUSED if isinstance(error, ConfigError) and not STOP.training else FAILED
    if isinstance(error, EXPLAINED):
        return Failure(code, str(error), kind=kind_of_error(error))
    text = f"{type(error).__name__}: {error}"
    local = isinstance(error, OSError)  # a file system, say, that timed out: no rank is missing
    if isinstance(error, torch.AcceleratorError):  # the rest is advice for a debugger
        text = (
            f"{text.splitlines()[0]}; the operation before may have failed: with "
            "CUDA_LAUNCH_BLOCKING=1 in the environment the trace names it"
        )
    if parts is not None and (
        isinstance(error, torch.OutOfMemoryError) or "allocate memory" in text
    ):
        reason = re.split(r"\. (?=GPU \d|Including|Of the|If reserved)", text)[0]
        text = (
            f"out of memory with micro_batch_size {parts.run.micro_batch_size} x "
            f"{parts.run.sequence_length} tokens; a smaller batch.micro_batch_size with more "
            f"batch.gradient_accumulation_steps computes the same ({reason})"
        )
        where = own_line(error, or_any=False)
        return Failure(code, f"{text} ({where})" if where else text, kind="too_large", final=False)
    if path is not None and parts is not None and joined is not None and not local:
        timeout_s = parts.config.parallelism.timeout_s
        absent = group.why_absent(path, joined.rank, joined.world_size, text, timeout_s)
        if absent:
            return Failure(code, absent, final=False)
    where = own_line(error, or_any=False)
    text = f"{text} ({where})" if where else text
    return Failure(code, text, traceback.format_exc(), kind_of_error(error), final=False)


def record_failure(path: Path | None, failure: Failure, *, ours: bool) -> int:
    """Print and record how the run ended; return the exit code.

    In a folder that is not `ours` another process may be at work: it is not touched. A rank that a
    process of ours started leaves the printing to that process.
    """
    code, text, trace = failure.exit_code, redacted(failure.text), redacted(failure.trace)
    rank = os.environ.get("RANK")
    if failure.state == "failed":
        if rank is not None and path is not None:
            account = {"exit_code": code, "text": text, "trace": trace, "final": failure.final}
            group.leave_note(path, int(rank), **account)
        if STARTED not in os.environ:
            _print(path if ours else None, code, text, trace)
        elif os.environ["LOCAL_RANK"] != "0":  # into its log; that of local rank 0 is shown
            print(f"{trace}{text}", file=sys.stderr)
    if path is None or not ours:
        return code
    with contextlib.suppress(OSError):  # the disk may be what failed
        # of several ranks, the first one to fail names the cause
        if rank is None or rundir.read_status(path).get("state") != "failed":
            ending.record_end(path, failure.state, code, text, kind=failure.kind)
    return code


def record_unbegun(path: Path | None, failure: Failure) -> int:
    """Print why a run did not begin and record it; return the exit code.

    Nothing is recorded in a folder where another process is at work.
    """
    failure = replace(failure, final=True)
    with contextlib.ExitStack() as locks:
        ours = path is not None and (failure.exit_code == FAILED or rundir.is_run(path))
        if path is not None and ours and STARTED not in os.environ:
            ours = _taken(path, locks)
        return record_failure(path, failure, ours=ours)


def _taken(path: Path, locks: contextlib.ExitStack) -> bool:
    """Return whether no other process holds the folder, and take its locks if the disk lets us."""
    try:
        locks.enter_context(rundir.locked(path))
        locks.enter_context(rundir.locked(path, ".lock-ranks"))
    except ConfigError:
        return False
    except OSError:  # the disk may be what failed
        return True
    return True


def _print(path: Path | None, code: int, text: str, trace: str) -> None:
    """Print a failure; with a `path`, also how to go on, and into the log there."""
    if path is not None and code != REFUSED:
        text = f"training failed: {text}; {ending.what_is_left(path, text)}"
    print(f"{trace}llmexp: {text}", file=sys.stderr)
    if path is not None:
        with (
            contextlib.suppress(OSError),
            open(path / rundir.LOG, "a", encoding="utf-8") as log,
        ):
            log.write(f"{trace}{text}\n")
