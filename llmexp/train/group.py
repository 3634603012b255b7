"""A run on more than one rank: the agent that starts and watches a host's ranks, and what ranks owe
each other."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmexp import mesh
from llmexp.mesh import agent
from llmexp.mesh.watch import ENDED, FAILURES, GIVEN_UP, HostsMissing, Plan
from llmexp.runs import ending, provenance, rundir
from llmexp.settings.config import plain
from llmexp.settings.execution import Parallelism
from llmexp.settings.values import ConfigError
from llmexp.system import fileio
from llmexp.system.child import FAILED, REFUSED
from llmexp.train.assembly.assemble import Parts

REPORT_S = 4.0  # for all ranks that waited to report it


def supervise(path: Path, parts: Parts) -> tuple[int, str]:
    """Start this host's ranks and wait: (exit code, what went wrong). The code comes from
    status.json, because torch's agent flattens it. The trace of the rank that failed first is
    printed. Raises ConfigError, and SystemExit where a signal stops what has not begun to train.
    """
    chosen = parts.config.parallelism
    several = chosen.nnodes > 1
    # on one host no clock is asked: what is there is of this start
    began = time.time() if several else 0.0
    if not several:
        for old in (path / "logs").glob("failure-*.json"):
            old.unlink(missing_ok=True)
    plan = Plan(
        path,
        chosen.nnodes,
        parts.run.layout.nproc_per_node,
        parts.run.threads_per_rank,
        chosen.max_restarts,
        chosen.start_timeout_s,
        outcome=lambda: outcome(path, began),
    )
    try:
        death = agent.launch_ranks(plan)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except HostsMissing as error:
        return not_met(path, str(error), began)
    end = recorded_end(path, plan) if death is None else None
    if end is not None:
        return end, ""
    if death is not None and death.exit_code < 0:
        # for the other hosts, which only see that it has gone
        on = f" on {socket.gethostname()}" if several else ""
        text = f"{death}{on}{ending.bus_error(path, death.exit_code)}"
        report(path, death.rank, FAILED, text, "", killed=True)
    reports = [r for r in _reports(path) if r["time"] > began]
    if not several:  # what an earlier group failed of is over
        latest = max((r["restarts"] for r in reports if not r["killed"]), default=0)
        reports = [r for r in reports if r["killed"] or r["restarts"] == latest]
    if not reports:
        return FAILED, str(death or "another host has given up; its own output says why")
    # after a signal the others only saw what followed
    first = min(reports, key=lambda r: not r["killed"])
    sys.stderr.write(first["trace"])
    who = f" (rank {first['rank']} on {first['host']})" if first["trace"] else ""
    return first["exit_code"], first["text"] + who


def outcome(path: Path, began: float) -> tuple[str, float]:
    """Return what the run came to since then, and when; ("", 0) while it goes on."""
    status = rundir.read_status(path)
    state, when = status.get("state", ""), status.get("ended") or 0.0
    if when <= began:
        return "", 0.0
    return (GIVEN_UP if state == "failed" and status.get("final") else state), when


def recorded_end(path: Path, plan: Plan) -> int | None:
    """Return the exit code of a run whose ranks ended well, None where they did not. A
    status written on another host may take a moment to be seen here."""
    for _ in range(20):
        status = rundir.read_status(path)
        if status.get("state") in ENDED:
            return int(status["exit_code"])
        if plan.outcome()[0] in FAILURES:
            return None
        time.sleep(0.5)
    return None


def not_met(path: Path, error: str, began: float) -> tuple[int, str]:
    """Return how a start ends whose hosts did not all come. The hosts that met without this one, or
    an earlier start, decide how the run ends."""
    status = rundir.read_status(path)
    state = status.get("state")
    if state in ENDED or (state == "running" and rundir.is_alive(path, status)):
        return REFUSED, f"{error}; by its records this run is {state}, and it was left untouched"
    before = [r["text"] for r in _reports(path) if r["time"] > began]
    return FAILED, f"{error}; before that, {before[0]}" if before else error


def join(path: Path, parts: Parts) -> mesh.Mesh:
    """Return this rank's place among the ranks, which must all run the same code on the same
    config. Raises ConfigError."""
    p, layout = parts.config.parallelism, parts.run.layout
    try:
        joined = mesh.join(
            parts.device.type,
            p.kind,
            layout.replicate_size,
            layout.shard_size,
            layout.tensor_parallel_size,
            once=p.fsdp_communication == "once",
            backend=p.backend,
            timeout_s=p.start_timeout_s,
        )
    except ValueError as error:
        asked = f"{layout.nnodes} x {layout.nproc_per_node}"
        raise ConfigError(
            f"parallelism.nnodes x parallelism.nproc_per_node={asked}: {error}; start as many, or "
            f"go on with other numbers: {rundir.how_to_resume(path)} parallelism.nproc_per_node=2"
        ) from None
    for what, value in (
        ("config", plain(parts.config)),
        ("llmexp source", provenance.source_digest()),
        ("Python or library version", provenance.versions()),
    ):
        digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()
        if differing := mesh.differing_ranks(joined, digest):
            raise ConfigError(
                f"{path}: rank {', '.join(map(str, differing))} has another {what} than rank 0; "
                "all hosts need one shared run folder and the same versions"
            )
    return joined


@contextlib.contextmanager
def held(path: Path, joined: mesh.Mesh) -> Iterator[bool]:
    """Yield the folder's locks, held by rank 0 for all; False where an agent holds the first
    already. The second outlives an agent that was killed, while its ranks still save. Raises
    ConfigError, on all ranks."""
    alone = agent.LOCK_HELD not in os.environ
    with contextlib.ExitStack() as stack:
        refused: ConfigError | None = None
        if joined.rank == 0:
            try:
                if alone:
                    stack.enter_context(rundir.locked(path))
                stack.enter_context(rundir.locked(path, ".lock-ranks"))
            except ConfigError as error:
                refused = error
        if mesh.any_rank(joined, refused is not None)[0]:
            raise refused or ConfigError(f"{path}: another process is training in this folder")
        yield alone


def report(
    path: Path, rank: int, code: int, text: str, trace: str, *, killed: bool = False
) -> None:
    """Leave a rank's account of its failure where the agents find it; one that was `killed` has it
    left for it."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    where = {"rank": rank, "host": socket.gethostname(), "restarts": restarts}
    account = {"time": time.time(), **where, "exit_code": code, "text": text}
    with contextlib.suppress(OSError):
        (path / "logs").mkdir(exist_ok=True)
        fileio.write_json(
            path / "logs" / f"failure-{rank}.json", {**account, "trace": trace, "killed": killed}
        )


def _reports(path: Path) -> list[dict[str, Any]]:
    """Return the reports of failed ranks, the earliest first."""
    found = [fileio.read_json(p) for p in (path / "logs").glob("failure-*.json")]
    return sorted(found, key=lambda account: account["time"])


def given_up(path: Path) -> bool:
    """Return whether a rank of the group that the agent now starts again has failed in a way that
    would only come again."""
    status, since = rundir.read_status(path), os.environ.get(agent.STARTED)
    return bool(
        since
        and status.get("final")
        and status.get("state") == "failed"
        and status["ended"] > float(since)
    )


def absent_ranks(path: Path, joined: mesh.Mesh, error: str, p: Parallelism) -> str:
    """After a collective that failed for want of other ranks: which were not in it, or the empty
    string. Each rank that waited leaves a file in the run folder, which needs no network."""
    late = re.search(r"time(d )?-?out", error, re.I)
    # else the agent sees it
    lost = p.nnodes > 1 and re.search(r"connection (closed|reset)|broken pipe", error, re.I)
    if not joined.distributed or not (late or lost):
        return ""
    since, own = time.time(), path / "logs" / "waiting" / str(joined.rank)
    with contextlib.suppress(ConfigError, OSError, ValueError):
        own.parent.mkdir(parents=True, exist_ok=True)
        with open(own, "w") as f:
            f.write(socket.gethostname())
        time.sleep(REPORT_S)
        oldest = own.stat().st_mtime - 3 * REPORT_S  # by the clock of the file system
        there = [p for p in own.parent.iterdir() if p.stat().st_mtime > oldest]
        waited = {int(p.name): p.read_text() for p in there}
        known = {r["rank"] for r in _reports(path) if r["time"] > since - 3 * REPORT_S}
        absent = sorted(set(range(joined.world_size)) - waited.keys() - known)
        which = ", ".join(map(str, absent))
        if absent and late:
            return (
                f"rank {which} did not arrive within {p.timeout_s:g} s (hung, stopped or cut off)"
            )
        if absent:
            return f"rank {which} was lost (killed, or its host is down)"
        if late and p.nnodes > 1 and not known:
            hosts = [
                (host, sorted(r for r in waited if waited[r] == host))
                for host in sorted(set(waited.values()))
            ]
            ranks = ", ".join(
                f"{h} ({f'ranks {r[0]}-{r[-1]}' if len(r) > 1 else f'rank {r[0]}'})"
                for h, r in hosts
            )
            return (
                f"all ranks waited {p.timeout_s:g} s for each other and none arrived; is the "
                f"network between their hosts cut? {ranks}"
            )
    return ""
