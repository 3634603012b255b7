"""A sweep from its points to its exit code.

points -> check them all -> ledger and run folders -> local | slurm | ray -> table, comparison, exit
code
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from llmexp.compose.app import chosen_folder, fixed_folder, section
from llmexp.compose.command_line import kept_back
from llmexp.compose.security import refuse_secrets
from llmexp.config.convert import convert_section
from llmexp.config.values import ConfigError, refuse, typed
from llmexp.folders import ledger as ledgers
from llmexp.folders import rundir
from llmexp.sweep import ray, slurm
from llmexp.sweep.current import Checker, Current
from llmexp.sweep.grid import run_grid
from llmexp.sweep.running import LAUNCHERS
from llmexp.sweep.search import run_search
from llmexp.sweep.section import Sweep, build_sweep
from llmexp.sweep.table import open_ledger
from llmexp.system.child import PREEMPTED, say
from llmexp.system.workers import warm

KNOBS: dict[str, Any] = {"slurm": slurm, "ray": ray}  # modules with `Knobs` and `check`


def sweep(cfg: DictConfig, overrides: Sequence[str], arguments: Sequence[str]) -> tuple[int, Path]:
    """Run a sweep, or go on with one; return its exit code and its folder.

    `arguments`: the command line, for the way to go on. Exit code: 0; 1 if a point did not finish;
    75 when a signal stopped it. Raises ConfigError.
    """
    with contextlib.ExitStack() as stack:
        knobs, where = section_of(cfg)
        # at once: it imports torch meanwhile
        stack.enter_context(warm(knobs.warm, at_once=True))
        checker = stack.enter_context(contextlib.closing(Checker(later=knobs.warm)))
        refuse_secrets(list(arguments), "the command line")
        fixed = fixed_folder(overrides, "hydra.sweep.dir")
        grid = knobs.search.trials is None
        current = Current(
            knobs, cfg, list(arguments), where, fixed, grid, *check_launcher(cfg), checker, stack,
        )  # fmt: skip
        if current.resumed:
            open_ledger(current)
        (run_grid if grid else run_search)(current, overrides)
    path = current.ledger.path
    if current.ledger.state == "finished":
        return 0, path
    again = f"to continue: {rundir.how_to_resume(path, *kept_back(arguments))}"
    say(f"{'stopped' if current.stopped else 'not all finished'}; {again}")
    return PREEMPTED if current.stopped else 1, path


def section_of(cfg: DictConfig) -> tuple[Sweep, Path]:
    """Return the section `sweep`, checked, and the sweep's folder. Raises ConfigError."""
    knobs = build_sweep(section(cfg, "sweep"))
    if knobs.resume is not None:
        where = Path(knobs.resume)
        if not ledgers.is_sweep(where) and not ledgers.runs_in(where):
            text = f"is not a sweep (it has no {ledgers.LEDGER}, and no runs)"
            raise refuse(
                "not_a_run", "sweep.resume", where, text, "outputs/default/2030-01-01_12-00-00"
            )
        rundir.check_plain(where)
        return knobs, where
    where = chosen_folder(cfg, "hydra.sweep.dir")
    rundir.check_writable(where, "hydra.sweep.dir")
    if ledgers.is_sweep(where):
        text = f"holds a sweep already; to continue it: {typed('sweep.resume', where)}"
        raise refuse("exists", "hydra.sweep.dir", where, text)
    return knobs, where


def check_launcher(cfg: DictConfig) -> tuple[str, Any]:
    """Return local, slurm or ray, and its checked knobs, if it has any. Raises ConfigError."""
    given = section(cfg.hydra, "launcher")
    target = str(given.pop("_target_", None))
    name = target.removeprefix("hydra_plugins.llmexp.").removesuffix("Launcher").lower()
    if name not in LAUNCHERS:
        text = f"does not run here; it is one of {', '.join(LAUNCHERS)}"
        raise ConfigError("unknown_option", f"hydra/launcher: {target} {text}")
    if name not in KNOBS:
        return name, None
    knobs: Any = convert_section(KNOBS[name].Knobs, given, "hydra.launcher.")
    refuse_secrets(given, "hydra.launcher")  # the jobs' scripts are files
    KNOBS[name].check(knobs)
    return name, knobs
