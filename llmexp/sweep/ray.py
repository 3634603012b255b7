"""Runs of a sweep as tasks of a Ray cluster: a queue. Each task runs `python -m llmexp.train
RUN_DIR` on its node.

Ray gives what it runs a low priority (nice 15) unless RAY_worker_niceness=0 is in the environment
that a cluster is started from: beside other work on a node its points hardly come on. In the
cluster that is started here it is set.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp import rundir
from llmexp.child import FAILED, PASSED_ON, PREEMPTED, start_worker
from llmexp.config import ConfigError, refuse
from llmexp.sweep.local import STDERR, Job, Stopped, settle

POLL_S, ORPHAN_S = 0.5, 60.0
# Set by Ray for its own processes; ranks of a run are on one node and are given their devices by
# name.
OF_RAY = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE")


@dataclass(frozen=True)
class Settings:
    """The knobs of conf/hydra/launcher/ray.yaml, where each is explained."""

    address: str | None
    cpus_per_run: float | None
    gpus_per_run: float | None
    init: dict[str, Any]


def check(s: Settings) -> None:
    """Raise ConfigError for settings that no cluster takes, or where there is no Ray."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "hydra/launcher=ray: the package ray is not installed; pip install 'llmexp[ray]'"
        )
    for key in ("cpus_per_run", "gpus_per_run"):
        value = getattr(s, key)
        if value is not None and not 0 <= value < float("inf"):
            raise refuse(f"hydra.launcher.{key}", value, "must be at least 0", 1)


def train(path: str, environment: dict[str, str]) -> int:
    """Return the task: trains in a run folder, or goes on there; the exit code. Ended, it lets the
    run save."""
    kept = {k: v for k, v in os.environ.items() if k not in OF_RAY}
    deadline = time.monotonic() + ORPHAN_S
    # this task was here before, and is still saving
    while rundir.is_locked(Path(path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    env = kept | environment
    child = start_worker(path, log=Path(path) / STDERR, env=env, cwd=env["PWD"])
    try:
        while (code := child.poll()) is None:  # not wait(), which Ray's interrupt does not end
            time.sleep(0.2)
        return code
    except BaseException:  # cancelled: Ray raises in here
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise


def run_all(
    jobs: Sequence[Job],
    s: Settings,
    stop: Stopped,
    *,
    max_parallel: int | None,
    stop_on_failure: bool,
    begun: Callable[[Path], None],
    look: Callable[[Path], None],
    tick: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Run every job as soon as the cluster has room for it, `max_parallel` of them at once, until
    `stop` is requested.

    A task whose process dies is repeated by Ray and goes on from the run's checkpoint. Raises
    ConfigError where there is no cluster at the address.
    """
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    own = {
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }  # else Ray listens on the machine's outer address
    if s.address is None:
        os.environ.setdefault("RAY_worker_niceness", "0")
    handlers = {number: signal.getsignal(number) for number in PASSED_ON}
    try:
        ray.init(address=s.address, **(quiet | ({} if s.address else own) | s.init))
    except (ConnectionError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"hydra/launcher=ray: ray.init failed: {error}") from None
    finally:
        # Ray has put its own there, which leave without a word
        for number, handler in handlers.items():
            signal.signal(number, handler)
    keep = ("LLMEXP_ALLOW", "PYTHONPATH", "TIKTOKEN_CACHE_DIR", "OMP_NUM_THREADS")
    environment = {k: os.environ[k] for k in keep if k in os.environ}
    environment |= {k: v for k, v in os.environ.items() if k.startswith("WANDB_")} | {
        "PWD": os.getcwd()
    }
    try:
        refuse_impossible(ray.nodes(), jobs, s)
        waiting, left = list(jobs), dict[Any, Job]()
        running: set[Path] = set()
        told = False
        while left or (waiting and not stop.requested):
            while (
                waiting
                and not stop.requested
                and (max_parallel is None or len(left) < max_parallel)
            ):
                job = waiting.pop(0)
                options = {
                    "num_cpus": job.ranks if s.cpus_per_run is None else s.cpus_per_run,
                    "num_gpus": (job.ranks if job.cuda else 0)
                    if s.gpus_per_run is None
                    else s.gpus_per_run,
                    "name": job.path.name,
                }
                left[
                    ray.remote(train)
                    .options(**options)
                    .remote(str(job.path.absolute()), environment)
                ] = job
            if stop.requested and not told:
                told = True
                active = sum(job.path in running for job in left.values())
                say(
                    f"stopping: {active} under way {'saves' if active == 1 else 'save'} a "
                    "checkpoint first"
                )
                for task in left:
                    ray.cancel(task)
            done, _ = ray.wait(list(left), num_returns=1, timeout=POLL_S)
            for task in done:
                job = left.pop(task)
                failed = finish(ray, task, job.path, stopped=stop.requested)
                look(job.path)
                if failed and stop_on_failure:
                    waiting.clear()
                    for later in [t for t, j in left.items() if j.path not in running]:
                        ray.cancel(later)
            for job in left.values():
                if (
                    job.path not in running
                    and rundir.read_status(job.path).get("state") == "running"
                ):
                    running.add(job.path)
                    begun(job.path)
                    look(job.path)
            tick()
    finally:
        ray.shutdown()


def refuse_impossible(nodes: Sequence[dict[str, Any]], jobs: Sequence[Job], s: Settings) -> None:
    """Raise ConfigError for a run that would wait for ever: it has to fit on one node."""
    for key, given, name in (
        ("cpus_per_run", s.cpus_per_run, "CPU"),
        ("gpus_per_run", s.gpus_per_run, "GPU"),
    ):
        most = (
            max((job.ranks for job in jobs if name == "CPU" or job.cuda), default=0)
            if given is None
            else given
        )
        largest = max(
            (node["Resources"].get(name, 0.0) for node in nodes if node.get("Alive")), default=0.0
        )
        if most > largest:
            text = f"the largest node of the cluster has {largest:g} {name}s"
            raise refuse(f"hydra.launcher.{key}", f"{most:g}", text, f"{largest:g}")


def finish(ray: Any, task: Any, path: Path, *, stopped: bool) -> bool:
    """Return whether the run failed; records how its task ended, where it could not itself."""
    try:
        code = ray.get(task)
    except ray.exceptions.TaskCancelledError:
        code, stopped = PREEMPTED, True
        deadline = time.monotonic() + ORPHAN_S
        while rundir.is_locked(path) and time.monotonic() < deadline:  # it saves
            time.sleep(0.1)
    except ray.exceptions.RayError as error:
        return settle(path, FAILED, f"Ray: {' '.join(str(error).split())[:200]}", stopped=False)
    return settle(path, code, "", stopped=stopped)
