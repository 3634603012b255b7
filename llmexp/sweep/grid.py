"""Run a grid, or a screen: all its points are known beforehand. Then twins of the best setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from omegaconf import DictConfig

from llmexp.compare import reading
from llmexp.compare.comparing import findings
from llmexp.compare.screening import design
from llmexp.config.knobs import SEED
from llmexp.config.labels import plural
from llmexp.config.values import ConfigError, pasteable, refuse
from llmexp.folders import rundir
from llmexp.folders.ledger import Ledger, LedgerEntry
from llmexp.sweep.current import Current
from llmexp.sweep.deciding import Deciding, refuse_undecidable, seeded
from llmexp.sweep.points import Point, asked_of, expand, grid_of
from llmexp.sweep.running import run_points, run_rungs
from llmexp.sweep.section import Sweep
from llmexp.sweep.show import ONE_RUN, name_of, warn_of_budgets
from llmexp.sweep.table import checked, copies_of, is_longer, left_of, place_points, startable
from llmexp.system.child import say

_SIZES = (8, 16, 32)  # runs of a screen


def points_of(cfg: DictConfig, overrides: Sequence[str], knobs: Sweep) -> list[list[str]]:
    """Return the overrides of each point of a grid, or of a screen, with every seed that is given.

    Raises ConfigError.
    """
    if knobs.screen is None:
        return expand(cfg, overrides)
    asked, pairs = asked_of(cfg, overrides), dict[str, list[str]]()
    for key, o in {o.get_key_element(): o for o in asked if o.is_sweep_override()}.items():
        values = list(o.sweep_string_iterator()) if o.is_discrete_sweep() else []
        if key != SEED and len(values) != 2:
            text = f"{o.input_line}: a screen takes two values of each key; for example "
            text += pasteable(f"{key}={','.join(values[:2] if values[2:] else ('1e-3', '3e-3'))}")
            raise ConfigError("out_of_range", text, key)
        pairs[key] = [f"{key}={value}" for value in values]
    seeds = [[seed] for seed in pairs.pop(SEED, [])] or [[]]
    given = grid_of([o for o in asked if not o.is_sweep_override()])[0]
    rows = design(len(pairs), size_of(len(pairs), knobs.screen))
    points = [[two[level] for two, level in zip(pairs.values(), row, strict=True)] for row in rows]
    return [[*given, *point, *seed] for point in points for seed in seeds]


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


def run_grid(current: Current, overrides: Sequence[str]) -> None:
    """Train all points of a grid, and twins of the leading one. Raises ConfigError."""
    knobs, ledger = current.knobs, current.opened
    texts = points_of(current.cfg, overrides, knobs)
    if knobs.decide:
        current.seeds, texts = seeded(knobs, ledger, current.cfg, current.arguments, texts)
    able, refused = checked(current, texts)
    if knobs.decide:
        refuse_undecidable(knobs, current.seeds, able)
    if ledger is None:
        warn_of_budgets([p.spent for p in able], knobs, current.arguments)
        if len(able) + len(refused) == 1:
            say(ONE_RUN)
    first = ledger.next_number() if ledger else 0
    points = place_points(current, able, refused)
    if ledger is not None:
        # those of earlier commands; twins are trained at the end
        asked = {point.entry.folder for point in points}
        others = [e for e in ledger.points if not (e.is_twin or e.refused or e.folder in asked)]
        points += left_of(current, [e for e in others if e.rung is None])
        say(_beginning(ledger, points, first))
    if knobs.decide:
        Deciding(current, points).run()
    else:
        run_rungs(current, points)
    run_twins(current)


def _beginning(ledger: Ledger, points: Sequence[Point], first: int) -> str:
    """Say what a sweep that goes on has to do; points from the number `first` on are new."""
    kinds = Counter(
        "new" if p.entry.number >= first
        else "with a longer budget" if is_longer(p)
        else "finished" if ledger.look(p.entry) == "finished"
        else "to train" if p.entry.rung is None
        else "left out so far"
        for p in points
    )  # fmt: skip
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"resuming {plural(len(points), 'run')}: {told}"


def leading(ledger: Ledger) -> LedgerEntry | None:
    """Return a finished point of the leading setting, as the answer at the end names it."""
    found = findings(reading.runs_in(ledger.path))
    own = {ledger.path / e.folder: e for e in ledger.points if not e.is_twin}
    runs = (run.path for s in found.ranked for run in s.taking_part)
    return next((own[path] for path in runs if path in own), None)


def run_twins(current: Current) -> None:
    """Train twins of the leading point, and those of earlier commands that are not finished."""
    if current.over:
        return
    ledger = current.ledger
    # Twins that never began may be those of a setting that leads no more.
    never = [e for e in ledger.points if e.is_twin and not rundir.is_run(ledger.path / e.folder)]
    ledger.points = [e for e in ledger.points if e.state == "infeasible" or e not in never]
    lead, twins = leading(ledger) if current.knobs.twins else None, list[Point]()
    there = [e for e in ledger.points if e.is_twin]
    if lead is not None:
        twins = copies_of(current, lead, "twin", range(1, current.knobs.twins + 1))
        if new := sum(twin.entry not in there for twin in twins):
            name = name_of(lead, ledger.swept)
            other = ", where another setting led before," if there else ""
            say(f"{name}{other} leads; {plural(new, 'twin')} of it will show what rounding makes")
    run_copies(current, twins, there)


def run_copies(
    current: Current, copies: Sequence[Point], earlier: Iterable[LedgerEntry], why: str = ""
) -> None:
    """Train copies of points, and those that earlier commands have left; say `why` if any is."""
    asked = [copy.entry for copy in copies]
    points = startable(current, copies) + left_of(current, (e for e in earlier if e not in asked))
    if any(current.ledger.look(point.entry) != "finished" for point in points):
        if why:
            say(why)
        run_points(current, points)
