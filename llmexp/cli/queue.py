"""Say how to start a run that was queued (`llmexp train --queue`)."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from llmexp.runs import rundir
from llmexp.settings.config import Config, conf_dir
from llmexp.sweep.slurm import fixed_here


def how_to_start(path: Path, config: Config) -> str:
    """Return the folder of a run that was queued, and the commands that start it."""
    lines = [f"folder      {path}"]
    if rundir.read_status(path).get("state") != "queued":  # it was finished before
        return lines[0]
    if note := fixed_here(config, path):
        lines.append(f"note        {note}")
    needed = {"PYTHON": sys.executable}
    if os.environ.get("LLMEXP_ALLOW"):
        needed |= {k: os.environ[k] for k in ("LLMEXP_ALLOW", "PYTHONPATH")}
    python = " ".join(f"{k}={shlex.quote(v)}" for k, v in needed.items())
    nodes, root = config.parallelism.nnodes, conf_dir().parent / "launchers"
    sbatch, torchrun = (shlex.quote(str(root / name)) for name in ("slurm.sbatch", "torchrun.sh"))
    run_dir = shlex.quote(str(path.absolute()))
    where, meet = "on any host", ""
    if nodes > 1:
        where, meet = "on each host", "LLMEXP_RDZV_ENDPOINT=HOST1:29400 "
    lines.append(f"with Slurm  {python} sbatch --nodes={nodes} {sbatch} {run_dir}")
    lines.append(f"{where:<11} {meet}{python} {torchrun} {run_dir}")
    return "\n".join(lines)
