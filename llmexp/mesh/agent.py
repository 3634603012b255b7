"""Starting ranks: torch's elastic agent (what torchrun runs), one on each host.

An agent starts `python -m llmexp.train RUN_DIR` once a rank. When one dies it ends the others and,
up to `max_restarts` times, starts them all again, on all hosts together; they go on from the newest
checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
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

from llmexp.mesh.groups import MEETING
from llmexp.mesh.watch import (
    ENDED,
    GIVEN_UP,
    POLL_S,
    HostsMissing,
    Plan,
    Watch,
    attend,
    forwarded_signals,
    rendezvous,
    who_came,
)

STARTED = "LLMEXP_AGENT_STARTED"  # tells the ranks that an agent reports for them, and since when
LOCK_HELD = "LLMEXP_LOCK_HELD"  # the agent holds the run folder's lock for its ranks


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


def launch_ranks(plan: Plan) -> Death | None:
    """Start this host's ranks and wait for them. Returns the first death when the group failed for
    good; None when it ended well, or failed elsewhere.

    Rank 0 writes to the console; every rank's output is in run_dir/logs. Raises ValueError where
    hosts have no place to meet, HostsMissing, and SystemExit where a signal stops what has not
    begun to train.
    """
    endpoint, run_id = rendezvous(plan.nnodes, plan.run_dir.absolute().name)
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    logs = plan.run_dir / "logs"
    here = logs / "hosts" / f"{name}.{os.getpid()}"
    here.parent.mkdir(parents=True, exist_ok=True)
    set_environment(plan)
    with forwarded_signals() as signals:
        watch = Watch(plan, here, signals, plan.max_restarts)
        while True:
            known = len(watch.seen_at)
            rest = (logs / name, watch.restarts_left)
            launch = launch_config(plan, endpoint, run_id, *rest)
            try:
                with meeting(logs) if plan.nnodes == 1 else contextlib.nullcontext():
                    ranks = elastic_launch(launch, sys.executable)
                    command = ("-P", "-u", "-m", "llmexp.train", str(plan.run_dir))
                    attend(functools.partial(ranks, *command), watch)
            except ChildFailedError as error:
                return first_death(error, watch)
            except (RendezvousError, DistError, TimeoutError) as error:
                lost = len(watch.seen_at) > known
                if failed_elsewhere(error, watch, lost):
                    return None
                if isinstance(error, (RendezvousTimeoutError, TimeoutError)):
                    came = who_came(here, plan.nnodes, endpoint, plan.start_timeout_s)
                    raise HostsMissing(came) from None
                if lost:
                    watch.restarts_left -= 1
                    where = f"{endpoint}, where the hosts meet"
                    print(f"llmexp: lost {where}; waiting for it to come back", file=sys.stderr)
                time.sleep(POLL_S)  # else the host where they meet has not come yet
            else:
                here.unlink(missing_ok=True)
                return None


def set_environment(plan: Plan) -> None:
    """Set what torch's agent and the ranks read from the environment."""
    # torch reports in many lines what is reported here in words
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ |= {
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
        "OMP_NUM_THREADS": str(plan.threads),
        # a restarted group would read the old group's keys
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        STARTED: str(time.time() if plan.nnodes > 1 else 0.0),  # on one host no clock is asked
    }


def launch_config(
    plan: Plan, endpoint: str, run_id: str, logs: Path, restarts: int
) -> LaunchConfig:
    launch = LaunchConfig(
        min_nodes=plan.nnodes,
        max_nodes=plan.nnodes,
        nproc_per_node=plan.nproc_per_node,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={"join_timeout": int(plan.start_timeout_s) + 1},
        run_id=run_id,
        max_restarts=restarts,
        monitor_interval=0.1,
        log_line_prefix_template="[rank ${rank}] ",
        logs_specs=logs_of_ranks(logs, plan.nproc_per_node),  # without, it makes a folder in /tmp
    )
    if hasattr(launch, "signals_to_handle"):
        launch.signals_to_handle = "SIGQUIT"
    return launch


def logs_of_ranks(folder: Path, ranks: int) -> DefaultLogsSpecs:
    """Return where ranks print: into files, but rank 0 also to the console; its standard output is
    in train.log too."""
    redirects = {rank: Std.ALL if rank else Std.ERR for rank in range(ranks)}
    return DefaultLogsSpecs(log_dir=str(folder), redirects=redirects, tee={0: Std.ERR})


def first_death(error: ChildFailedError, watch: Watch) -> Death:
    """Return the rank that failed first. Raises SystemExit where a signal ended all of them."""
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    codes |= {rank: 1 for rank, failed in error.failures.items() if failed.pid in watch.killed}
    by_signals = {code for number in watch.signals for code in (-number, 128 + number)}
    if watch.signals and {*codes.values()} <= by_signals:
        raise SystemExit(128 + watch.signals[0]) from None
    # a signal comes from outside: the others followed
    rank = min(codes, key=lambda rank: (codes[rank] >= 0, rank))
    return Death(rank, codes[rank])


def failed_elsewhere(error: Exception, watch: Watch, lost: bool) -> bool:
    """Return whether the run has ended, or another host has ended it. `lost`: ranks were there."""
    state = watch.plan.outcome()[0]
    no_more = (state == "failed" or lost) and not watch.restarts_left
    closed = isinstance(error, RendezvousClosedError)  # by another host
    return closed or no_more or state in ENDED or state == GIVEN_UP


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
