"""`llmexp train`: one run, a sweep (-m), or one of Hydra's flags."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from llmexp.cli.running import CommandLine, Screen, as_json
from llmexp.config.sections import Config, conf_dir, plain
from llmexp.config.values import ConfigError, refuse
from llmexp.folders import rundir
from llmexp.system.child import say

if TYPE_CHECKING:
    from omegaconf import DictConfig


def train(
    line: CommandLine = (),
    *,
    screen: Screen = False,
    create_only: Annotated[
        bool, "make the run's folder and start nothing: for torchrun on several hosts, Slurm, ..."
    ] = False,
    json: Annotated[bool, "print nothing but the result on standard output, as JSON"] = False,
) -> int:
    """Train one run, or a sweep (-m); return the exit code."""
    return _start_with_json(line) if json else _start_run(line)[0]


def _start_with_json(line: argparse.Namespace) -> int:
    """Train with nothing but the result, as JSON, on standard output; return the exit code."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # the only text on standard output is the result
        try:
            code, path = _start_run(line)
        finally:
            sys.stdout.flush()
            os.dup2(out.fileno(), 1)  # for the error
        if path is not None:
            from llmexp.cli import runs

            whole = {"path": str(path), "exit_code": code, "runs": runs.list_runs(path)}
            out.write(as_json(whole) + "\n")
    return code


def _start_run(args: argparse.Namespace) -> tuple[int, Path | None]:
    """Train what the parsed arguments ask for.

    Return the exit code, and the folder of the run or the sweep if one was made. Raise ConfigError.
    """
    from llmexp.cli.worker import Worker
    from llmexp.compose import app
    from llmexp.compose.command_line import refuse_unused
    from llmexp.compose.security import refuse_secrets

    with contextlib.ExitStack() as stack:
        worker = None if args.multirun else stack.enter_context(contextlib.closing(Worker()))
        with app.composed(args) as (cfg, multirun):
            refuse_unused(args.overrides, multirun)
            if multirun:
                if worker is not None:  # hydra.mode in a config asks for the sweep
                    worker.close()
                return _sweep(args, cfg)
            config = app.typed_config(cfg, note=say)
            wanted, fixed = app.run_folder(cfg, args.overrides)
        refuse_secrets(args.overrides, "the command line")
        if not args.create_only:
            app.refuse_hosts(config)
        request = {
            "config": plain(config),
            "folder": str(wanted),
            "fixed": fixed,
            "overrides": app.visible(args.overrides),
            "place": app.where_options_are(args),
            "queue": args.create_only,
        }
        assert worker is not None
        code, path = worker.run(request)
        if args.create_only and code == 0 and path is not None:
            say(how_to_start(path, config))
        return code, path


def _sweep(args: argparse.Namespace, cfg: DictConfig) -> tuple[int, Path | None]:
    """Train all points of a sweep: see `_start_run`."""
    from omegaconf import OmegaConf

    from llmexp.compose.forking import with_steps
    from llmexp.compose.security import fill_tracker
    from llmexp.sweep.main import sweep

    if args.create_only:
        text = "makes the folder of one run; for a sweep use hydra/launcher=slurm"
        raise ConfigError("unsupported", f"--create-only: {text}")
    if cfg.tracker.kind == "wandb" and (run_id := os.environ.get("WANDB_RUN_ID")):
        text = (
            "is the id of one run, and a sweep has several; unset it (wandb agent: "
            "its command has no -m)"
        )
        raise refuse("conflict", "WANDB_RUN_ID", run_id, text)
    for unused in fill_tracker({"tracker": OmegaConf.to_container(cfg.tracker)}):
        say(unused)
    given, words = (with_steps(a, args.overrides) for a in (args.overrides, args.words))
    return sweep(cfg, given, words)


def how_to_start(path: Path, config: Config) -> str:
    """Return the folder of a run that was queued, and the commands that start it."""
    from llmexp.sweep.slurm import fixed_here

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
