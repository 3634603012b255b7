"""Slurm: jobs for run folders, waiting for them, and what happens inside a job.

`python -m llmexp.sweep.slurm RUN_DIR`, or its twin in a submitit job, runs once on each node of a
job around `python -m llmexp.train RUN_DIR`. Slurm's signals reach every process of a job; training
saves and leaves by itself, and what is left to do here is to put a preempted job, or one at its
time limit, back into the queue.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp import fileio, rundir
from llmexp.child import DONE, FAILED, PREEMPTED, REFUSED, handling, leave, start_worker
from llmexp.config import Config, ConfigError, conf_dir, refuse

JOB = "slurm.json"  # in a run folder: the job that was submitted for it last
# what a job that has ended wrote may arrive late on a shared disk, as may its requeue
SETTLE_S = 10.0
CLIENT_TIMEOUT_S = 60.0  # Slurm's commands hang for minutes when the controller is away
# Slurm's names for states that a job does not leave by itself.
OVER = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED",
    "TIMEOUT",
)  # fmt: skip
# What describes the job that this process is in, its GPUs and its ranks included.
OF_THE_JOB = re.compile(
    r"SLURM(?!_CONF)|SRUN_|SUBMITIT_|PMI|(CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
    r"|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE)$"
)


@dataclass(frozen=True)
class Settings:
    """The knobs of conf/hydra/launcher/slurm.yaml, where each is explained."""

    partition: str | None
    account: str | None
    qos: str | None
    timeout_min: int | None
    cpus_per_task: int | None
    gpus_per_node: int | None
    mem_gb: float | None
    signal_delay_s: int
    array_parallelism: int
    setup: list[str]
    additional_parameters: dict[str, Any]


def check(s: Settings) -> None:
    """Raise ConfigError for settings that no cluster takes, or where there is no Slurm."""
    if shutil.which("sbatch") is None or shutil.which("squeue") is None:
        raise ConfigError(
            "hydra/launcher=slurm: there is no sbatch on this host; start it where Slurm's "
            "commands are"
        )
    for key, low in (("timeout_min", 1), ("cpus_per_task", 1), ("gpus_per_node", 0),
    ("signal_delay_s", 1),
                     ("array_parallelism", 1)):  # fmt: skip
        value = getattr(s, key)
        if value is not None and value < low:
            raise refuse(f"hydra.launcher.{key}", value, f"must be at least {low}", max(low, 2))
    for key in ("partition", "account", "qos"):
        text = getattr(s, key)
        # they go into a shell script
        if text is not None and not re.fullmatch(r"[\w.,:@/+-]+", text):
            raise refuse(
                f"hydra.launcher.{key}",
                repr(text),
                "one word of letters, digits and . , : @ / + - is needed",
            )
    if s.mem_gb is not None and not 0 < s.mem_gb < float("inf"):
        raise refuse("hydra.launcher.mem_gb", s.mem_gb, "must be above 0", 32)
    if s.timeout_min is not None and s.timeout_min * 60 <= s.signal_delay_s:
        text = (
            f"ends before its own warning, which comes signal_delay_s={s.signal_delay_s} "
            "seconds earlier"
        )
        raise refuse("hydra.launcher.timeout_min", s.timeout_min, text, s.signal_delay_s // 60 + 60)


def outside() -> dict[str, str]:
    """Return the environment without that of the Slurm job that this process may be in: what is
    submitted from inside a job is no part of it. $SLURM_CONF stays, which says where the cluster
    is.
    """
    if "SLURM_JOB_ID" not in os.environ:  # then SLURM_* are the user's own defaults
        return dict(os.environ)
    return {k: v for k, v in os.environ.items() if not OF_THE_JOB.match(k)}


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """As `outside`, for what reads this process's environment itself."""
    before, kept = dict(os.environ), outside()
    for name in before.keys() - kept.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ |= before


def client(*command: str) -> str:
    """Return the output of one of Slurm's commands. Raises OSError with what it said."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=outside(),
            timeout=CLIENT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]}: no answer within {CLIENT_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise OSError(done.stderr.strip() or f"{command[0]}: exit code {done.returncode}")
    return done.stdout


def submit(paths: Sequence[Path], s: Settings, where: Path, name: str) -> dict[Path, str]:
    """Submit a job for each queued run folder, one job array for those that need the same nodes;
    job ids by folder. submitit's files go to `where`. Raises ConfigError with what sbatch said.
    """
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    jobs: dict[Path, str] = {}
    recorded = {path: fileio.read_json(path / rundir.RUN) for path in paths}
    shapes = {
        path: (run["nnodes"], run["nproc_per_node"], run["device"])
        for path, run in recorded.items()
    }
    for nodes, ranks, device in dict.fromkeys(shapes.values()):
        alike = [path for path in paths if shapes[path] == (nodes, ranks, device)]
        cpus = s.cpus_per_task or ranks
        gpus = (
            s.gpus_per_node if s.gpus_per_node is not None else ranks if device == "cuda" else None
        )
        executor = SlurmExecutor(where, python=f"{shlex.quote(sys.executable)} -P")
        executor.update_parameters(
            job_name=name,
            nodes=nodes,
            ntasks_per_node=1,
            cpus_per_task=cpus,
            gpus_per_node=gpus,
            mem=None if s.mem_gb is None else f"{round(s.mem_gb * 1024)}M",
            partition=s.partition,
            account=s.account,
            qos=s.qos,
            time=s.timeout_min,
            signal_delay_s=s.signal_delay_s,
            array_parallelism=s.array_parallelism,
            setup=s.setup or None,
            additional_parameters={"requeue": True, **s.additional_parameters},
            # srun takes the CPUs of a task from neither sbatch nor its environment in newer
            # versions. One node may leave before the others have: the job ends when all have.
            srun_args=[f"--cpus-per-task={cpus}", "--kill-on-bad-exit=0"],
        )
        try:
            # submitit prints what it also raises
            with _outside(), contextlib.redirect_stderr(io.StringIO()):
                submitted = executor.map_array(
                    run_submitted, [str(path.absolute()) for path in alike]
                )
        except (FailedJobError, FailedSubmissionError) as error:
            others = f"; submitted before: {', '.join(jobs.values())}" if jobs else ""
            raise ConfigError(
                f"hydra/launcher=slurm: sbatch refused the jobs: {error}{others}"
            ) from None
        for path, job in zip(alike, submitted, strict=True):
            jobs[path] = job.job_id
            fileio.write_json(path / JOB, {"job_id": job.job_id})
    return jobs


def states() -> dict[str, tuple[str, str]]:
    """Return (state, reason or nodes) of the user's jobs by id, 12 or 12_3, ended ones for a while
    too. Raises OSError."""
    form = "--format=%i|%T|%R"
    out = client("squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", form)
    rows = [line.split("|", 2) for line in out.splitlines() if line.count("|") >= 2]
    return {job: (state, reason.strip("()")) for job, state, reason in rows}


def live_jobs(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the jobs, submitted earlier for these run folders, that have not ended. Raises
    ConfigError."""
    told = {p: fileio.read_json(p / JOB) for p in paths if (p / JOB).is_file()}
    known = {p: str(job.get("job_id")) for p, job in told.items() if isinstance(job, dict)}
    if not known:
        return {}
    try:
        found = states()
    except OSError as error:
        raise ConfigError(
            f"hydra/launcher=slurm: whether earlier jobs are still there is not known: {error}"
        ) from None
    return {path: job for path, job in known.items() if job in found and found[job][0] not in OVER}


def wait(
    jobs: Mapping[Path, str],
    changed: Callable[[Path, str, str, bool], None],
    say: Callable[[str], None],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Return when every job has ended; `changed` gets each change of a job's state (run folder,
    job, words, whether it is over), `tick` is called every second. Needs no accounting database:
    the run's own status.json tells how a job ended, and squeue whether it is still there.

    Raises KeyboardInterrupt on SIGINT, SIGTERM and SIGHUP. The jobs do not notice.
    """
    left, shown, ended = dict(jobs), dict.fromkeys(jobs, ""), dict.fromkeys(jobs, 0.0)
    asked, changed_at, answers = {}, time.monotonic(), True
    with handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.default_int_handler):
        while left:
            now = time.monotonic()
            try:
                asked, answers = states(), True
            except OSError as error:
                if answers:
                    say(f"Slurm does not answer ({error}); waiting on")
                answers = False
            for path, job in list(left.items()):
                state, reason = asked.get(job, ("", ""))
                over = state in OVER or not state
                ended[path] = (ended[path] or now) if over and answers else 0.0
                settled = bool(ended[path]) and now - ended[path] >= SETTLE_S
                text, known = look(path, job, state, reason, settled)
                if text != shown[path]:
                    changed(path, job, text, known)
                    shown[path], changed_at = text, now
                if known:
                    del left[path]
            for _ in range(1 if now - changed_at < 60 else 10):
                tick()
                time.sleep(1 if left else 0)


def cancel_pending(jobs: Iterable[str]) -> None:
    """Take those jobs out of the queue that have not started."""
    if jobs := list(jobs):
        with contextlib.suppress(OSError):
            client("scancel", "--state=PENDING", *jobs)


def look(path: Path, job: str, state: str, reason: str, settled: bool) -> tuple[str, bool]:
    """Return (what to say of a run and its job, whether that is final). `settled`: the job ended a
    while ago.

    Records the failure of a run whose job ended without a word of it.
    """
    status = rundir.read_status(path)
    own = status.get("state")
    if own == "finished":
        return "finished", True
    over = state in OVER or not state
    if not over:
        shown = state.lower()
        if state in ("RUNNING", "COMPLETING"):
            return f"running on {reason}" if state == "RUNNING" else "ending", False
        return shown if reason in (
            "None",
            "Priority",
            "Resources",
            "BeginTime",
        ) else f"{shown} ({reason})", False
    if own == "failed" and (settled or state == "FAILED"):
        return f"failed: {status.get('error')}", True
    if not settled:
        return "ending", False
    how = f"ended as {state}" if state else "is gone from the queue"
    if own == "preempted":
        return f"preempted; the job {how}", True
    if own == "running" and rundir.is_locked(path):
        return f"left alone: another process is training there; the job {how}", True
    when = "while the run was under way" if own == "running" else "before the run started"
    error = f"the Slurm job {job} {how} {when}"
    rundir.write_status(path, "failed", error=error, exit_code=FAILED, ended=time.time())
    return f"failed: {error}", True


def how_to_start(path: Path, config: Config) -> str:
    """Return the folder of a run that was queued, and the commands that start it."""
    lines = [f"folder      {path}"]
    if rundir.read_status(path).get("state") == "queued":  # else it was finished before
        nodes, root = config.parallelism.nnodes, conf_dir().parent / "launchers"
        needed = {"PYTHON": sys.executable}
        if os.environ.get("LLMEXP_ALLOW"):
            needed |= {k: os.environ[k] for k in ("LLMEXP_ALLOW", "PYTHONPATH")}
        python = " ".join(f"{k}={shlex.quote(v)}" for k, v in needed.items())
        sbatch, torchrun = (
            shlex.quote(str(root / name)) for name in ("slurm.sbatch", "torchrun.sh")
        )
        run_dir = shlex.quote(str(path.absolute()))
        where, meet = (
            ("on each host", "LLMEXP_RDZV_ENDPOINT=HOST1:29400 ")
            if nodes > 1
            else ("on any host", "")
        )
        if note := fixed_here(config, path):
            lines.append(f"note        {note}")
        lines.append(f"with Slurm  {python} sbatch --nodes={nodes} {sbatch} {run_dir}")
        lines.append(f"{where:<11} {meet}{python} {torchrun} {run_dir}")
    return "\n".join(lines)


def fixed_here(config: Config, path: Path) -> str:
    """Return what this host has chosen for a run that may start on another kind of host; empty if
    nothing."""
    p, recorded = config.parallelism, fileio.read_json(path / rundir.RUN)
    if config.train.device != "auto" or recorded["device"] != "cpu":
        return ""
    chosen = [f"precision={recorded['precision']}"] if config.precision.kind == "auto" else []
    if p.kind != "single" and p.nproc_per_node is None:
        chosen.append(f"parallelism.nproc_per_node={recorded['nproc_per_node']}")
    return (
        f"this host has no GPU, so it chose {' and '.join(chosen)}; for hosts with GPUs say it"
        if chosen
        else ""
    )


# Inside a job.


def run(path: Path) -> int:
    """Train the run on this node; its exit code. A job that Slurm stopped goes back into the queue,
    once."""
    seen: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        # Not ignored, which the child would inherit. Not passed on: Slurm sends it to all processes
        # of the job, and training takes a third signal for impatience.
        signal.signal(number, lambda number, frame: seen.append(number))
    env = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
    }  # else a lost node is told by traces of C++ before the words
    code: int = start_worker(str(path), env=env, process_group=None).wait()
    first_node = os.environ.get("SLURM_NODEID", "0") == "0"
    if seen and first_node and code not in (DONE, REFUSED):
        requeue(os.environ["SLURM_JOB_ID"], warned=signal.SIGUSR2 in seen, saved=code == PREEMPTED)
    return 128 - code if code < 0 else code


def requeue(job: str, *, warned: bool, saved: bool) -> bool:
    """Put this job back into the queue when Slurm preempts it or end it at its time limit; whether
    it did so.

    A job that leaves within the grace time of a preemption would count as failed, and would not
    come back. At a time limit (`warned` of it, or past it) only a run that `saved` comes back: the
    next time would be as short. What a plain scancel stopped shows neither, and stays out.
    """
    for attempt in range(3):
        try:
            text = client("scontrol", "show", "job", "--oneliner", job)
            facts = dict(re.findall(r"(?<!\S)(JobState|Reason|PreemptTime)=(\S*)", text))
            state, preempted = (
                facts.get("JobState"),
                facts.get("PreemptTime", "None") not in ("None", "Unknown"),
            )
            running, late = state == "RUNNING", facts.get("Reason") == "TimeLimit"
            if not ((running and preempted) or (saved and late) or (saved and running and warned)):
                return False
            client("scontrol", "requeue", job)
        except OSError as error:
            print(
                f"llmexp: Slurm job {job} cannot be queued again (attempt {attempt + 1}): {error}",
                file=sys.stderr,
            )
            time.sleep(2)
        else:
            print(
                f"llmexp: Slurm job {job} was "
                f"{'preempted' if preempted else 'near its time limit'}; queued again"
            )
            return True
    return False


def run_submitted(path: str) -> None:
    """Run what a submitit job calls. Leaves with the exit code, so that a failed run shows as
    FAILED in Slurm."""
    if code := run(Path(path)):
        leave(code)


if __name__ == "__main__":
    if len(sys.argv) != 2 or "SLURM_JOB_ID" not in os.environ:
        sys.exit(
            "usage, inside a Slurm job (see launchers/slurm.sbatch): python -m llmexp.sweep.slurm "
            "RUN_DIR"
        )
    leave(run(Path(sys.argv[1])))
