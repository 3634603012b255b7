"""Look after the ranks of this host while torch's agent runs them in a thread; find the place where
hosts meet, and which of them are there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llmexp.settings.values import ConfigError
from llmexp.system.child import children, send, signals_held

POLL_S = 0.5
TOUCH_S = 3.0  # how often a host shows that it is there
FRESH_S = 10.0  # how long a host counts as there after it has shown itself
GRACE_S = 8.0  # for ranks to leave after another one has failed; a stopped process never does
GIVEN_UP = "given up"  # failed in a way that a restart would only meet again
ENDED, FAILURES = ("finished", "preempted"), ("failed", GIVEN_UP)


@dataclass(frozen=True)
class Plan:
    """Hold what this host has to start. `outcome` says which of ENDED or FAILURES the run came to
    since the start, and when (seconds since 1970); ("", 0) until then."""

    run_dir: Path
    nnodes: int
    nproc_per_node: int
    threads: int
    max_restarts: int
    start_timeout_s: float
    outcome: Callable[[], tuple[str, float]]


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


class HostsMissing(RuntimeError):
    """Some hosts did not come in time; the text says which did."""


def rendezvous(nnodes: int, name: str) -> tuple[str, str]:
    """Return (endpoint, id) where the agents of all hosts meet: a free local port for one host,
    else $LLMEXP_RDZV_ENDPOINT, else what Slurm says. `name` tells runs apart that meet at the same
    port. Raises ConfigError where nothing says it.
    """
    env = os.environ
    if nnodes == 1:
        return "localhost:0", uuid.uuid4().hex
    job = env.get("SLURM_JOB_ID")
    attempt = f"{job}.{env.get('SLURM_RESTART_COUNT', '0')}" if job else name
    if endpoint := env.get("LLMEXP_RDZV_ENDPOINT"):
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            text = "HOST:PORT is needed; for example host1:29400"
            raise ConfigError(f"LLMEXP_RDZV_ENDPOINT={endpoint}: {text}")
        return endpoint, attempt
    if job and (address := env.get("SLURM_LAUNCH_NODE_IPADDR")):
        # jobs that share a node get ports of their own
        return f"{address}:{20000 + int(job) % 30000}", attempt
    raise ConfigError(
        f"parallelism.nnodes={nnodes}: nothing says where the hosts meet; on each, set for example "
        "LLMEXP_RDZV_ENDPOINT=host1:29400, or start it with launchers/slurm.sbatch"
    )


def hosts_there(here: Path) -> list[str]:
    """Return the hosts whose agents keep touching their files beside `here`, this one's. Needs no
    network, and no clock but that of the file system."""
    here.touch()
    now = here.stat().st_mtime
    fresh = [p for p in here.parent.iterdir() if p.stat().st_mtime > now - FRESH_S]
    return sorted(p.name.rpartition(".")[0] for p in fresh)


def who_came(here: Path, nnodes: int, endpoint: str, start_timeout_s: float) -> str:
    """Return which hosts are there, and which are not."""
    there = hosts_there(here)
    names, waited = ", ".join(there), f"{endpoint} within {start_timeout_s:g} s"
    if len(there) >= nnodes:
        text = f"they did not meet at {waited}; do they all reach it?"
        return f"all {nnodes} hosts are there ({names}), but {text}"
    came, missing = f"{len(there)} of {nnodes} hosts came", missing_hosts(there, nnodes)
    return f"{came} to {waited}: {names}; missing: {missing}"


def missing_hosts(there: list[str], nnodes: int) -> str:
    """Return their names, where Slurm knows them, else their number."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["scontrol", "show", "hostnames", nodes]
            done = subprocess.run(command, capture_output=True, timeout=10, check=True)
            known = done.stdout.decode(errors="replace").split()
            if absent := sorted(set(known) - set(there)):
                return ", ".join(absent)
    return f"{nnodes - len(there)} more"


@dataclass
class Watch:
    """Watch this host's ranks, and do what torch's agent would not do for them or not soon
    enough."""

    plan: Plan
    here: Path  # touched for the other hosts to see
    signals: list[int]  # that came
    restarts_left: int
    seen_at: dict[int, float] = field(default_factory=dict)  # by process: monotonic
    killed: set[int] = field(default_factory=set)
    alive_at: float = field(default_factory=time.monotonic)  # when a rank was last there
    failed_at: float | None = None  # when a failure was first seen
    touched_at: float = 0.0

    def look(self) -> None:
        """Look once at the ranks and at the run's status, and do what is due.

        Raises TimeoutError when no rank has been there for longer than one may take to come, and
        SystemExit when there is none that a signal could stop.
        """
        now, there = time.monotonic(), children(os.getpid())
        if now > self.touched_at + TOUCH_S:
            self.touched_at = now
            with contextlib.suppress(OSError):
                self.here.touch()
        new = [pid for pid in there if pid not in self.seen_at]
        started_again = bool(self.seen_at and new)
        self.seen_at |= dict.fromkeys(new, now)
        state, recorded_at = self.plan.outcome()
        if self.signals:
            for pid in new:  # it was not there yet when the signal came
                send(pid, self.signals[0])
        elif started_again and state != GIVEN_UP:
            self._print_restart()
        self.failed_at = (self.failed_at or now) if state in FAILURES else None
        if self.failed_at is not None and now > self.failed_at + GRACE_S:
            # A stopped or hung process heeds no other signal, and torch's agent would wait for it
            # for 30 s more.
            failed = self._failure_time(now, recorded_at)
            self._kill([pid for pid in there if self.seen_at[pid] < failed])
        if state == GIVEN_UP:
            self._kill(new)
        if there:
            self.alive_at = now
        if self.signals and not there and state not in ENDED and (self.restarts_left or not state):
            raise SystemExit(128 + self.signals[0])
        if self._nobody_comes(state, now - self.alive_at):
            raise TimeoutError

    def _print_restart(self) -> None:
        if len(self.seen_at) % self.plan.nproc_per_node == 0:  # once for all of them
            text = "a rank was lost; all start again from the newest checkpoint"
            print(f"llmexp: {text}", file=sys.stderr)

    def _failure_time(self, now: float, recorded_at: float) -> float:
        """Return when the run failed, by this process's clock; of several hosts only the status
        knows."""
        if self.plan.nnodes == 1 and self.failed_at is not None:
            return self.failed_at
        return now - (time.time() - recorded_at)

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            self.killed.add(pid)
            send(pid, signal.SIGKILL)

    def _nobody_comes(self, state: str, idle_s: float) -> bool:
        """Return whether this host waits for nothing: torch's agent waits for the other hosts, for
        300 s even for one that is no more."""
        if state in ENDED:
            return idle_s > GRACE_S and len(hosts_there(self.here)) < self.plan.nnodes
        over = state == GIVEN_UP or (state == "failed" and not self.restarts_left)
        return idle_s > (GRACE_S if over else self.plan.start_timeout_s + 2)
