"""Starting ranks: torch's elastic agent (what torchrun runs), one on each host.

An agent starts `python -m llmexp.train RUN_DIR` once a rank. When one dies it ends the others and, up to
`max_restarts` times, starts them all again, on all hosts together; they go on from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


STARTED = "LLMEXP_AGENT_STARTED"  # tells the ranks that an agent reports for them, and since when
LOCK_HELD = "LLMEXP_LOCK_HELD"  # the agent holds the run folder's lock for its ranks
GRACE_S = 8.0  # for ranks to leave after another one has failed; a stopped process never does


class HostsMissing(RuntimeError):
    """Not all hosts came together in time; the text says which did."""


@dataclass(frozen=True)
class Death:
    """A rank that ended without being able to say why."""

    rank: int
    exit_code: int  # negative: the signal

    def __str__(self) -> str:
        if self.exit_code >= 0:
            return f"rank {self.rank} ended with exit code {self.exit_code}"
        name = signal.Signals(-self.exit_code).name
        hint = "; out of memory?" if -self.exit_code == signal.SIGKILL else ""
        return f"rank {self.rank} was ended by signal {-self.exit_code} ({name}{hint})"


def rendezvous(nnodes: int) -> tuple[str, str]:
    """(endpoint, id) where the agents of all hosts meet: a free local port for one host, else $LLMEXP_RDZV_ENDPOINT,
    else what Slurm says. Raises ValueError where nothing says it.
    """
    env = os.environ
    if nnodes == 1:
        return "localhost:0", uuid.uuid4().hex
    job = env.get("SLURM_JOB_ID")
    attempt = f"{job}.{env.get('SLURM_RESTART_COUNT', '0')}" if job else "llmexp"
    if endpoint := env.get("LLMEXP_RDZV_ENDPOINT"):
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"LLMEXP_RDZV_ENDPOINT={endpoint}: HOST:PORT is needed; for example host1:29400")
        return endpoint, env.get("LLMEXP_RDZV_ID", attempt)
    if job and (address := env.get("SLURM_LAUNCH_NODE_IPADDR")):
        return f"{address}:{20000 + int(job) % 30000}", attempt  # jobs that share a node get ports of their own
    raise ValueError(
        f"parallelism.nnodes={nnodes}: nothing says where the hosts meet; set LLMEXP_RDZV_ENDPOINT=HOST:PORT on each, "
        "or start it with launchers/torchrun.sh or launchers/slurm.sbatch"
    )


def launch_ranks(
    run_dir: Path,
    *,
    nnodes: int,
    nproc_per_node: int,
    threads: int,
    max_restarts: int,
    start_timeout_s: float,
    failed_at: Callable[[], float],
) -> Death | None:
    """Starts this host's ranks and waits for them; None, or the first death when the group failed for good.

    Rank 0 writes to the console; every rank's output is in run_dir/logs. `failed_at` says when a rank recorded a
    failure (seconds since 1970), or 0. Raises HostsMissing.
    """
    endpoint, run_id = rendezvous(nnodes)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says is said here, in words
    hosts = run_dir / "logs" / "hosts"
    hosts.mkdir(parents=True, exist_ok=True)
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    here = hosts / f"{name}.{os.getpid()}"
    here.touch()
    os.environ |= {
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
        "OMP_NUM_THREADS": str(threads),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restarted group would read the old group's keys
        STARTED: str(time.time()),
    }
    launch = LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=nproc_per_node,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={"join_timeout": int(start_timeout_s) + 1},
        run_id=run_id,
        max_restarts=max_restarts,
        monitor_interval=0.1,
        log_line_prefix_template="[rank ${rank}] ",
        # Rank 0 keeps the console as its standard output; what it prints there is in train.log too.
        logs_specs=DefaultLogsSpecs(
            log_dir=str(run_dir / "logs" / name),
            redirects={n: Std.ALL if n else Std.ERR for n in range(nproc_per_node)},
            tee={0: Std.ERR},
        ),
    )
    if hasattr(launch, "signals_to_handle"):
        launch.signals_to_handle = "SIGQUIT"
    try:
        with forwarded_signals(), watched_ranks(failed_at, nproc_per_node) as killed:
            elastic_launch(launch, sys.executable)("-P", "-u", "-m", "llmexp.train", str(run_dir))
    except ChildFailedError as error:
        codes = {rank: 1 if f.pid in killed else f.exitcode for rank, f in error.failures.items()}
        rank = min(codes, key=lambda r: (codes[r] >= 0, r))  # a signal comes from outside: the others followed
        return Death(rank, codes[rank])
    except (RendezvousTimeoutError, RendezvousConnectionError) as error:
        there = sorted({p.name.rpartition(".")[0] for p in hosts.iterdir()})
        raise HostsMissing(
            f"{len(there)} of {nnodes} hosts came to {endpoint} within {start_timeout_s:g} s: {', '.join(there)}; "
            f"missing: {missing_hosts(there, nnodes)} ({error or type(error).__name__})"
        ) from None
    finally:
        here.unlink(missing_ok=True)
    return None


def missing_hosts(there: list[str], nnodes: int) -> str:
    """Their names, where Slurm knows them, else their number."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes:
        import subprocess

        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["scontrol", "show", "hostnames", nodes]
            known = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
            if absent := sorted(set(known) - set(there)):
                return ", ".join(absent)
    return f"{nnodes - len(there)} more"


def children() -> list[int]:
    """The processes that this one has started."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


@contextlib.contextmanager
def forwarded_signals() -> Iterator[None]:
    """Passes stop signals on to the ranks, which then save; the agent's own way would kill them after 30 s."""

    def forward(number: int, frame: object) -> None:
        for pid in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    old = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def watched_ranks(failed_at: Callable[[], float], nproc_per_node: int) -> Iterator[set[int]]:
    """Says when the ranks are started again; and GRACE_S after a recorded failure kills those of its time that are
    still there: a stopped or hung process heeds no other signal, and torch's agent would wait for it for 30 s more.
    Yields the set of those that it killed.
    """
    over = threading.Event()
    killed: set[int] = set()
    seen_at: dict[int, float] = {}

    def watch() -> None:
        while not over.wait(0.5):
            now, there, known = time.time(), children(), len(seen_at)
            for pid in there:
                seen_at.setdefault(pid, now)
            if known and len(seen_at) > known and len(seen_at) % nproc_per_node == 0:
                print("llmexp: a rank was lost; all start again from the newest checkpoint", file=sys.stderr)
            failure = failed_at()
            if failure and now > failure + GRACE_S:
                for pid in there:
                    if seen_at[pid] < failure:
                        killed.add(pid)
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, name="llmexp-watch", daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()
