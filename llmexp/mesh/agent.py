"""Starting ranks: torch's elastic agent (what torchrun runs), one on each host.

An agent starts `python -m llmexp.train RUN_DIR` once a rank. When one dies it ends the others and,
up to `max_restarts` times, starts them all again, on all hosts together; they go on from the newest
checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from llmexp.child import children, send, signals_held
from llmexp.mesh.groups import MEETING

STARTED = "LLMEXP_AGENT_STARTED"  # tells the ranks that an agent reports for them, and since when
LOCK_HELD = "LLMEXP_LOCK_HELD"  # the agent holds the run folder's lock for its ranks
POLL_S = 0.5
TOUCH_S, FRESH_S = 3.0, 10.0  # how often a host shows that it is there, and how long that holds
ENDED, FAILED = (
    ("finished", "preempted"),
    ("failed", "given up"),
)  # given up: it would only fail again
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


def launch_ranks(
    run_dir: Path,
    *,
    nnodes: int,
    nproc_per_node: int,
    threads: int,
    max_restarts: int,
    start_timeout_s: float,
    outcome: Callable[[], tuple[str, float]],
) -> Death | None:
    """Start this host's ranks and wait for them. Returns the first death when the group failed for
    good; None when it ended well, or failed elsewhere.

    Rank 0 writes to the console; every rank's output is in run_dir/logs. `outcome` says which of
    ENDED or FAILED the run came to since the call, and when (seconds since 1970); ("", 0) until
    then. Raises HostsMissing, and SystemExit where a signal stops what has not begun to train.
    """
    endpoint, run_id = rendezvous(nnodes, run_dir.absolute().name)
    # what it says is said here, in words
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    here = run_dir / "logs" / "hosts" / f"{name}.{os.getpid()}"
    here.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
        "OMP_NUM_THREADS": str(threads),
        # a restarted group would read the old group's keys
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        STARTED: str(time.time() if nnodes > 1 else 0.0),  # on one host no clock is asked
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
    )
    if hasattr(launch, "signals_to_handle"):
        launch.signals_to_handle = "SIGQUIT"
    with forwarded_signals() as signals:
        watch = Watch(here, nnodes, nproc_per_node, start_timeout_s, outcome, signals)
        while True:
            known = len(watch.seen_at)
            watch.restarts = launch.max_restarts
            # Rank 0 keeps the console as its standard output; what it prints there is in train.log
            # too.
            launch.logs_specs = DefaultLogsSpecs(
                log_dir=str(run_dir / "logs" / name),
                redirects={n: Std.ALL if n else Std.ERR for n in range(nproc_per_node)},
                tee={0: Std.ERR},
            )
            try:
                with meeting(run_dir / "logs") if nnodes == 1 else contextlib.nullcontext():
                    attend(
                        lambda: elastic_launch(launch, sys.executable)(
                            "-P", "-u", "-m", "llmexp.train", str(run_dir)
                        ),
                        watch,
                    )
            except ChildFailedError as error:
                codes = {
                    rank: 1 if f.pid in watch.killed else f.exitcode
                    for rank, f in error.failures.items()
                }
                if signals and {*codes.values()} <= {
                    code for n in signals for code in (-n, 128 + n)
                }:
                    raise SystemExit(128 + signals[0]) from None
                # a signal comes from outside: the others followed
                rank = min(codes, key=lambda r: (codes[r] >= 0, r))
                return Death(rank, codes[rank])
            except (RendezvousError, DistError, TimeoutError) as error:
                state, lost = outcome()[0], len(watch.seen_at) > known
                given_up = state == "given up" or (
                    (state == "failed" or lost) and not launch.max_restarts
                )
                # closed by another host
                if state in ENDED or given_up or isinstance(error, RendezvousClosedError):
                    return None
                if isinstance(error, (RendezvousTimeoutError, TimeoutError)):
                    raise HostsMissing(who_came(here, nnodes, endpoint, start_timeout_s)) from None
                if lost:
                    launch.max_restarts -= 1
                    where = f"{endpoint}, where the hosts meet"
                    print(f"llmexp: lost {where}; waiting for it to come back", file=sys.stderr)
                time.sleep(POLL_S)  # else the host where they meet has not come yet
                continue
            here.unlink(missing_ok=True)
            return None


@contextlib.contextmanager
def meeting(parent: Path) -> Iterator[None]:
    """Yield names the ranks of one host a folder of their own to meet in: the port that torch's
    agent finds free for them may be another's by the time they listen on it."""
    for left in parent.glob("meeting-*"):  # by an agent that was killed
        shutil.rmtree(left, ignore_errors=True)
    os.environ[MEETING] = tempfile.mkdtemp(prefix="meeting-", dir=parent.absolute())
    try:
        yield
    finally:
        shutil.rmtree(os.environ.pop(MEETING), ignore_errors=True)


def attend(work: Callable[[], object], watch: Watch) -> None:
    """Call `work` in a thread, because it may hang in the network for long, and look after the
    ranks until it is done. Raises what either raises."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            # by the ranks, until they have handlers; this process gets its own in another thread
            with signals_held():
                work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="llmexp-agent", daemon=True)
    thread.start()
    thread.join(POLL_S)
    while thread.is_alive():
        watch.look()
        thread.join(POLL_S)
    if failure:
        raise failure[0]


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
        import subprocess

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


@contextlib.contextmanager
def forwarded_signals() -> Iterator[list[int]]:
    """Pass stop signals on to the ranks, which then save; the agent's own way would kill them after
    30 s. Yields the list of those that came."""
    came: list[int] = []

    def forward(number: int, frame: object) -> None:
        came.append(number)
        for pid in children(os.getpid()):
            send(pid, number)

    old = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@dataclass
class Watch:
    """What is known of this host's ranks, and what torch's agent would not do for them or not soon
    enough."""

    here: Path  # touched for the other hosts to see
    nnodes: int
    nproc_per_node: int
    start_timeout_s: float
    outcome: Callable[[], tuple[str, float]]
    signals: list[int]
    restarts: int = 0  # that are left
    seen_at: dict[int, float] = field(default_factory=dict)  # by process: monotonic
    killed: set[int] = field(default_factory=set)
    alive_at: float = field(default_factory=time.monotonic)  # when a rank was last there
    failed_at: float | None = None  # when a failure was first seen
    touched_at: float = 0.0

    def look(self) -> None:
        """Say when the ranks are started again; and GRACE_S after a recorded failure kills those of
        its time that are still there: a stopped or hung process heeds no other signal, and torch's
        agent would wait for it for 30 s more.

        Raises TimeoutError when no rank has been there for longer than one may take to come, and
        SystemExit when there is none that a signal could stop.
        """
        now, there, known = time.monotonic(), children(os.getpid()), len(self.seen_at)
        if now > self.touched_at + TOUCH_S:
            self.touched_at = now
            with contextlib.suppress(OSError):
                self.here.touch()
        new = [pid for pid in there if pid not in self.seen_at]
        self.seen_at |= dict.fromkeys(new, now)
        state, recorded = self.outcome()
        if self.signals:
            for pid in new:
                send(pid, self.signals[0])
        elif known and new and state != "given up" and len(self.seen_at) % self.nproc_per_node == 0:
            print(
                "llmexp: a rank was lost; all start again from the newest checkpoint",
                file=sys.stderr,
            )
        self.failed_at = (self.failed_at or now) if state in FAILED else None
        if self.failed_at is not None:
            since = self.failed_at if self.nnodes == 1 else now - (time.time() - recorded)
            late = [
                pid for pid in there if self.seen_at[pid] < since and now > self.failed_at + GRACE_S
            ]
            for pid in late + (new if state == "given up" else []):
                self.killed.add(pid)
                send(pid, signal.SIGKILL)
        if there:
            self.alive_at = now
        idle_s = now - self.alive_at
        # torch's agent waits for the other hosts, for 300 s even for one that is no more
        if state in ENDED:
            overdue = idle_s > GRACE_S and len(hosts_there(self.here)) < self.nnodes
        elif self.signals and not there and (self.restarts or not state):
            raise SystemExit(128 + self.signals[0])
        else:
            no_more = state == "given up" or (state == "failed" and not self.restarts)
            overdue = idle_s > (GRACE_S if no_more else self.start_timeout_s + 2)
        if overdue:
            raise TimeoutError
