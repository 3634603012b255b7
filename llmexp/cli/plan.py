"""`llmexp plan`: check everything, print the banner of the run (-m: a row a point), start
nothing."""

from __future__ import annotations

import json

from llmexp import rundir
from llmexp.cli import hydra_flags
from llmexp.compose import app, command_line, origin
from llmexp.config import ConfigError
from llmexp.run.banner import banner_sections
from llmexp.sweep.points import expand, is_grid, load_points, split_duplicates


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
        origin.refuse_unused(args.overrides, multirun)
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
    rundir.check_writable(wanted)
    from llmexp.assembly.assemble import assemble
    from llmexp.assembly.fitting import larger_micro_batch
    from llmexp.metrics.console import banner

    parts = assemble(config, write=False)
    hint = larger_micro_batch(parts)
    if args.json:
        whole = {"folder": str(wanted), **parts.run.as_dict(), **({"hint": hint} if hint else {})}
        print(json.dumps(whole, indent=2, allow_nan=False))
        return 0
    print(banner([*banner_sections(parts.run, str(wanted)), *([("hint", hint)] if hint else [])]))
    return 0
