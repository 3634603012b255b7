"""Trains the leading setting of a grid again, different in rounding only: the measured floor of a
comparison."""

from __future__ import annotations

import dataclasses
from statistics import fmean

from llmexp import rundir
from llmexp.child import REFUSED, say
from llmexp.labels import plural
from llmexp.sweep import ledger as ledgers
from llmexp.sweep.current import Current
from llmexp.sweep.ledger import Entry, Ledger, figure
from llmexp.sweep.matching import Pair, next_number, of_folder
from llmexp.sweep.points import Point
from llmexp.sweep.running import run_points
from llmexp.sweep.show import name_of, summary_of

TWIN = "train.twin="
LOSSES = ("final val/loss", "final train/loss")


def is_twin(entry: Entry) -> bool:
    return any(o.startswith(TWIN) and o != f"{TWIN}0" for o in entry.overrides)


def leading(ledger: Ledger) -> Entry | None:
    """Return the finished point with the lowest final loss; of several seeds the setting's mean
    counts."""
    finished = [e for e in ledger.points if e.state == "finished"]
    finished = [e for e in finished if not is_twin(e)] or finished
    summaries = {e.folder: summary_of(ledger.path / e.folder) for e in finished}
    for key in LOSSES:
        losses = {name: figure(summary.get(key)) for name, summary in summaries.items()}
        groups: dict[tuple[str, ...], list[Entry]] = {}
        for entry in finished:
            if losses[entry.folder] is not None:
                setting = tuple(o for o in entry.overrides if not o.startswith("train.seed="))
                groups.setdefault(setting, []).append(entry)
        if groups:
            return min(
                groups.values(), key=lambda group: fmean(losses[e.folder] or 0.0 for e in group)
            )[0]
    return None


def run_twins(current: Current, ledger: Ledger) -> None:
    """Train `sweep.twins` twins of the leading point, and those of earlier commands that are not
    finished."""
    if current.over:
        return
    # Twins that never began may be those of a setting that leads no more.
    never = [e for e in ledger.points if is_twin(e) and not rundir.is_run(ledger.path / e.folder)]
    ledger.points = [e for e in ledger.points if e.state == "infeasible" or e not in never]
    lead = leading(ledger) if current.settings.twins else None
    pairs = twins_of(current, ledger, lead) if lead is not None else []
    asked = {entry.folder for _, entry, _ in pairs}
    cut = [e for e in ledger.points if is_twin(e) and e.folder not in asked and is_cut(ledger, e)]
    pairs += [pair for entry in cut if (pair := of_folder(current.checker, ledger, entry))]
    if not any(ledger.look(entry).get("state") != "finished" for _, entry, _ in pairs):
        return
    current.knobs |= {entry.folder: fact for _, entry, fact in pairs}
    ledger.swept = sorted({*ledger.swept, TWIN.rstrip("=")})
    ledger.save()
    run_points(current, ledger, [(point, entry, None) for point, entry, _ in pairs])


def is_cut(ledger: Ledger, entry: Entry) -> bool:
    """Tell whether a twin of an earlier command has still to be trained."""
    return (
        rundir.is_run(ledger.path / entry.folder) and ledger.look(entry).get("state") != "finished"
    )


def twins_of(current: Current, ledger: Ledger, lead: Entry) -> list[Pair]:
    """Return the twins of a finished point, with new places in the ledger for those that it does
    not have yet."""
    config = rundir.built_config(ledger.path / lead.folder)
    overrides = [o for o in lead.overrides if not o.startswith(TWIN)]
    there = [e for e in ledger.points if is_twin(e)]
    points, entries = list[Point](), list[Entry]()
    for number in range(1, current.settings.twins + 1):
        asked = [*overrides, f"{TWIN}{number}"]
        entry = next((e for e in there if sorted(e.overrides) == sorted(asked)), None)
        if entry is None:
            first = next_number(ledger) + sum(e not in ledger.points for e in entries)
            label = f"{lead.label}+twin_{number}"
            entry = Entry(first, label, f"{first}-{label}", None, asked)
        train = dataclasses.replace(config.train, twin=number, stop_step=None)
        twin = dataclasses.replace(config, train=train)
        swept = list(dict.fromkeys([*ledger.swept, TWIN.rstrip("=")]))
        path = ledger.path / entry.folder
        points.append(
            Point(entry.number, asked, swept, None, twin, entry.label, path, ledger.group)
        )
        entries.append(entry)
    facts = current.checker.ask("check", points)
    new = [e for e in entries if e not in ledger.points]
    if new:
        name = name_of(lead, ledger.swept)
        other = ", where another setting led before," if there else ""
        say(f"{name}{other} leads; {plural(len(new), 'twin')} of it will show what rounding makes")
    for entry, point, fact in zip(entries, points, facts, strict=True):
        entry.identity = point.identity
        if "refused" in fact:
            entry.state, entry.exit_code, entry.error = (
                "failed",
                REFUSED,
                ledgers.one_line(fact["refused"]),
            )
    ledger.points += new
    ledger.save()
    return [(p, e, f) for p, e, f in zip(points, entries, facts, strict=True) if "refused" not in f]
