"""Start the ranks of this host, watch them, and start them again when one was lost.

A rank of a run is `python -m llmexp.train RUN_DIR`, with the variables of torchrun (RANK,
WORLD_SIZE, ...).
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmexp.config.values import ConfigError
from llmexp.mesh.groups import MEETING, STARTED, log_file, note_file
from llmexp.system import fileio
from llmexp.system.child import (
    DONE,
    FAILED,
    PREEMPTED,
    STOP_SIGNALS,
    how_it_died,
    pass_on,
    signals_passed_on,
    start,
)
from llmexp.system.devices import threads_per_rank
from llmexp.system.workers import start_worker, warm

GRACE_S = 8.0  # for ranks to leave after another one has failed; a hung process never does
_POLL_S = 0.05


@dataclass(frozen=True)
class Plan:
    """Hold what this host has to start."""

    run_dir: Path
    ranks: int  # on this host
    world_size: int
    first_rank: int
    meeting: dict[str, str]  # variables that say where hosts meet; empty: this host is alone
    threads: int
    max_restarts: int


def run_ranks(plan: Plan, note_failure: Callable[[int, int], bool]) -> int:
    """Start this host's ranks, wait for them and return the exit code of the run.

    When a rank fails, `note_failure(rank, exit_code)` is called at once; it says whether a new
    start would only fail again. A negative exit code is a signal. Raises SystemExit when a signal
    stopped the ranks before they could save.
    """
    logs = plan.run_dir / "logs"
    logs.mkdir(exist_ok=True)
    for old in logs.glob("meeting-*"):  # of a process that was killed
        with contextlib.suppress(OSError):
            old.unlink()
    ranks: list[subprocess.Popen[bytes]] = []
    with (
        open(log_file(plan.run_dir, plan.first_rank), "a+b") as log,  # reads what comes from now on
        signals_passed_on(ranks) as stopped,
        warm(plan.ranks > 1),
    ):
        for attempt in range(plan.max_restarts + 1):
            with started(plan, attempt, ranks):
                for rank in ranks if stopped else ():  # it may have come before they were there
                    pass_on(rank, stopped[0])
                code, final = wait(plan, ranks, log, note_failure)
            if code in (DONE, PREEMPTED) or final or stopped:
                break
            if attempt < plan.max_restarts:
                text = "a rank was lost; all start again from the newest checkpoint"
                print(f"llmexp: {text}", file=sys.stderr, flush=True)
    if stopped and (code > 128 or -code in STOP_SIGNALS):
        raise SystemExit(abs(code) % 128 + 128)
    return code


@contextlib.contextmanager
def started(plan: Plan, attempt: int, ranks: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Start this host's ranks, into `ranks`; none of them is left in the end."""
    # a file, because a free TCP port could be another process's before rank 0 listens on it
    meeting = plan.run_dir.absolute() / "logs" / f"meeting-{os.getpid()}-{attempt}"
    where = plan.meeting or {MEETING: str(meeting)}
    try:
        for local in range(plan.ranks):
            ranks.append(start_rank(plan, local, where))
        yield
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        ranks.clear()
        meeting.unlink(missing_ok=True)


def start_rank(plan: Plan, local: int, where: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start one rank, whose output goes to its log.

    The standard output of the host's first rank goes to the console; train.log repeats it.
    """
    rank = plan.first_rank + local
    note_file(plan.run_dir, rank).unlink(missing_ok=True)  # of an earlier start
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": plan.world_size,
        "LOCAL_WORLD_SIZE": plan.ranks,
        "OMP_NUM_THREADS": plan.threads,
        STARTED: 1,
    }
    env = os.environ | where | {name: str(value) for name, value in variables.items()}
    with open(log_file(plan.run_dir, rank), "ab") as log:
        return start_worker(
            str(plan.run_dir),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=None if local == 0 else log,
            stderr=log,
        )


def wait(
    plan: Plan,
    ranks: list[subprocess.Popen[bytes]],
    log: BinaryIO,
    note_failure: Callable[[int, int], bool],
) -> tuple[int, bool]:
    """Wait for the ranks, and meanwhile print what comes into `log`.

    Return the exit code of the first one that failed, and what `note_failure` said of it.
    """
    failed: tuple[int, bool] | None = None
    for bad in _watched(ranks, (DONE, PREEMPTED)):
        with contextlib.suppress(OSError):
            print(log.read().decode(errors="replace"), end="", file=sys.stderr, flush=True)
        if bad and failed is None:
            first = min(bad, key=lambda i: _failed_at(plan, i))
            code = ranks[first].returncode
            failed = code, note_failure(plan.first_rank + first, code)
    return failed or (max(rank.returncode for rank in ranks), False)


def _watched(ranks: list[subprocess.Popen[bytes]], good: tuple[int, ...]) -> Iterator[list[int]]:
    """Yield which ranks have failed, again and again, until all have ended.

    `good` are the exit codes of ranks that have not failed. Once one has, the others have GRACE_S
    to leave before they are killed.
    """
    deadline = math.inf
    while True:
        codes = [rank.poll() for rank in ranks]
        yield (bad := [i for i, code in enumerate(codes) if code not in (None, *good)])
        if None not in codes:
            return
        if bad:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(_POLL_S)


def _failed_at(plan: Plan, local: int) -> float:
    """Return when a rank noted its failure; one that did not, killed by a signal, comes first."""
    file = note_file(plan.run_dir, plan.first_rank + local)
    with contextlib.suppress(OSError, ConfigError):
        return file.stat().st_mtime if "text" in fileio.read_json(file) else 0.0
    return 0.0


def run_alike(words: list[str], ranks: int) -> int:
    """Run a command of llmexp on so many ranks of this host; return its exit code.

    The first rank has the console; what another one that fails says last is printed.
    """
    with tempfile.TemporaryDirectory(prefix="llmexp-ranks-") as folder:
        place = {MEETING: f"{folder}/meeting", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place["OMP_NUM_THREADS"] = threads_per_rank(ranks)
        children: list[subprocess.Popen[bytes]] = []
        logs = [None, *(Path(folder) / f"{rank}.log" for rank in range(1, ranks))]
        try:
            with signals_passed_on(children) as stopped:
                for rank, log in enumerate(logs):
                    own = place | {"RANK": rank, "LOCAL_RANK": rank}
                    env = os.environ | {name: str(value) for name, value in own.items()}
                    children.append(start("llmexp", *words, log=log, env=env))
                for child in children if stopped else ():  # it may have come before they were there
                    pass_on(child, stopped[0])
                for _ in _watched(children, (DONE,)):
                    pass
        finally:
            for child in children:
                child.kill()
                child.wait()
        if stopped:
            return 128 + stopped[0]
        codes = [child.returncode for child in children]
        # one that was killed here had waited for another
        bad = [i for i, code in enumerate(codes) if code > 0] or [
            i for i, code in enumerate(codes) if code
        ]
        if not bad:
            return DONE
        if (log := logs[bad[0]]) is not None:
            sys.stderr.write(log.read_text(errors="replace"))
        if (code := codes[bad[0]]) < 0:
            died = how_it_died(code, False, f"rank {bad[0]}")
            print(f"llmexp: {died}", file=sys.stderr)
            return FAILED
        return code


def place_of_this_host(nnodes: int, ranks: int) -> tuple[int, dict[str, str]]:
    """Return the first of this host's `ranks`, and the variables that say where the hosts meet.

    Slurm says so to the process that it starts on each node. Raises ConfigError where it does not.
    """
    env = os.environ
    try:
        nodes, node = int(env["SLURM_NNODES"]), int(env["SLURM_NODEID"])
        job = int(env["SLURM_JOB_ID"])
        address = env.get("MASTER_ADDR") or env["SLURM_LAUNCH_NODE_IPADDR"]
    except (KeyError, ValueError):
        text = (
            "torchrun or Slurm starts the ranks of several hosts; on each of them, for example "
            "LLMEXP_RDZV_ENDPOINT=host1:29400 launchers/torchrun.sh RUN_DIR"
        )
        raise ConfigError("wrong_ranks", f"parallelism.nnodes={nnodes}: {text}") from None
    if nodes != nnodes:
        text = f"the Slurm job has {nodes} nodes; start it with sbatch --nodes={nnodes}"
        raise ConfigError("wrong_ranks", f"parallelism.nnodes={nnodes}: {text}")
    port = 20000 + job % 30000  # jobs that share a node get ports of their own
    return node * ranks, {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
