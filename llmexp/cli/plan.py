"""`llmexp plan`: check everything, print the banner of the run (-m: a row a point), start
nothing."""

from __future__ import annotations

import json
from typing import Any

from omegaconf import DictConfig, OmegaConf

from llmexp import rundir
from llmexp.cli import hydra_flags
from llmexp.compose import app, command_line, origin
from llmexp.compose.errors import user_errors
from llmexp.config import ConfigError
from llmexp.forecast.settings import Plan, build_plan
from llmexp.sweep.points import expand, is_grid, load_points, split_duplicates


def plan(arguments: list[str]) -> int:
    """`llmexp plan`: the banner of the run (with -m: a row a point); nothing is trained, nothing is
    written."""
    from llmexp.sweep.main import settings_of
    from llmexp.sweep.planning import plan_sweep

    args = command_line.parse("plan", arguments)
    if hydra_flags.asked(args):
        return hydra_flags.answer(args)
    with app.hydra_app(args.config_dir, args.overrides) as hydra:
        cfg, multirun = app.compose(hydra, args.overrides, args.multirun)
        kept = [o for o in args.overrides if not o.lstrip("+").startswith("plan.")]
        origin.refuse_unused(kept, multirun)
        if multirun and not is_grid(cfg):
            raise ConfigError(
                "hydra/sweeper: this sweeper chooses its points while it runs; only a grid can be "
                "planned"
            )
        chosen = settings_of_plan(cfg)
        if multirun:
            settings, where = settings_of(cfg)
            grid = expand(hydra, cfg, args.overrides)
            points, refused = load_points(hydra.config_loader, cfg, grid, 0, settings, where)
            points, same = split_duplicates(points, lambda point: point.identity)
        else:
            config, wanted = app.typed(cfg), app.chosen_folder(cfg, "hydra.run.dir")
            rundir.check_writable(wanted)
    from llmexp.forecast.planning import Planner

    planner = Planner(chosen, args.measure)
    if multirun:
        return plan_sweep(points, [*refused, *same], settings, arguments, planner, args.json)
    from llmexp.metrics.console import banner

    found = planner.planned(config, str(wanted))
    print(json.dumps(found.whole, indent=2, allow_nan=False) if args.json else banner(found.rows))
    return 0


def settings_of_plan(cfg: DictConfig) -> Plan:
    """Return the section `plan`, checked. Raises ConfigError."""
    with user_errors():
        section: Any = OmegaConf.to_container(cfg.plan, resolve=True, throw_on_missing=True)
    return build_plan(section)
