"""Let the ranks of a run meet, hold its folder and say why they end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmexp import mesh
from llmexp.config.sections import plain
from llmexp.config.values import ConfigError, Plain
from llmexp.folders import rundir, versions
from llmexp.mesh.groups import STARTED, note_file
from llmexp.system import fileio
from llmexp.system.child import STOP_SIGNALS, handling
from llmexp.train.assembly.assemble import Parts
from llmexp.train.step import TrainingFailed

REPORT_S = 4.0  # for all ranks that miss others to report it


def join_ranks(path: Path, parts: Parts) -> mesh.Mesh:
    """Return this rank's place among the ranks.

    All must run the same code on the same config. Raises ConfigError.
    """
    p, layout = parts.config.parallelism, parts.run.layout
    rank = int(os.environ.get("RANK", "0"))
    try:
        with absence_named(path, parts), waiting(path, rank):
            joined = mesh.join(
                parts.device.type,
                p.kind,
                *layout.sizes,
                reduces_once=p.fsdp_communication == "once",
                sequence=p.sequence_parallel,
                backend=p.backend,
                timeout_s=p.start_timeout_s,
            )
    except ValueError as error:
        again = rundir.how_to_resume(path, "parallelism.nproc_per_node=2")
        raise ConfigError(
            "wrong_ranks",
            f"parallelism.nnodes x parallelism.nproc_per_node={layout.nnodes} x "
            f"{layout.nproc_per_node}: {error}; start as many, or continue with other numbers: "
            f"{again}",
        ) from None
    if not joined.distributed:
        return joined
    for what, value in (
        ("config", plain(parts.config)),
        ("llmexp source", versions.source_digest()),
        ("Python or library version", versions.versions()),
    ):
        if differing := mesh.differing_ranks(joined, json.dumps(value, default=str)):
            raise ConfigError(
                "wrong_ranks",
                f"{path}: rank 0 has another {what} than {mesh.numbered(differing)}; all hosts "
                "need one shared run folder and the same versions",
            )
    return joined


@contextlib.contextmanager
def held(path: Path, joined: mesh.Mesh) -> Iterator[bool]:
    """Hold the folder's locks, by rank 0 for all ranks; yield whether it took the first one.

    Where all ranks are on one host, the process that started them holds that one. The second lock
    outlives that process while its ranks still save. Raises ConfigError, on all ranks.
    """
    env = os.environ
    takes_first = STARTED not in env or env["LOCAL_WORLD_SIZE"] != env["WORLD_SIZE"]
    with contextlib.ExitStack() as stack:
        refused: ConfigError | None = None
        if joined.rank == 0:
            try:
                if takes_first:
                    stack.enter_context(rundir.locked(path))
                stack.enter_context(rundir.locked(path, ".lock-ranks"))
            except ConfigError as error:
                refused = error
        if mesh.any_rank(joined, refused is not None)[0]:
            raise refused or ConfigError(
                "busy", f"{path}: another process is training in this folder"
            )
        yield takes_first


@contextlib.contextmanager
def absence_named(path: Path, parts: Parts) -> Iterator[None]:
    """Name the ranks that did not come when ranks meet; that is a TrainingFailed."""
    rank, timeout_s = int(os.environ.get("RANK", "0")), parts.config.parallelism.start_timeout_s
    try:
        yield
    except RuntimeError as error:
        text = why_absent(path, rank, parts.run.world_size, str(error), timeout_s)
        if not text:
            raise
        raise TrainingFailed(text) from None


@contextlib.contextmanager
def waiting(path: Path, rank: int) -> Iterator[None]:
    """Show the other ranks that this one waits for them; the file stays if they do not come."""
    if "RANK" not in os.environ:
        yield
        return
    leave_note(path, rank)
    with handling(STOP_SIGNALS, signal.SIG_DFL):  # torch waits where no handler of Python's runs
        yield
    note_file(path, rank).unlink(missing_ok=True)


def why_absent(path: Path, rank: int, world_size: int, error: str, timeout_s: float) -> str:
    """Return why other ranks were not there, after a communication that failed; "" if they were."""
    late = re.search(r"time(d )?-?out", error, re.I)
    lost = re.search(r"connection (closed|reset|was likely closed)|broken pipe", error, re.I)
    if world_size == 1 or not (late or lost):
        return ""
    leave_note(path, rank)
    end = time.monotonic() + REPORT_S
    while True:
        notes = notes_of_this_start(path, world_size)
        if failed := [note for note in notes if "text" in note]:
            return reported(failed[0])
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    waited = {note["rank"]: note["host"] for note in notes}
    absent = [r for r in range(world_size) if r not in waited]
    if absent and late:
        how = f"did not arrive within {timeout_s:g} s (hung, stopped or cut off)"
        return f"{mesh.numbered(absent)} {how}"
    if absent:
        return f"{mesh.numbered(absent)} was lost (killed, or its host is down)"
    hosts = {host: [r for r in sorted(waited) if waited[r] == host] for host in waited.values()}
    if not late or len(hosts) == 1:
        return ""
    there = ", ".join(f"{host} ({mesh.numbered(hosts[host])})" for host in sorted(hosts))
    return (
        f"all ranks waited {timeout_s:g} s for each other and none arrived; is the network between "
        f"their hosts down? {there}"
    )


def leave_note(path: Path, rank: int, **account: Any) -> Plain:
    """Note on which host a rank waits, or its account of a failure, which needs no network.

    Its starter and the other ranks read it. An account is `final` where a new start would only fail
    again.
    """
    note = {"rank": rank, "host": socket.gethostname(), "start": this_start(), **account}
    with contextlib.suppress(OSError):
        (path / "logs").mkdir(exist_ok=True)
        fileio.write_json(note_file(path, rank), note)
    return note


def notes_of_this_start(path: Path, world_size: int) -> list[Plain]:
    """Return what ranks of this start have noted, the oldest first."""
    found = []
    for rank in range(world_size):
        file = note_file(path, rank)
        with contextlib.suppress(OSError, ConfigError, KeyError):
            note = fileio.read_json(file)
            if note["start"] == this_start():
                found.append((file.stat().st_mtime, rank, note))
    return [note for _, _, note in sorted(found, key=lambda one: one[:2])]


def this_start() -> str:
    """Return what the ranks of one start have in common, on all hosts.

    A later start of the same run has something else, unless a launcher gives it the same port.
    """
    env = os.environ
    names = ["SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"]
    # our own starter gives its ranks a port that it does not have itself
    names += ["MASTER_PORT"] if "RANK" in env and STARTED not in env else []
    return " ".join(env.get(name, "") for name in names)


def reported(account: Plain) -> str:
    """Return what a rank said of its failure, and which rank it was if only the trace tells."""
    who = f" (rank {account['rank']} on {account['host']})" if account["trace"] else ""
    return f"{account['text']}{who}"
