"""Submit Slurm job arrays for the points of a sweep, and watch their jobs."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.config.labels import plural
from llmexp.config.sections import Config
from llmexp.config.values import ConfigError, count, knob, refuse
from llmexp.folders import rundir
from llmexp.folders.ending import Left, conclude_run
from llmexp.sweep.current import Current, Submitted
from llmexp.sweep.points import Point
from llmexp.sweep.show import Display, name_of
from llmexp.sweep.slurm_job import client, states
from llmexp.system import fileio

JOB = "slurm.json"  # in a run folder: the job that was submitted for it last
# what a job that has ended wrote may arrive late on a shared disk, as may its requeue
SETTLE_S = 10.0
# Slurm's names for states that a job does not leave by itself.
OVER = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip

# A job array over run folders; each job takes its own from the list.
SCRIPT = """\
#!/bin/bash
runs=(
{runs}
)
{setup}
# srun takes the CPUs of a task from neither sbatch nor its environment in newer versions. One node
# may leave before the others have: the job ends when all have.
srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --unbuffered \\
  {python} -P -u -m llmexp.sweep.slurm_job "${{runs[SLURM_ARRAY_TASK_ID]}}"
"""


@dataclass(frozen=True)
class Knobs:
    """The section `hydra.launcher` with hydra/launcher=slurm."""

    partition: str | None = knob(
        "partition, or several with commas between them; null: the cluster's default", "gpu"
    )
    account: str | None = knob("account that is charged; null: the user's default", "lab")
    qos: str | None = knob("quality of service; null: the user's default", "high")
    timeout_min: int | None = count(
        "time limit in minutes, after which a run saves, queues again and continues; null: the "
        "partition's",
        240,
    )
    cpus_per_task: int | None = count("CPUs on each node; null: one per rank", 8)
    gpus_per_node: int | None = knob(
        "GPUs on each node; null: one per rank if this host has GPUs too, else none is asked for",
        8,
        at_least=0,
    )
    mem_gb: float | None = knob(
        "memory on each node in GiB; null: the cluster's default", 64.0, above=0
    )
    signal_delay_s: int = count(
        "seconds before the time limit at which a run is asked to save", 120
    )
    array_parallelism: int = count("jobs of the sweep that run at the same time, at most", 256)
    setup: list[str] = knob(
        "shell lines before the run, on the job's first node: [module load cuda]", ["true"]
    )
    additional_parameters: dict[str, Any] = knob(
        "any other option of sbatch: {constraint: h100, exclusive: true}", {"exclusive": True}
    )


def check(knobs: Knobs) -> None:
    """Raise ConfigError for knobs that no cluster takes, or where there is no Slurm."""
    if shutil.which("sbatch") is None or shutil.which("squeue") is None:
        text = "there is no sbatch on this host; start it where Slurm's commands are"
        raise ConfigError("missing_package", f"hydra/launcher=slurm: {text}")
    for key in ("partition", "account", "qos"):
        text = getattr(knobs, key)
        if text is not None and not re.fullmatch(r"[\w.,:@/+-]+", text):
            needed = "one word of letters, digits and . , : @ / + - is needed"
            raise refuse("wrong_type", f"hydra.launcher.{key}", repr(text), needed, "gpu")
    delay_s = knobs.signal_delay_s
    if knobs.timeout_min is not None and knobs.timeout_min * 60 <= delay_s:
        text = f"ends before its own warning, which comes signal_delay_s={delay_s} seconds earlier"
        raise refuse(
            "out_of_range",
            "hydra.launcher.timeout_min",
            knobs.timeout_min,
            text,
            delay_s // 60 + 60,
        )


def submit_array(paths: Sequence[Path], knobs: Knobs, script: Path, name: str) -> list[str]:
    """Submit a job array for queued run folders that need the same nodes; return the jobs' ids.

    The jobs' output goes beside the script. Raises OSError with what sbatch printed.
    """
    run = rundir.read_run(paths[0])
    ranks, options = run["nproc_per_node"], knobs.additional_parameters
    gpus = ranks if run["device"] == "cuda" else None
    output = str(script.parent.absolute()).replace("%", "%%")
    asked = {
        "nodes": run["nnodes"],
        "ntasks-per-node": 1,
        "cpus-per-task": knobs.cpus_per_task or ranks,
        "gpus-per-node": gpus if knobs.gpus_per_node is None else knobs.gpus_per_node,
        "mem": None if knobs.mem_gb is None else f"{round(knobs.mem_gb * 1024)}M",
        "partition": knobs.partition,
        "account": knobs.account,
        "qos": knobs.qos,
        "time": knobs.timeout_min,
        "signal": f"USR2@{knobs.signal_delay_s}",
        "requeue": True,
        "open-mode": "append",
        **{key.replace("_", "-"): value for key, value in options.items()},
        "job-name": name,
        "array": f"0-{len(paths) - 1}%{knobs.array_parallelism}",
        "output": f"{output}/%A_%a.out",
    }
    text = SCRIPT.format(
        runs="\n".join(shlex.quote(str(path.absolute())) for path in paths),
        setup="\n".join(knobs.setup),
        cpus=asked["cpus-per-task"],
        python=shlex.quote(sys.executable),
    )
    script.write_text(text, encoding="utf-8", errors="surrogateescape")
    given = {key: value for key, value in asked.items() if value not in (None, False)}
    words = [f"--{key}" if value is True else f"--{key}={value}" for key, value in given.items()]
    array = client("sbatch", "--parsable", *words, str(script)).strip().partition(";")[0]
    return [f"{array}_{i}" for i in range(len(paths))]


def fixed_here(config: Config, path: Path) -> str:
    """Return what this host has chosen for a run that may start on another kind of host.

    Empty if nothing.
    """
    recorded = rundir.read_run(path)
    if config.train.device != "auto" or recorded["device"] != "cpu":
        return ""
    chosen = [f"precision={recorded['precision']}"] if config.precision.kind == "auto" else []
    if config.train.compile == "auto":
        chosen.append("train.compile=false")
    if config.parallelism.kind != "single" and config.parallelism.nproc_per_node is None:
        chosen.append(f"parallelism.nproc_per_node={recorded['nproc_per_node']}")
    if not chosen:
        return ""
    return f"this host has no GPU, so it chose {' and '.join(chosen)}; for hosts with GPUs say it"


class Slurm:
    """Run each point as a job, which goes on without this process.

    Needs no accounting database: the run's own status.json says how a job ended, and squeue whether
    it is still there.
    """

    pause_s = 1.0
    slots = 1

    def __init__(self, current: Current, points: Sequence[Point], display: Display) -> None:
        """Find the jobs of an earlier command for these points. Raises ConfigError."""
        self._current, self._say = current, display.line
        self._states: dict[str, tuple[str, str]] = {}
        self._answers = True
        self.found: list[Submitted] = []
        for point in points:
            with contextlib.suppress(ConfigError, AttributeError):  # no such file, or no such value
                job = fileio.read_json(point.path / JOB).get("job_id")
                self.found.append(Submitted(point, str(job)))
        if self.found:
            try:
                there = states()
            except OSError as error:
                text = "whether earlier jobs are still there is not known"
                raise ConfigError("failed", f"hydra/launcher=slurm: {text}: {error}") from None
            self.found = [job for job in self.found if there.get(job.handle, OVER)[0] not in OVER]
        if self.found:
            verb = "is" if len(self.found) == 1 else "are"
            self._say(f"{plural(len(self.found), 'job')} submitted before {verb} still there")
        self._changed_at = self._next_look = time.monotonic()
        self._cancelled: list[Path] = []

    def submit(self, waiting: list[Point], jobs: Sequence[Submitted]) -> list[Submitted]:
        """Submit all, one job array for those that need the same nodes. Raises ConfigError."""
        if note := fixed_here(waiting[0].config, waiting[0].path):
            self._say(f"note: {note}")
        ledger = self._current.ledger
        # new: what jobs run is not what lay there
        where = rundir.claim(ledger.path / "slurm", False, "hydra.sweep.dir")
        alike: dict[tuple[Any, ...], list[Point]] = {}
        for point in waiting:
            run = point.facts.run
            shape = (run["nnodes"], run["nproc_per_node"], run["device"])
            alike.setdefault(shape, []).append(point)
        submitted: list[Submitted] = []
        for number, points in enumerate(alike.values()):
            script = where / f"jobs-{number}.sh"
            paths = [point.path for point in points]
            try:
                ids = submit_array(paths, self._current.place, script, f"llmexp-{ledger.name}")
            except OSError as error:
                before = ", ".join(job.handle for job in submitted)
                text = f"sbatch refused the jobs: {error}"
                text += f"; submitted before: {before}" if before else ""
                raise ConfigError("failed", f"hydra/launcher=slurm: {text}") from None
            for point, job in zip(points, ids, strict=True):
                fileio.write_json(point.path / JOB, {"job_id": job})
                submitted.append(Submitted(point, job))
        for point in waiting:
            attempts = point.entry.attempts + 1
            alone = {"forked": False, "fresh": "a job of Slurm has one run"}
            ledger.update(point.entry, attempts=attempts, **alone)
        count = plural(len(submitted), "job")
        self._say(f"{count} submitted; what their processes print is in {where}")
        waiting.clear()
        return submitted

    def look(self, jobs: Sequence[Submitted]) -> list[Submitted]:
        now = time.monotonic()
        if now < self._next_look:
            return []
        try:
            self._states, self._answers = states(), True
        except OSError as error:
            if self._answers:
                self._say(f"Slurm does not answer ({error}); waiting on")
            self._answers = False
        ended = [job for job in jobs if self._is_over(job, now)]
        self._next_look = now + (1 if now - self._changed_at < 60 else 10)
        return ended

    def _is_over(self, job: Submitted, now: float) -> bool:
        """Show a change of a job's state; return whether that is the last one."""
        state, reason = self._states.get(job.handle, ("", ""))
        gone = self._answers and (state in OVER or not state)
        job.ended_at = min(job.ended_at, now) if gone else math.inf
        path, entry = job.point.path, job.point.entry
        own = rundir.read_status(path).get("state")
        known = own == "finished" or (own, state) == ("failed", "FAILED")
        over = known or now - job.ended_at >= SETTLE_S
        if over:
            text = self._end(job, own, f"ended as {state}" if state else "is gone from the queue")
        else:  # a job runs before its run says so
            text = progress(state, reason)
            self._current.ledger.look(entry, alive=True)
        if text != job.seen:
            job.seen, self._changed_at = text, now
            self._say(f"{job.handle:<12} {name_of(entry, self._current.ledger.swept)}  {text}")
        return over

    def _end(self, job: Submitted, own: str | None, how: str) -> str:
        """Record how the run of a job ended that did so itself, and return it in words."""
        if own == "queued" and job.point.path in self._cancelled:  # unless it had begun
            return f"queued; the job {how}"
        when = "while the run was under way" if own == "running" else "before the run started"
        cause = f"the Slurm job {job.handle} {how} {when}"
        end = conclude_run(job.point.path, Left.GONE, cause=cause)
        return {
            "failed": f"failed: {end.error}",
            "finished": "finished",
            "preempted": f"preempted; the job {how}",
            "running": f"left alone: another process is training there; the job {how}",
        }[end.state]

    def cancel(self, jobs: list[Submitted], signal: int | None) -> int:
        """Leave the jobs alone; without a signal, take those back that have not started."""
        if signal is None:
            own = {job.handle: rundir.read_status(job.point.path).get("state") for job in jobs}
            queued = [job for job in jobs if own[job.handle] == "queued"]
            self._cancelled = [job.point.path for job in queued]
            if queued:
                with contextlib.suppress(OSError):
                    client("scancel", "--state=PENDING", *(job.handle for job in queued))
            return 0
        for job in self.look(jobs):
            jobs.remove(job)
            self._current.ended(job.point.entry)
        if jobs:
            arrays = dict.fromkeys(job.handle.partition("_")[0] for job in jobs)
            way = f"to cancel them: scancel {' '.join(arrays)}"
            self._say(f"the jobs continue without this command; {way}")
        jobs.clear()
        return 0


def progress(state: str, reason: str) -> str:
    """Return what to print of a job that has not ended."""
    if state == "RUNNING":
        return f"running on {reason}"
    if state in ("COMPLETING", *OVER, ""):
        return "ending"
    usual = reason in ("None", "Priority", "Resources", "BeginTime")
    return state.lower() if usual else f"{state.lower()} ({reason})"
