"""A sweep from its points to its exit code.

points -> check them all -> ledger and run folders -> local | slurm | ray -> table, comparison, exit
code
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.hydra import Hydra
from omegaconf import DictConfig

from llmexp.compose.app import chosen_folder, fixed_folder, section
from llmexp.compose.command_line import kept_back
from llmexp.compose.environment import refuse_secrets
from llmexp.runs import ledger as ledgers
from llmexp.runs import rundir
from llmexp.settings.values import refuse, typed
from llmexp.sweep import search
from llmexp.sweep.batch import run_batch
from llmexp.sweep.checker import Checker
from llmexp.sweep.current import Current
from llmexp.sweep.deciding import seeded
from llmexp.sweep.launchers import check_launcher
from llmexp.sweep.points import expand, load_points
from llmexp.sweep.screen import refuse_beside, screened
from llmexp.sweep.settings import Sweep, build_sweep
from llmexp.system.child import PREEMPTED, say

DECIDING = ("first_seeds", "max_seeds", "max_hours", "max_tokens")  # knobs of sweep.decide alone


def sweep(
    hydra: Hydra, cfg: DictConfig, overrides: Sequence[str], arguments: Sequence[str]
) -> tuple[int, Path]:
    """Run a sweep, or go on with one; return its exit code and its folder.

    `arguments`: the command line, for the way to go on. Exit code: 0; 1 if a point did not finish;
    75 when a signal stopped it. Raises ConfigError.
    """
    with contextlib.ExitStack() as stack:
        checker = stack.enter_context(Checker())  # at once: it imports torch meanwhile
        settings, where = settings_of(cfg)
        refuse_secrets(list(arguments), "the command line")
        fixed = settings.resume is not None or fixed_folder(overrides, "hydra.sweep.dir")
        grid = settings.search.trials is None
        current = Current(
            settings, cfg, list(arguments), where, fixed, grid, check_launcher(cfg), checker, stack,
        )  # fmt: skip
        if current.grid:
            points = points_of(hydra, cfg, overrides, settings)
            if settings.decide:
                points = seeded(current, points)
            run_batch(current, *load_points(hydra.config_loader, cfg, points, 0, settings, where))
        else:
            search.run_search(hydra, current, overrides)
    path = current.ledger.path
    again = f"to go on: llmexp resume {shlex.quote(str(path))}{kept_back(arguments)}"
    if current.ledger.state == "finished":
        return 0, path
    if current.stopped:
        say(f"stopped; {again}")
        return PREEMPTED, path
    say(f"not all finished; {again}")
    return 1, path


def points_of(
    hydra: Hydra, cfg: DictConfig, overrides: Sequence[str], settings: Sweep
) -> list[list[str]]:
    """Return the overrides of each point of a grid, or of a screen. Raises ConfigError."""
    if settings.screen is None:
        return expand(hydra, cfg, overrides)
    return screened(hydra, cfg, overrides, settings.screen)


def settings_of(cfg: DictConfig) -> tuple[Sweep, Path]:
    """Return the section `sweep`, checked, and the sweep's folder. Raises ConfigError."""
    settings = build_sweep(section(cfg, "sweep"))
    refuse_idle(settings)
    if settings.screen is not None:
        refuse_beside(settings)
    if settings.resume is not None:
        where = Path(settings.resume)
        if not ledgers.is_sweep(where) and not ledgers.runs_in(where):
            text = f"is no sweep (it has no {ledgers.LEDGER}, and no runs)"
            raise refuse("sweep.resume", where, text, "outputs/default/2030-01-01_12-00-00")
        rundir.check_plain(where)
        return settings, where
    where = chosen_folder(cfg, "hydra.sweep.dir")
    rundir.check_writable(where, "hydra.sweep.dir")
    if ledgers.is_sweep(where):
        text = f"holds a sweep already; to go on with it: {typed('sweep.resume', where)}"
        raise refuse("hydra.sweep.dir", where, text)
    return settings, where


def refuse_idle(settings: Sweep) -> None:
    """Raise ConfigError for a knob that would do nothing beside the others."""
    halving, keep = settings.halving, settings.halving_keep
    if halving is None and keep != 0.5 and settings.resume is None:
        what = "sweep.halving, the share of its steps that each point gets at first"
        text = f"does nothing without {what}"
        raise refuse("sweep.halving_keep", keep, text, "0.25 sweep.halving=0.125")
    if halving is not None and keep == 1:
        raise refuse("sweep.halving_keep", keep, "keeps all points at every rung", 0.5)
    if settings.decide and halving is not None:
        text = "lets settings race by a seed each, and sweep.decide gives them seeds; leave one out"
        raise refuse("sweep.halving", halving, text, "null")
    if settings.decide and settings.report == "throughput":
        text = "compares rates, which sweep.decide does not decide by"
        raise refuse("sweep.report", settings.report, text, "runs")
    for name in DECIDING if not settings.decide else ():
        value, default = getattr(settings, name), getattr(Sweep, name)
        if value != default:
            text = "does nothing without sweep.decide=true; add that, or leave it out"
            raise refuse(f"sweep.{name}", value, text, "null" if default is None else default)
    if settings.twins and settings.report == "throughput":
        text = "measures losses, which sweep.report=throughput does not compare"
        raise refuse("sweep.twins", settings.twins, text, 0)
