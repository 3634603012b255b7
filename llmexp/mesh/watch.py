"""Look after the ranks of this host while torch's agent runs them in a thread."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llmexp.child import children, send, signals_held
from llmexp.mesh.hosts import hosts_there

POLL_S = 0.5
TOUCH_S = 3.0  # how often a host shows that it is there
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
        self._show_this_host(now)
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
            self._kill_those_of(there, self._failure_time(now, recorded_at))
        if state == GIVEN_UP:
            self._kill(new)
        if there:
            self.alive_at = now
        if self.signals and not there and state not in ENDED and (self.restarts_left or not state):
            raise SystemExit(128 + self.signals[0])
        if self._nobody_comes(state, now - self.alive_at):
            raise TimeoutError

    def _show_this_host(self, now: float) -> None:
        if now > self.touched_at + TOUCH_S:
            self.touched_at = now
            with contextlib.suppress(OSError):
                self.here.touch()

    def _print_restart(self) -> None:
        if len(self.seen_at) % self.plan.nproc_per_node == 0:  # once for all of them
            print(
                "llmexp: a rank was lost; all start again from the newest checkpoint",
                file=sys.stderr,
            )

    def _failure_time(self, now: float, recorded_at: float) -> float:
        """Return when the run failed, by this process's clock; of several hosts only the status
        knows."""
        if self.plan.nnodes == 1 and self.failed_at is not None:
            return self.failed_at
        return now - (time.time() - recorded_at)

    def _kill_those_of(self, there: list[int], failed_at: float) -> None:
        """Kill the ranks of the group that failed which are still there: a stopped or hung process
        heeds no other signal, and torch's agent would wait for it for 30 s more."""
        self._kill([pid for pid in there if self.seen_at[pid] < failed_at])

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
