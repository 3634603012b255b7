"""Describe a sweep before anything is spent: a row a point, and a warning of unequal
budgets."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from llmexp.assembly.assemble import assemble
from llmexp.assembly.parts import Shared
from llmexp.compare import budgets
from llmexp.config import ConfigError, plain
from llmexp.labels import plural
from llmexp.redact import redacted
from llmexp.sweep.budget_warning import warn
from llmexp.sweep.ledger import identity
from llmexp.sweep.points import Point, Refused, reasons, split_duplicates
from llmexp.sweep.progress import counted
from llmexp.sweep.settings import Sweep
from llmexp.sweep.show import fitted, naming, table, width_of

# Columns that say where a point's batch and budget come from, with the swept key that a column
# would repeat.
COLUMNS = {
    "micro": "batch.micro_batch_size",
    "accum": "batch.gradient_accumulation_steps",
    "dp": "",
    "batch": "batch.real_batch_size",
    "length": "batch.sequence_length",
    "steps": "train.max_steps",
    "tokens": "train.max_tokens",
    "epochs": "train.max_epochs",
}


def plan_sweep(
    points: list[Point],
    refused: list[Refused],
    settings: Sweep,
    arguments: Sequence[str],
    as_json: bool = False,
) -> int:
    """Print a row a point, or JSON with all figures of each; a point that would be refused has its
    reason instead. Exit code 2 if there is one."""
    shared = Shared()
    identities: dict[str, str] = {}
    rows: dict[str, dict[str, str]] = {}
    whole: dict[str, dict[str, Any]] = {}
    spent: dict[str, budgets.Spent] = {}
    for point in counted("planning", points):
        try:
            parts = assemble(point.config, write=False, shared=shared)
        except ConfigError as error:
            refused.append(point.refused(str(error)))
            continue
        run = parts.run
        figures = (
            run.micro_batch_size, run.gradient_accumulation_steps, run.dp_size,
            run.real_batch_size, run.sequence_length, run.max_steps, run.max_tokens,
        )  # fmt: skip
        texts = [*(f"{n:,}" for n in figures), f"{run.max_epochs:.4g}"]
        rows[point.name] = dict(zip(COLUMNS, texts, strict=True))
        whole[point.name] = {"folder": str(point.path), "values": point.values, **run.as_dict()}
        spent[point.name] = budgets.Spent(point.values, run.max_tokens, run.max_steps)
        identities[point.name] = identity(plain(parts.config))
    able = [point for point in points if point.name in rows]
    able, same = split_duplicates(able, lambda point: identities[point.name])
    refused += same
    if as_json:
        found = [{"name": point.name, **whole[point.name]} for point in able]
        print(json.dumps({"points": found, "refused": reasons(refused)}, indent=2, allow_nan=False))
        return 2 if refused else 0
    if able:
        print_points(able, [rows[point.name] for point in able], settings.twins)
        warn([spent[point.name] for point in able], settings, arguments)
    for line in reasons(refused):
        print(redacted(f"refused: {line}"), file=sys.stderr)
    return 2 if refused else 0


def print_points(points: Sequence[Point], figures: Sequence[Mapping[str, str]], twins: int) -> None:
    """Print the points by the swept keys with the figures that differ, and those once that all
    share."""
    swept = {key for point in points for key in point.values}
    shown = [name for name, key in COLUMNS.items() if key not in swept]
    same = [name for name in shown if len(points) > 1 and len({row[name] for row in figures}) == 1]
    same = [name for name in same if name not in ("steps", "tokens")]
    shown = [name for name in shown if name not in same]
    rest = [shown, *([row[name] for name in shown] for row in figures)]
    names = naming([(p.number, p.values) for p in points], rest, width_of(sys.stdout, 80))
    print(
        table(
            [(*a, *b) for a, b in zip(names, rest, strict=True)], left=1, width=width_of(sys.stdout)
        ),
        flush=True,
    )
    count = plural(len(points), "run")
    if twins:
        count = (
            f"{count}, then {plural(twins, 'twin')} of the leading setting: "
            f"{plural(len(points) + twins, 'run')} in all"
        )
    all_have = ", ".join(f"{name} {figures[0][name]}" for name in same)
    print(fitted(f"{count}; all with {all_have}" if same else count), flush=True)
