"""Run inside a Slurm job, once a node: `python -m llmexp.sweep.slurm_job RUN_DIR`.

It starts `python -m llmexp.train RUN_DIR`. Slurm's signals reach every process of a job; training
saves and leaves by itself. What is left to do here is to put a preempted job, or one at its time
limit, back into the queue.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from llmexp.system.child import DONE, PREEMPTED, REFUSED, end_process
from llmexp.system.workers import start_worker

CLIENT_TIMEOUT_S = 60.0  # Slurm's commands hang for minutes when the controller is away
# The variables that describe the job that this process is in, its GPUs and its ranks included.
OF_THE_JOB = re.compile(
    r"SLURM(?!_CONF)|SRUN_|PMI|(CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL"
    r"|ZE_AFFINITY_MASK|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE)$"
)


def outside() -> dict[str, str]:
    """Return the environment without the variables of the Slurm job that this process is in.

    What is submitted from inside a job is no part of it. $SLURM_CONF stays: it says where the
    cluster is.
    """
    if "SLURM_JOB_ID" not in os.environ:  # then SLURM_* are the user's own defaults
        return dict(os.environ)
    return {k: v for k, v in os.environ.items() if not OF_THE_JOB.match(k)}


def client(*command: str) -> str:
    """Return the output of one of Slurm's commands. Raises OSError with its error."""
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


def states() -> dict[str, tuple[str, str]]:
    """Return (state, reason or nodes) of the user's jobs by id, 12 or 12_3. Raises OSError.

    Jobs that have ended are there for a while too.
    """
    form = "--format=%i|%T|%R"
    out = client("squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", form)
    rows = [line.split("|", 2) for line in out.splitlines() if line.count("|") >= 2]
    return {job: (state, reason.strip("()")) for job, state, reason in rows}


def meeting_address() -> str:
    """Return the address of the first node of this step, where its ranks meet.

    Slurm's own variable has the host where srun was typed.
    """
    name = client("scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]).split()[0]
    with contextlib.suppress(OSError):  # the controller may be away; the name is most often enough
        facts = client("scontrol", "show", "node", "--oneliner", name)
        if found := re.search(r"(?<!\S)NodeAddr=(\S+)", facts):
            return found[1]
    return name


def run_job(path: Path) -> int:
    """Train the run on this node; return the exit code.

    A job that Slurm stopped goes back into the queue, once.
    """
    seen: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        # Not ignored, which the child would inherit. Not passed on: Slurm sends it to all processes
        # of the job, and training takes a third signal for impatience.
        signal.signal(number, lambda number, frame: seen.append(number))
    # else traces of C++ stand before the report of a lost node
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    if os.environ.get("SLURM_NNODES", "1") != "1":
        with contextlib.suppress(OSError):  # then the ranks meet where srun was typed
            env["MASTER_ADDR"] = meeting_address()
    code: int = start_worker(str(path), env=env, process_group=None).wait()
    first_node = os.environ.get("SLURM_NODEID", "0") == "0"
    if seen and first_node and code not in (DONE, REFUSED):
        requeue(os.environ["SLURM_JOB_ID"], warned=signal.SIGUSR2 in seen, saved=code == PREEMPTED)
    return 128 - code if code < 0 else code


def requeue(job: str, *, warned: bool, saved: bool) -> None:
    """Put this job back into the queue when Slurm preempts it, or ends it at its time limit.

    A job that leaves within the grace time of a preemption would count as failed, and would not
    come back. At a time limit (`warned` of it, or past it) only a run that `saved` comes back: the
    next time would be as short. What a plain scancel stopped shows neither, and stays out.
    """
    for attempt in range(1, 4):
        try:
            text = client("scontrol", "show", "job", "--oneliner", job)
            facts = dict(re.findall(r"(?<!\S)(JobState|Reason|PreemptTime)=(\S*)", text))
            running, late = facts.get("JobState") == "RUNNING", facts.get("Reason") == "TimeLimit"
            preempted = running and facts.get("PreemptTime", "None") not in ("None", "Unknown")
            if preempted or (saved and (late or (running and warned))):
                client("scontrol", "requeue", job)
                why = "preempted" if preempted else "near its time limit"
                print(f"llmexp: Slurm job {job} was {why}; queued again")
            return
        except OSError as error:
            text = f"cannot be queued again (attempt {attempt}): {error}"
            print(f"llmexp: Slurm job {job} {text}", file=sys.stderr)
            time.sleep(2)


if __name__ == "__main__":
    if len(sys.argv) != 2 or "SLURM_JOB_ID" not in os.environ:
        usage = "python -m llmexp.sweep.slurm_job RUN_DIR"
        sys.exit(f"usage, inside a Slurm job (see launchers/slurm.sbatch): {usage}")
    end_process(run_job(Path(sys.argv[1])))
