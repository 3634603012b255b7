"""Run points as tasks of a Ray cluster, each `python -m llmexp.train RUN_DIR` on its node.

Ray runs its tasks with a low priority (nice 15) unless RAY_worker_niceness=0 is in the
environment that a cluster is started from: beside other work on a node they hardly come on. The
cluster that is started here has it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.config.commands import how_to_install
from llmexp.config.values import AUTO, ConfigError, knob, refuse
from llmexp.folders import rundir
from llmexp.folders.ledger import PointFacts
from llmexp.sweep.current import Current, Submitted
from llmexp.sweep.local import STDERR, record_left
from llmexp.sweep.points import Point
from llmexp.system import workers
from llmexp.system.child import FAILED, PASSED_ON, PREEMPTED

# Set by Ray for its own processes; ranks of a run are on one node and are given their devices by
# name.
KEPT = ("LLMEXP_ALLOW", "PYTHONPATH", "TIKTOKEN_CACHE_DIR", "OMP_NUM_THREADS")  # in a task
OF_RAY = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE")


@dataclass(frozen=True)
class Knobs:
    """The section `hydra.launcher` with hydra/launcher=ray."""

    address: str | None = knob(
        "of a running cluster (auto, or host:port); null: one on this machine, for the time of the "
        "sweep",
        AUTO,
    )
    cpus_per_run: float | None = knob("CPUs of each run; null: one per rank", 1.0, at_least=0)
    gpus_per_run: float | None = knob(
        "GPUs of each run; null: one per rank where the run is on CUDA, else none", 1.0, at_least=0
    )
    init: dict[str, Any] = knob("anything else for ray.init: {num_cpus: 4}", {"num_cpus": 4})


def check(knobs: Knobs) -> None:
    """Raise ConfigError where there is no Ray."""
    need("hydra/launcher=ray")


def need(asked: str) -> None:
    """Raise ConfigError, naming what asked for it, where there is no Ray."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "missing_package", f"{asked}: the package ray is not installed; {how_to_install('ray')}"
        )


def train_task(path: str, environment: dict[str, str], cold: str) -> tuple[int, str | None]:
    """Train in a run folder, or go on there, as a task.

    Return the exit code, and why it was no fork: `cold`, or what the template says, which a process
    of Ray keeps for later tasks. A task that is ended lets the run save.
    """
    workers.stay_warm(not cold)
    kept = {k: v for k, v in os.environ.items() if k not in OF_RAY}
    rundir.wait_until_vacant(Path(path))  # this task was here before, and is still saving
    env = kept | environment
    child = workers.start_worker(path, log=Path(path) / STDERR, env=env, cwd=env["PWD"])
    try:
        while (code := child.poll()) is None:  # not wait(), which Ray's interrupt does not end
            time.sleep(0.2)
        return code, cold or workers.why_fresh(child)
    except BaseException:  # cancelled: Ray raises in here
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise


class Ray:
    """Run each task as soon as the cluster has room for it, `sweep.max_parallel` of them at once.

    A task whose process dies is repeated by Ray and goes on from the run's checkpoint.
    """

    pause_s = 0.2
    slots = 1

    def __init__(self, current: Current, points: Sequence[Point], display: object) -> None:
        """Connect to the cluster. Raises ConfigError where there is none that is large enough."""
        import ray

        knobs: Knobs = current.place
        self._ray, self._current, self._knobs = ray, current, knobs
        self.found: list[Submitted] = []
        if not ray.is_initialized():
            connect(ray, knobs.address, knobs.init, "hydra/launcher=ray")
            current.stack.callback(ray.shutdown)
        alive = [node["Resources"] for node in ray.nodes() if node.get("Alive")]
        wanted = [needs(point.facts, knobs) for point in points]
        for i, (key, name) in enumerate((("cpus_per_run", "CPU"), ("gpus_per_run", "GPU"))):
            most = max((each[i] for each in wanted), default=0)
            largest = max((resources.get(name, 0.0) for resources in alive), default=0.0)
            if most > largest:  # a run has to fit on one node, or would wait for ever
                text = f"the largest node of the cluster has {largest:g} {name}s"
                key = f"hydra.launcher.{key}"
                raise refuse("no_device", key, f"{most:g}", text, f"{largest:g}")
        kept = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith("WANDB_")}
        self._environment = kept | {"PWD": os.getcwd()}

    def submit(self, waiting: list[Point], jobs: Sequence[Submitted]) -> list[Submitted]:
        """Submit a task for the first point that waits."""
        most = self._current.knobs.max_parallel
        if most is not None and len(jobs) >= most:
            return []
        point = waiting.pop(0)
        cpus, gpus = needs(point.facts, self._knobs)
        room = {"num_cpus": cpus, "num_gpus": gpus, "name": point.path.name}
        task = self._ray.remote(train_task).options(**room)
        cold = "" if self._current.knobs.warm else "sweep.warm=false"
        cold = cold or ("a process of Ray that has GPUs gets one task" if gpus else "")
        return [Submitted(point, task.remote(str(point.path.absolute()), self._environment, cold))]

    def look(self, jobs: Sequence[Submitted]) -> list[Submitted]:
        ended, handles = [], [job.handle for job in jobs]
        done, _ = self._ray.wait(handles, num_returns=len(handles), timeout=0) if jobs else ([], ())
        for job in jobs:
            path = job.point.path
            if job.handle in done:
                job.ended_at = min(job.ended_at, time.monotonic())
                if rundir.is_vacant(path, job.ended_at):  # else it saves
                    how = _finish(self._ray, job.handle, path, stopped=self._current.stopped)
                    self._current.ledger.update(job.point.entry, **how)
                    ended.append(job)
            elif not job.seen and rundir.read_status(path).get("state") == "running":
                job.seen = True
                self._current.began(job.point.entry)
                self._current.ledger.look(job.point.entry)
        return ended

    def cancel(self, jobs: list[Submitted], signal: int | None) -> int:
        """End all tasks, whatever the signal is; without one, those that have not begun."""
        for job in jobs:
            if signal is not None or not job.seen:
                self._ray.cancel(job.handle)
        return sum(bool(job.seen) for job in jobs)


def connect(ray: Any, address: str | None, init: dict[str, Any], asked: str) -> None:
    """Connect to the cluster at the address, or start one on this machine.

    Raises ConfigError, naming what `asked` for it.
    """
    given: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        os.environ.setdefault("RAY_worker_niceness", "0")
        # else Ray listens on the machine's outer address
        given |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    handlers = {number: signal.getsignal(number) for number in PASSED_ON}
    try:
        ray.init(address=address, **given | init)
    except (ConnectionError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("network", f"{asked}: ray.init failed: {error}") from None
    finally:
        # Ray has put its own there, which end the process and report nothing
        for number, handler in handlers.items():
            signal.signal(number, handler)


def needs(facts: PointFacts, knobs: Knobs) -> tuple[float, float]:
    """Return the CPUs and GPUs of a run."""
    cpus = facts.ranks if knobs.cpus_per_run is None else knobs.cpus_per_run
    gpus = facts.ranks if facts.devices else 0
    return cpus, gpus if knobs.gpus_per_run is None else knobs.gpus_per_run


def _finish(ray: Any, handle: Any, path: Path, *, stopped: bool) -> dict[str, Any]:
    """Record how a task ended, where its run could not itself; return how it started."""
    code, cause, how = FAILED, "", dict[str, Any]()
    try:
        code, why = ray.get(handle)
        how = {"forked": why is None, "fresh": why}
    except ray.exceptions.TaskCancelledError:
        code, stopped = PREEMPTED, True
    except ray.exceptions.RayError as error:
        cause, stopped = f"Ray: {' '.join(str(error).split())[:200]}", False
    record_left(path, code, cause, stopped=stopped)
    return how
