"""Read run folders as records. What cannot be read is reported and passed over."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from llmexp.compare.records import TWIN, Record
from llmexp.compare.rows import read_columns
from llmexp.runs import rundir
from llmexp.runs.find import SweepFolder, setting_of
from llmexp.runs.folder import RunFolder, clean_name
from llmexp.runs.rows import LINEAGE
from llmexp.settings.knobs import default_of
from llmexp.system.redact import clean
from llmexp.system.text import as_dict


def read(found: Sequence[tuple[Path, SweepFolder]]) -> list[Record]:
    """Return the runs as records, with names that are unique."""
    records = [_record(path, sweep) for path, sweep in found]
    for levels in (1, 2, 20):  # of parent folders in front
        tally = Counter(r.name for r in records)
        for i, r in enumerate(records):
            if tally[r.name] > 1:
                name = clean("/".join(r.path.resolve().parts[-levels - 1 :]))
                records[i] = dataclasses.replace(r, name=name)
    return records


def _record(path: Path, sweep: SweepFolder) -> Record:
    """Return a run as it is compared."""
    folder = RunFolder(path, strict=False)
    columns, damage = read_columns(path / rundir.METRICS)
    config, lost, facts = folder.flat_config, folder.lost(), folder.facts
    for key, there in (
        (TWIN, "train.seed" in config),
        ("model.gelu", str(config.get("model._target_")).endswith(".GPT2")),
    ):
        if there:  # runs of earlier versions do not have these keys
            config.setdefault(key, default_of(key))
    if lost:
        folder.problems.append(f"{path / rundir.METRICS}: the run {lost}; it is not compared")
    point, ledger = sweep.point_of(path), sweep.ledger
    planned = sweep.to_train[setting_of(point)] if point is not None and point.overrides else 0
    return Record(
        path=path,
        name=clean_name(path),
        sweep=sweep.path,
        state=folder.state,
        config=config,
        facts=facts,
        status=folder.status,
        columns=columns,
        problems=tuple(clean(p) for p in (*damage, *folder.problems)),
        swept=tuple(ledger.swept) if ledger else (),
        negligible=ledger.negligible if ledger else None,
        looks=ledger.looks if ledger else (),
        rung=point.rung if point else None,
        screen=bool(ledger and ledger.screen),
        trial=bool(ledger and point and not ledger.grid and not ledger.is_fresh(point)),
        planned=planned,
        left=sweep.to_train.total(),
        lost=lost,
        last=folder.last_row(),
        before=read_columns(path / LINEAGE)[0] if as_dict(facts.get("parent")) else {},
    )
