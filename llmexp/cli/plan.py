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
from llmexp.run.banner import banner_sections
from llmexp.sweep.points import expand, is_grid, load_points, split_duplicates

HOW_TO_ASK = "not planned; add plan.device=h200 (or another device)"


def plan(arguments: list[str]) -> int:
    """`llmexp plan`: the banner of the run (with -m: a row a point); nothing is trained, nothing is
    written."""
    from llmexp.sweep.main import settings_of
    from llmexp.sweep.planning import plan_sweep

    args = command_line.parse("plan", arguments)
    if hydra_flags.asked(args):
        return hydra_flags.answer(args)
    with app.hydra_app(args.config_dir) as hydra:
        cfg, multirun = app.compose(hydra, args.overrides, args.multirun)
        kept = [o for o in args.overrides if multirun or not o.lstrip("+").startswith("plan.")]
        origin.refuse_unused(kept, multirun)
        if multirun and not is_grid(cfg):
            raise ConfigError(
                "hydra/sweeper: this sweeper chooses its points while it runs; only a grid can be "
                "planned"
            )
        if multirun:
            settings, where = settings_of(cfg)
            grid = expand(hydra, cfg, args.overrides)
            points, refused = load_points(hydra.config_loader, cfg, grid, 0, settings, where)
            points, same = split_duplicates(points, lambda point: point.identity)
            return plan_sweep(points, [*refused, *same], settings, arguments, args.json)
        config, wanted = app.typed(cfg), app.chosen_folder(cfg, "hydra.run.dir")
        chosen = settings_of_plan(cfg)
    rundir.check_writable(wanted)
    from llmexp.metrics.console import banner

    if chosen.device is None:
        from llmexp.assembly.assemble import assemble

        run = assemble(config, write=False).run
        rows = [*banner_sections(run, str(wanted)), ("memory", HOW_TO_ASK)]
        whole = {"folder": str(wanted), **run.as_dict()}
    else:
        from llmexp.forecast.planning import planned

        rows, whole = planned(config, chosen, chosen.device, str(wanted))
    print(json.dumps(whole, indent=2, allow_nan=False) if args.json else banner(rows))
    return 0


def settings_of_plan(cfg: DictConfig) -> Plan:
    """Return the section `plan`, checked. Raises ConfigError."""
    with user_errors():
        section: Any = OmegaConf.to_container(cfg.plan, resolve=True, throw_on_missing=True)
    return build_plan(section)
