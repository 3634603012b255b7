"""Start the ranks of a run on this host, watch them, and say how the run ended."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmexp.config.values import ConfigError
from llmexp.folders import ending, rundir
from llmexp.mesh import ranks
from llmexp.mesh.groups import note_file
from llmexp.system import fileio
from llmexp.system.child import DONE, FAILED, PREEMPTED, REFUSED, how_it_died
from llmexp.train import failing, folder, group
from llmexp.train.assembly.assemble import Parts
from llmexp.train.failing import Failure


def run(path: Path, parts: Parts, request: dict[str, Any], record_late: bool) -> int:
    """Start this host's ranks for the run and watch them; return the exit code.

    With `record_late`, for a command that waits, ranks of one host that refuse the checkpoint or
    the rows leave the folder as it was, but for logs and provenance of this start.
    """
    # of several hosts rank 0 locks and records, once all are there
    one_host = parts.run.layout.nnodes == 1
    before: dict[Path, bytes] = {}
    with contextlib.ExitStack() as stack:
        if one_host:
            stack.enter_context(rundir.locked(path))
            if record_late and "folder" in request:  # of a command
                before = {f: f.read_bytes() for f in folder.describing(path) if f.exists()}
            folder.record_run(path, parts, request)
        try:
            code, text = watch(path, parts)
        except SystemExit as stopped:
            end = replace(failing.failure_of(stopped), text="stopped before it could save")
            return failing.record_failure(path, end, ours=one_host)
        if code == FAILED:
            text = f"{text}; the logs of all ranks are in {path / 'logs'}"
        if text:  # on several hosts the run may be another start's
            ours = one_host or not rundir.is_alive(path, rundir.read_status(path))
            failing.record_failure(path, Failure(code, text), ours=ours)
        for file, content in before.items() if code == REFUSED else ():
            fileio.write_whole(file, content)
        return code


def watch(path: Path, parts: Parts) -> tuple[int, str]:
    """Start this host's ranks and wait: (exit code, what went wrong).

    The trace of the rank that failed first is printed. Raises ConfigError, and SystemExit when a
    signal stops the ranks before they could save.
    """
    chosen, layout = parts.config.parallelism, parts.run.layout
    first_rank, meeting = 0, dict[str, str]()
    if layout.nnodes > 1:
        first_rank, meeting = ranks.place_of_this_host(layout.nnodes, layout.nproc_per_node)
    plan = ranks.Plan(
        path,
        layout.nproc_per_node,
        layout.world_size,
        first_rank,
        meeting,
        parts.run.threads_per_rank,
        chosen.max_restarts if layout.nnodes == 1 else 0,
    )
    accounts: list[dict[str, Any]] = []

    def lost(rank: int, code: int) -> bool:
        accounts.append(_account_of(path, rank, code))
        return bool(accounts[-1]["final"])

    code = ranks.run_ranks(plan, lost)
    if code in (DONE, PREEMPTED):
        return code, ""
    sys.stderr.write(accounts[-1]["trace"])
    return accounts[-1]["exit_code"], group.reported(accounts[-1])


def _account_of(path: Path, rank: int, code: int) -> dict[str, Any]:
    """Return how a rank has failed, as it has noted it; of one that was killed, what is known."""
    with contextlib.suppress(ConfigError):
        account: dict[str, Any] = fileio.read_json(note_file(path, rank))
        if "text" in account:
            return account
    text = how_it_died(code, False, f"rank {rank}") + ending.bus_error(path, code)
    known = {"exit_code": max(code, FAILED), "text": text, "trace": "", "final": False}
    return group.leave_note(path, rank, **known)
