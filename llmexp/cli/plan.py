"""`llmexp plan`: check everything and print the banner of the run, or a row a point (-m)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llmexp.cli import hydra_flags
from llmexp.compose import app, command_line, origin
from llmexp.forecast.planned import Planned
from llmexp.forecast.section import build_plan
from llmexp.runs import rundir
from llmexp.runs.ledger import is_sweep, read_ledger
from llmexp.runs.rundir import refuse_folder
from llmexp.settings.values import refuse
from llmexp.sweep.composer import Composer
from llmexp.sweep.points import load_points, split_duplicates

if TYPE_CHECKING:
    from llmexp.sweep.planning import PlannedSweep


def main(arguments: list[str]) -> int:
    """`llmexp plan`: the banner of the run (with -m: a row a point); nothing is trained."""
    args = command_line.parse("plan", arguments)
    if hydra_flags.asked(args):
        return hydra_flags.answer_flags(args)
    found = planned(args)
    if not isinstance(found, Planned):
        from llmexp.sweep.planning import print_sweep

        return print_sweep(found, arguments, args.json)
    print(json.dumps(found.whole, indent=2, allow_nan=False) if args.json else found)
    return 0


def planned(args: Any) -> Planned | PlannedSweep:
    """Return the plan of the run, or the sweep (-m), of a parsed command line.

    Raises ConfigError for what train would refuse.
    """
    with app.composed(args) as (cfg, multirun):
        kept = [o for o in args.overrides if not o.lstrip("+").startswith("plan.")]
        origin.refuse_unused(kept, multirun)
        chosen = build_plan(app.section(cfg, "plan"))
        if multirun:
            from llmexp.sweep.deciding import seeded
            from llmexp.sweep.grid import points_of
            from llmexp.sweep.main import section_of

            knobs, where = section_of(cfg)
            if knobs.search.trials is not None:
                text = "a search chooses its points while it runs; only a grid can be planned"
                raise refuse(
                    "unsupported", "sweep.search.trials", knobs.search.trials, text, "null"
                )
            grid, seeds = points_of(cfg, args.overrides, knobs), list[int]()
            if knobs.decide:
                ledger = read_ledger(where) if is_sweep(where) else None
                seeds, _ = seeded(knobs, ledger, cfg, args.overrides, grid)
            points, refused = load_points(Composer(cfg), grid, 0, knobs, where)
            points, same = split_duplicates(points)
        else:
            config, (wanted, fixed) = app.typed_config(cfg), app.run_folder(cfg, args.overrides)
            there = fixed and rundir.is_run(wanted)
            if there:
                rundir.check_plain(wanted)
            refuse_folder(wanted, there, config.checkpoint.resume)
    from llmexp.forecast.planning import Planner

    plan_of = Planner(chosen, args.measure).planned
    if multirun:
        from llmexp.sweep.planning import plan_points

        return plan_points(points, [*refused, *same], knobs, seeds, plan_of)
    return plan_of(config, str(wanted))
