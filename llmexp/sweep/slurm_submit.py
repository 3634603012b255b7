"""Submit Slurm job arrays for run folders."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp import rundir
from llmexp.config import Config, ConfigError, refuse
from llmexp.sweep.slurm_job import client

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


def check(knobs: Knobs) -> None:
    """Raise ConfigError for knobs that no cluster takes, or where there is no Slurm."""
    if shutil.which("sbatch") is None or shutil.which("squeue") is None:
        raise ConfigError(
            "hydra/launcher=slurm: there is no sbatch on this host; start it where Slurm's "
            "commands are"
        )
    least = {
        "timeout_min": 1, "cpus_per_task": 1, "gpus_per_node": 0, "signal_delay_s": 1,
        "array_parallelism": 1,
    }  # fmt: skip
    for key, low in least.items():
        value = getattr(knobs, key)
        if value is not None and value < low:
            raise refuse(f"hydra.launcher.{key}", value, f"must be at least {low}", max(low, 2))
    for key in ("partition", "account", "qos"):
        text = getattr(knobs, key)
        if text is not None and not re.fullmatch(r"[\w.,:@/+-]+", text):
            needed = "one word of letters, digits and . , : @ / + - is needed"
            raise refuse(f"hydra.launcher.{key}", repr(text), needed)
    if knobs.mem_gb is not None and not 0 < knobs.mem_gb < float("inf"):
        raise refuse("hydra.launcher.mem_gb", knobs.mem_gb, "must be above 0", 32)
    delay_s = knobs.signal_delay_s
    if knobs.timeout_min is not None and knobs.timeout_min * 60 <= delay_s:
        text = f"ends before its own warning, which comes signal_delay_s={delay_s} seconds earlier"
        raise refuse("hydra.launcher.timeout_min", knobs.timeout_min, text, delay_s // 60 + 60)


def options(knobs: Knobs, nodes: int, ranks: int, device: str) -> dict[str, Any]:
    """Return sbatch's options for runs with so many ranks on each node; None leaves one out."""
    gpus = ranks if device == "cuda" else None
    return {
        "nodes": nodes,
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
        **{key.replace("_", "-"): value for key, value in knobs.additional_parameters.items()},
    }


def submit_array(paths: Sequence[Path], knobs: Knobs, script: Path, name: str) -> list[str]:
    """Submit one job array for queued run folders that need the same nodes; return the jobs' ids.
    The jobs' output goes beside the script. Raises OSError with what sbatch printed."""
    run = rundir.read_run(paths[0])
    asked = options(knobs, run["nnodes"], run["nproc_per_node"], run["device"])
    text = SCRIPT.format(
        runs="\n".join(shlex.quote(str(path.absolute())) for path in paths),
        setup="\n".join(knobs.setup),
        cpus=asked["cpus-per-task"],
        python=shlex.quote(sys.executable),
    )
    script.write_text(text, encoding="utf-8", errors="surrogateescape")
    output = str(script.parent.absolute()).replace("%", "%%")
    asked |= {
        "job-name": name,
        "array": f"0-{len(paths) - 1}%{knobs.array_parallelism}",
        "output": f"{output}/%A_%a.out",
    }
    given = {key: value for key, value in asked.items() if value not in (None, False)}
    words = [f"--{key}" if value is True else f"--{key}={value}" for key, value in given.items()]
    array = client("sbatch", "--parsable", *words, str(script)).strip().partition(";")[0]
    return [f"{array}_{i}" for i in range(len(paths))]


def fixed_here(config: Config, path: Path) -> str:
    """Return what this host has chosen for a run that may start on another kind of host; empty if
    nothing."""
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
