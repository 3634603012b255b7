"""Find the place where hosts meet, and which of them are there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
from pathlib import Path

FRESH_S = 10.0  # how long a host counts as there after it has shown itself


class HostsMissing(RuntimeError):
    """Some hosts did not come in time; the text says which did."""


def rendezvous(nnodes: int, name: str) -> tuple[str, str]:
    """Return (endpoint, id) where the agents of all hosts meet: a free local port for one host,
    else $LLMEXP_RDZV_ENDPOINT, else what Slurm says. `name` tells runs apart that meet at the same
    port. Raises ValueError where nothing says it.
    """
    env = os.environ
    if nnodes == 1:
        return "localhost:0", uuid.uuid4().hex
    job = env.get("SLURM_JOB_ID")
    attempt = f"{job}.{env.get('SLURM_RESTART_COUNT', '0')}" if job else name
    if endpoint := env.get("LLMEXP_RDZV_ENDPOINT"):
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(
                f"LLMEXP_RDZV_ENDPOINT={endpoint}: HOST:PORT is needed; for example host1:29400"
            )
        return endpoint, attempt
    if job and (address := env.get("SLURM_LAUNCH_NODE_IPADDR")):
        return (
            f"{address}:{20000 + int(job) % 30000}",
            attempt,
        )  # jobs that share a node get ports of their own
    raise ValueError(
        f"parallelism.nnodes={nnodes}: nothing says where the hosts meet; on each, set for example "
        "LLMEXP_RDZV_ENDPOINT=host1:29400, or start it with launchers/slurm.sbatch"
    )


def hosts_there(here: Path) -> list[str]:
    """Return the hosts whose agents keep touching their files beside `here`, this one's. Needs no
    network, and no clock but that of the file system."""
    here.touch()
    now = here.stat().st_mtime
    return sorted(
        p.name.rpartition(".")[0]
        for p in here.parent.iterdir()
        if p.stat().st_mtime > now - FRESH_S
    )


def who_came(here: Path, nnodes: int, endpoint: str, start_timeout_s: float) -> str:
    """Return which hosts are there, and which are not."""
    there = hosts_there(here)
    names, waited = ", ".join(there), f"{endpoint} within {start_timeout_s:g} s"
    if len(there) >= nnodes:
        return (
            f"all {nnodes} hosts are there ({names}), but they did not meet at {waited}; do "
            "they all reach it?"
        )
    return (
        f"{len(there)} of {nnodes} hosts came to {waited}: {names}; missing: "
        f"{missing_hosts(there, nnodes)}"
    )


def missing_hosts(there: list[str], nnodes: int) -> str:
    """Return their names, where Slurm knows them, else their number."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["scontrol", "show", "hostnames", nodes]
            known = subprocess.run(
                command,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                timeout=10,
                check=True,
            ).stdout.split()
            if absent := sorted(set(known) - set(there)):
                return ", ".join(absent)
    return f"{nnodes - len(there)} more"
