"""A sweep from its points to its exit code.

points -> check them all -> ledger and run folders -> local | slurm | ray -> table, comparison, exit
code
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from llmexp.compare.screening import design
from llmexp.compose.app import chosen_folder, fixed_folder, section
from llmexp.compose.command_line import kept_back
from llmexp.compose.environment import refuse_secrets
from llmexp.runs import ledger as ledgers
from llmexp.runs import rundir
from llmexp.settings.knobs import SEED
from llmexp.settings.values import ConfigError, pasteable, refuse, typed
from llmexp.sweep import search
from llmexp.sweep.batch import run_batch
from llmexp.sweep.current import Checker, Current
from llmexp.sweep.deciding import seeded
from llmexp.sweep.points import asked_of, expand, grid_of, load_points
from llmexp.sweep.running import check_launcher
from llmexp.sweep.section import Sweep, build_sweep
from llmexp.system.child import PREEMPTED, say
from llmexp.system.workers import warm

_SIZES = (8, 16, 32)  # runs of a screen
DECIDING = ("first_seeds", "max_seeds", "max_hours", "max_tokens")  # knobs of sweep.decide alone


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
        if current.grid:
            points = points_of(cfg, overrides, knobs)
            if knobs.decide:
                current.seeds, points = seeded(knobs, where, cfg, arguments, points)
            run_batch(current, *load_points(cfg, points, 0, knobs, where))
        else:
            search.run_search(current, overrides)
    path = current.ledger.path
    again = f"to go on: {rundir.how_to_resume(path, *kept_back(arguments))}"
    if current.ledger.state == "finished":
        return 0, path
    if current.stopped:
        say(f"stopped; {again}")
        return PREEMPTED, path
    say(f"not all finished; {again}")
    return 1, path


def points_of(cfg: DictConfig, overrides: Sequence[str], knobs: Sweep) -> list[list[str]]:
    """Return the overrides of each point of a grid, or of a screen. Raises ConfigError."""
    if knobs.screen is None:
        return expand(cfg, overrides)
    return screened(cfg, overrides, knobs.screen)


def section_of(cfg: DictConfig) -> tuple[Sweep, Path]:
    """Return the section `sweep`, checked, and the sweep's folder. Raises ConfigError."""
    knobs = build_sweep(section(cfg, "sweep"))
    refuse_idle(knobs)
    if knobs.screen is not None:
        refuse_beside(knobs)
    if knobs.resume is not None:
        where = Path(knobs.resume)
        if not ledgers.is_sweep(where) and not ledgers.runs_in(where):
            text = f"is no sweep (it has no {ledgers.LEDGER}, and no runs)"
            raise refuse(
                "not_a_run", "sweep.resume", where, text, "outputs/default/2030-01-01_12-00-00"
            )
        rundir.check_plain(where)
        return knobs, where
    where = chosen_folder(cfg, "hydra.sweep.dir")
    rundir.check_writable(where, "hydra.sweep.dir")
    if ledgers.is_sweep(where):
        text = f"holds a sweep already; to go on with it: {typed('sweep.resume', where)}"
        raise refuse("exists", "hydra.sweep.dir", where, text)
    return knobs, where


def refuse_idle(knobs: Sweep) -> None:
    """Raise ConfigError for a knob that would do nothing beside the others."""
    halving, keep = knobs.halving, knobs.halving_keep
    if halving is None and keep != 0.5 and knobs.resume is None:
        what = "sweep.halving, the share of its steps that each point gets at first"
        text = f"does nothing without {what}"
        raise refuse("idle_knob", "sweep.halving_keep", keep, text, "0.25 sweep.halving=0.125")
    if halving is not None and keep == 1:
        raise refuse(
            "out_of_range", "sweep.halving_keep", keep, "keeps all points at every rung", 0.5
        )
    if knobs.decide and halving is not None:
        text = "lets settings race by a seed each, and sweep.decide gives them seeds; leave one out"
        raise refuse("conflict", "sweep.halving", halving, text, "null")
    if knobs.decide and knobs.report == "throughput":
        text = "compares rates, which sweep.decide does not decide by"
        raise refuse("conflict", "sweep.report", knobs.report, text, "runs")
    for name in DECIDING if not knobs.decide else ():
        value, default = getattr(knobs, name), getattr(Sweep, name)
        if value != default:
            text = "does nothing without sweep.decide=true; add that, or leave it out"
            raise refuse("idle_knob", f"sweep.{name}", value, text, f"{value} sweep.decide=true")
    if knobs.twins and knobs.report == "throughput":
        text = "measures losses, which sweep.report=throughput does not compare"
        raise refuse("conflict", "sweep.twins", knobs.twins, text, 0)


def screened(cfg: DictConfig, overrides: Sequence[str], runs: int | str) -> list[list[str]]:
    """Return the overrides of each point, all with every seed that is given. Raises ConfigError."""
    asked = asked_of(cfg, overrides)
    swept = {o.get_key_element(): o for o in asked if o.is_sweep_override()}
    values: dict[str, list[str]] = {}
    for key, o in swept.items():
        values[key] = list(o.sweep_string_iterator()) if o.is_discrete_sweep() else []
        if key != SEED and len(values[key]) != 2:
            text = "a screen takes two values of each key"
            two = ",".join(values[key][:2] if len(values[key]) > 2 else ("1e-3", "3e-3"))
            raise ConfigError(
                "out_of_range",
                f"{o.input_line}: {text}; for example {pasteable(f'{key}={two}')}",
                key,
            )
    seeds = [f"{SEED}={seed}" for seed in values.pop(SEED, [])]
    given = grid_of([o for o in asked if not o.is_sweep_override()])[0]
    levels = [[f"{key}={value}" for value in two] for key, two in values.items()]
    found = []
    for row in design(len(levels), size_of(len(levels), runs)):
        point = [*given, *(two[level] for two, level in zip(levels, row, strict=True))]
        found += [[*point, seed] for seed in seeds] if seeds else [point]
    return found


def size_of(keys: int, runs: int | str) -> int:
    """Return 16 runs for up to 8 keys, 32 for more: none is confounded with a pair up to 16 keys.

    Three keys have 8 combinations. A number that is given is only checked. Raises ConfigError.
    """
    if not 3 <= keys < _SIZES[-1]:
        text = f"a screen takes 3 to 31 keys with two values each, and there are {keys}; "
        text += "all combinations are trained by -m in place of --screen, without sweep.screen"
        example = "llmexp train -m optimizer.lr=1e-3,3e-3 clip.max_norm=0.5,1.0"
        raise refuse("out_of_range", "sweep.screen", runs, f"{text}; for example {example}")
    if runs == "auto":
        runs = 8 if keys == 3 else 16 if keys <= 8 else 32
    if runs not in _SIZES:
        raise refuse("out_of_range", "sweep.screen", runs, "must be 8, 16, 32 or auto", 16)
    if not int(runs).bit_length() - 1 <= keys < int(runs):
        fits = [n for n in _SIZES if n.bit_length() - 1 <= keys < n]
        text = f"does not fit {keys} keys, which take {' or '.join(map(str, fits))} runs"
        raise refuse("out_of_range", "sweep.screen", runs, text, fits[0])
    return int(runs)


def refuse_beside(knobs: Sweep) -> None:
    """Raise ConfigError for knobs that a screen does not go with."""
    for name in ("decide", "halving", "twins"):
        if value := getattr(knobs, name):
            text = "does not go with a screen, which trains each of its runs once; leave it out"
            raise refuse("conflict", f"sweep.{name}", value, text)
    if knobs.search.trials is not None:
        text = "does not go with a screen; leave one of them out"
        raise refuse("conflict", "sweep.search.trials", knobs.search.trials, text)
