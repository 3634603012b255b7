"""`llmexp plan`: check everything and print the banner of the run, or a row a point (-m)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from llmexp.cli.running import CommandLine, Screen
from llmexp.config.values import refuse
from llmexp.folders import rundir

if TYPE_CHECKING:
    from llmexp.forecast.planned import Planned
    from llmexp.sweep.planning import PlannedSweep


def plan(
    line: CommandLine = (),
    *,
    screen: Screen = False,
    measure: Annotated[
        bool, "train a few steps in a temporary folder, and say how long the run takes"
    ] = False,
) -> Planned | PlannedSweep:
    """Check everything and print the banner of the run, or a row a point (-m); start nothing."""
    from llmexp.compose import app, command_line
    from llmexp.folders.ledger import is_sweep, read_ledger
    from llmexp.forecast.section import build_plan
    from llmexp.sweep.composer import Composer
    from llmexp.sweep.points import load_points, split_duplicates

    with app.composed(line) as (cfg, multirun):
        command_line.refuse_unused(line.overrides, multirun, "plan")
        chosen = build_plan(app.section(cfg, "plan"))
        if multirun:
            from llmexp.sweep.deciding import seeded
            from llmexp.sweep.grid import points_of
            from llmexp.sweep.main import section_of

            knobs, where = section_of(cfg)
            here = str(cfg.hydra.launcher["_target_"]).endswith(".LocalLauncher")
            if knobs.search.trials is not None:
                text = "a search chooses its trials while it runs; only a grid can be planned"
                raise refuse(
                    "unsupported", "sweep.search.trials", knobs.search.trials, text, "null"
                )
            grid, seeds = points_of(cfg, line.overrides, knobs), list[int]()
            if knobs.decide:
                ledger = read_ledger(where) if is_sweep(where) else None
                seeds, _ = seeded(knobs, ledger, cfg, line.overrides, grid)
            points, refused = load_points(Composer(cfg), grid, 0, knobs, where)
            points, same = split_duplicates(points)
        else:
            config, (wanted, fixed) = app.typed_config(cfg), app.run_folder(cfg, line.overrides)
            there = fixed and rundir.is_run(wanted)
            if there:
                rundir.check_plain(wanted)
            rundir.refuse_folder(wanted, there, config.checkpoint.resume)
    from llmexp.forecast.planning import Planner

    plan_of = Planner(chosen, measure).planned
    if multirun:
        from llmexp.sweep.planning import plan_points
        from llmexp.system.workers import warm

        with warm(here and knobs.warm):  # as its runs will start
            return plan_points(points, [*refused, *same], knobs, seeds, plan_of, line.words)
    return plan_of(config, str(wanted))
