"""Read run folders as records. What cannot be read is reported and passed over."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmexp.compare.records import Record
from llmexp.compare.rows import by_interval, read_columns, read_steps
from llmexp.runs import rundir
from llmexp.runs.find import SweepFolder
from llmexp.runs.folder import RunFolder, clean_name
from llmexp.runs.rows import LINEAGE
from llmexp.runs.steps import STEPS_BIN
from llmexp.settings.knobs import defaults
from llmexp.settings.labels import plural
from llmexp.system.redact import clean


def read(found: Sequence[tuple[Path, SweepFolder]]) -> list[Record]:
    """Return the runs as records, with names that are unique."""
    records = [_record(path, sweep) for path, sweep in found]
    _fill_in([r.config for r in records if r.config])
    for levels in (1, 2, 20):  # of parent folders in front
        tally = Counter(r.name for r in records)
        for i, r in enumerate(records):
            if tally[r.name] > 1:
                name = clean("/".join(r.path.resolve().parts[-levels - 1 :]))
                records[i] = dataclasses.replace(r, name=name)
    return records


def _fill_in(configs: Sequence[dict[str, Any]]) -> None:
    """Give each config the defaults of knobs that another one of the same parts lists.

    So a run of an earlier version, whose config lacks newer knobs, is one setting with one of
    today.
    """

    def part(config: dict[str, Any], key: str) -> Any:
        return config.get(f"{key.partition('.')[0]}._target_")

    configs = [config for config in configs if config]  # what cannot be read stays empty
    known = [(k, part(config, k)) for config in configs for k in config if k in defaults()]
    for key, target in dict.fromkeys(known):
        for config in configs:
            if part(config, key) == target:
                config.setdefault(key, defaults()[key])


def _record(path: Path, sweep: SweepFolder) -> Record:
    """Return a run as it is compared."""
    folder = RunFolder(path, strict=False)
    columns, damage = read_columns(path / rundir.METRICS)
    config, lost, facts = folder.flat_config, folder.lost(), folder.facts
    ended = folder.state in ("finished", "preempted") and folder.summary.get("steps")
    came = int(max([ended or 0, *columns["step"][-1:]]))
    steps, gone = read_steps(path, int(facts.get("max_steps") or came))
    gone += max(0, came - len(steps["tokens"]))
    if lost := lost or (f"has lost {plural(gone, 'record')} of {STEPS_BIN}" if gone else ""):
        folder.problems.append(f"{path}: the run {lost}; it is not compared")
    point, ledger = sweep.point_of(path), sweep.ledger
    if not ledger or not any("sweep.halving=" in a for a in ledger.arguments):
        columns = by_interval(columns, len(steps["tokens"]))
    return Record(
        path=path,
        name=clean_name(path),
        sweep=sweep.path,
        state=folder.state,
        config=config,
        facts=facts,
        status=folder.status,
        columns=columns,
        steps=steps,
        problems=tuple(clean(p) for p in (*damage, *folder.problems)),
        swept=tuple(ledger.swept) if ledger else (),
        negligible=ledger.negligible if ledger else None,
        looks=ledger.looks if ledger else (),
        rung=point.rung if point else None,
        screen=bool(ledger and ledger.screen),
        trial=bool(ledger and point and not ledger.grid and not ledger.is_fresh(point)),
        left=sweep.left,
        lost=lost,
        before=read_columns(path / LINEAGE)[0] if facts.get("parent") else {},
    )
