"""Describe a sweep before anything is spent: a row a point, and a warning of unequal budgets."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmexp.compare.alpha_spending import expected_runs
from llmexp.config.labels import plural
from llmexp.config.sections import Config, plain
from llmexp.config.values import ConfigError
from llmexp.folders.ledger import LedgerEntry, PointFacts, config_identity
from llmexp.forecast.duration import over_slots, spent
from llmexp.forecast.planned import Planned
from llmexp.sweep.deciding import refuse_undecidable
from llmexp.sweep.points import Point, counted, reasons, split_duplicates
from llmexp.sweep.section import Sweep
from llmexp.sweep.show import ONE_RUN, fitted, naming, warn_of_budgets, width_of
from llmexp.system.child import DONE, REFUSED
from llmexp.system.redact import redacted
from llmexp.system.text import aligned, duration, gib

# Columns, with the keys of what they show; a swept one would repeat them.
_KEYS = {
    "micro": "batch.micro_batch_size",
    "accum": "batch.gradient_accumulation_steps",
    "dp": "dp_size",
    "batch": "batch.real_batch_size",
    "length": "batch.sequence_length",
    "steps": "train.max_steps",
    "tokens": "train.max_tokens",
    "epochs": "train.max_epochs",
}


@dataclass(frozen=True)
class PlannedSweep:
    """Hold the plan of each point that can be trained, what they take together, and the others."""

    points: list[Point]
    plans: list[Planned]
    refused: list[LedgerEntry]
    knobs: Sweep
    total: dict[str, Any]
    words: Sequence[str]  # of the command

    @property
    def exit_code(self) -> int:
        """Return that of a refusal where train would refuse a point."""
        return REFUSED if self.refused else DONE

    @property
    def data(self) -> dict[str, Any]:
        """Return what `llmexp plan -m --json` prints."""
        rows = [
            {"name": point.entry.name, "values": point.values, **one.data}
            for point, one in zip(self.points, self.plans, strict=True)
        ]
        whole = {"points": rows, "total": self.total, "refused": reasons(self.refused)}
        known = [{"name": e.name, "code": e.kind, "message": e.refused} for e in self.refused]
        return whole | {"refusals": known}

    def show(self) -> None:
        """Print a row a point; a point that train would refuse has its reason instead."""
        if self.points:
            self.show_points()
            total, knobs = self.total, self.knobs
            if "duration_s" in total:
                flops = f", {total['flops']:.3g} FLOPs" if "flops" in total else ""
                used = spent(total.get("gpu_hours"), total.get("cost_in_currency_of_price"))
                note = f", {used}" * bool(used) + ", every run to its end" * bool(knobs.halving)
                note += ", one seed each" * knobs.decide + ", without the twins" * bool(knobs.twins)
                time = f"{duration(total['duration_s'])} on {plural(total['slots'], 'slot')}"
                print(fitted(f"in all {total['tokens']:,} tokens{flops}, {time}{note}"), flush=True)
            if "sweep.decide" in total:
                print(fitted(seeds_in_words(total["sweep.decide"], knobs)), flush=True)
            warn_of_budgets([p.spent for p in self.points], self.knobs, self.words)
        for line in reasons(self.refused):
            print(redacted(f"refused: {line}"), file=sys.stderr)

    def show_points(self) -> None:
        """Print the points with the figures that differ, and once those that all share."""
        points, figures, twins = self.points, list(map(cells, self.plans)), self.knobs.twins
        swept = {key for point in points for key in point.values}
        known = dict.fromkeys(name for row in figures for name in row)
        shown = [name for name in known if _KEYS.get(name) not in swept]
        same = [
            name
            for name in shown
            if len(points) > 1
            and name not in ("steps", "tokens")
            and len({row.get(name) for row in figures}) == 1
        ]
        shown = [name for name in shown if name not in same]
        rest = [shown, *([row.get(name, "") for name in shown] for row in figures)]
        names = naming([(p.entry.number, p.values) for p in points], rest, width_of(sys.stdout, 80))
        rows = [(*a, *b) for a, b in zip(names, rest, strict=True)]
        print(aligned(rows, left=1, width=width_of(sys.stdout)), flush=True)
        count = plural(len(points), "run")
        if twins:
            count = (
                f"{count}, then {plural(twins, 'twin')} of the leading setting: "
                f"{plural(len(points) + twins, 'run')} in all"
            )
        all_have = ", ".join(f"{name} {figures[0][name]}" for name in same)
        print(fitted(f"{count}; all with {all_have}" if same else count), flush=True)
        if len(points) + len(self.refused) == 1:
            print(fitted(ONE_RUN), flush=True)


def plan_points(
    points: list[Point],
    refused: list[LedgerEntry],
    knobs: Sweep,
    seeds: Sequence[int],
    plan: Callable[[Config, str], Planned],
    words: Sequence[str],
) -> PlannedSweep:
    """Plan the points; those that train would refuse join `refused`.

    `seeds`: with sweep.decide, those of each setting at first. Raises ConfigError where seeds could
    decide nothing.
    """
    able, found = list[Point](), dict[str, Planned]()
    for point in counted("planning", points):
        try:
            one = found[point.entry.name] = plan(point.config, str(point.path))
        except ConfigError as error:
            refused.append(point.refused(error.kind, str(error)))
        else:
            run = one.run.as_dict() | {"own_tokens": one.run.own_tokens}
            facts = PointFacts(config_identity(plain(one.config)), one.gpus_here, run)
            able.append(dataclasses.replace(point, checked=facts))
    able, same = split_duplicates(able)
    refused += same
    plans = [found[point.entry.name] for point in able]
    total = totals(plans, knobs)
    if knobs.decide and not refused:
        refuse_undecidable(knobs, seeds, able)
    if knobs.decide and able[1:]:
        count, first, most = len(able), knobs.first_seeds, knobs.max_seeds
        runs = {
            "least": count * first,
            "expected": expected_runs(count, first, most),
            "most": count * most,
        }
        keys = ("tokens", "flops", "duration_s", "gpu_hours", "cost_in_currency_of_price")
        total["sweep.decide"] = {
            name: {"runs": n, **{k: total[k] * n / count for k in keys if k in total},
                   "tokens": round(total["tokens"] * n / count)}
            for name, n in runs.items()
        }  # fmt: skip
    return PlannedSweep(able, plans, refused, knobs, total, words)


def seeds_in_words(found: Mapping[str, Any], knobs: Sweep) -> str:
    """Return what a sweep that decides by itself takes, in words."""

    def words(name: str) -> str:
        known = found[name]
        time = f", {duration(known['duration_s'])}" if "duration_s" in known else ""
        return f"{known['runs']} runs ({known['tokens']:,} tokens{time})"

    limits = [
        f"sweep.{name}={value:.12g}"
        for name in ("max_hours", "max_tokens")
        if (value := getattr(knobs, name)) is not None
    ]
    within = f", within {' and '.join(limits)}" if limits else ""
    return (
        f"sweep.decide: {words('least')} at least, {words('most')} at most{within}; about "
        f"{words('expected')} where the settings lie evenly over 4 standard deviations of a seed"
    )


def cells(planned: Planned) -> dict[str, str]:
    """Return the cells of a point's row, by their columns, as far as they are known."""
    run, memory, cost = planned.run, planned.memory, planned.cost
    row, ends = dict[str, str](), (run.stages[0], run.stages[-1])
    for name, key in _KEYS.items():
        field = key.rpartition(".")[2]
        figures = [getattr(end if hasattr(end, field) else run, field) for end in ends]
        row[name] = " to ".join(dict.fromkeys(f"{figure:,}" for figure in figures))
    row["epochs"] = f"{run.max_epochs:.4g}"
    if (cost or memory.peak_bytes) and run.total_flops is not None:
        row["FLOPs"] = f"{run.total_flops:.3g}"
    if memory.peak_bytes is not None:
        row |= {"fits": "yes" if memory.fits else "no", "GiB": gib(memory.peak_bytes)}
    if cost is not None:
        row["time"] = duration(cost.duration_s)
        if cost.gpu_hours is not None:
            row["GPU-hours"] = f"{cost.gpu_hours:,.3g}"
        if cost.money is not None:
            row["cost"] = f"{cost.money:,.2f}"
    return row


def totals(planned: Sequence[Planned], knobs: Sweep) -> dict[str, Any]:
    """Return what the points take together; what is not known of each is absent."""
    found: dict[str, Any] = {"tokens": sum(one.run.own_tokens for one in planned)}
    flops = [one.run.total_flops for one in planned if one.run.total_flops is not None]
    if len(flops) == len(planned):
        found["flops"] = sum(flops)
    costs = [one.cost for one in planned if one.cost is not None]
    if not costs or len(costs) < len(planned):
        return found
    devices = max(one.gpus_here for one in planned)
    needs = [knobs.devices_of(one.run.world_size, one.gpus_here) for one in planned]
    found["slots"] = slots = knobs.at_once(devices, needs)
    # the points are checked by a process that starts as each of them does
    check_s = max(cost.times.import_s + cost.times.start_s for cost in costs)
    found["duration_s"] = check_s + over_slots((cost.duration_s for cost in costs), slots)
    for key, field in (("gpu_hours", "gpu_hours"), ("cost_in_currency_of_price", "money")):
        if known := [v for cost in costs if (v := getattr(cost, field)) is not None]:
            found[key] = sum(known)
    return found
