"""Tell which runs are one setting, and which settings are one computation: runs in, entries out."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

from llmexp import labels
from llmexp.compare.figures import COLUMNS
from llmexp.compare.records import Entry, Record, Standing
from llmexp.compare.selection import APART
from llmexp.compare.statistics import mean_interval
from llmexp.knobs import affects, is_record

SEED, TWIN = "train.seed", "train.twin"
_STATES = ("finished", "running", "queued", "preempted", "cut", "failed")  # from good to bad
_PREFERRED = (
    "batch.gradient_accumulation_steps",
    "batch.real_batch_size",
    "batch.micro_batch_size",
)
_RATES = re.compile(r"optimizer\.(lr|\w+_lr|reference_batch)")  # what optimizer.lr_rule writes


def is_execution(key: str) -> bool:
    """Tell whether a key names, records or carries out a run; such keys are shown only where
    nothing else differs."""
    return is_record(key) or key == "hooks"


def text(value: Any) -> str:
    """Return a value so that True and 1 differ, and 1 and 1.0."""
    return f"{type(value).__name__ if isinstance(value, bool) else ''}{value!r}"


def differing_keys(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the config keys whose values are not the same in all runs that have a config, by
    section."""
    configs = [r.config for r in records if r.config]
    keys = dict.fromkeys(key for config in configs for key in config)
    found = [key for key in keys if len({text(config.get(key)) for config in configs}) > 1]
    if found != [TWIN]:  # a run of before this key is its own twin 0
        found = [k for k in found if k != TWIN or any(config.get(TWIN) for config in configs)]
    essential = [key for key in found if not is_execution(key)]
    order: dict[str, int] = {}
    for key in keys:
        order.setdefault(key.partition(".")[0], len(order))
    return tuple(
        sorted(essential or found, key=lambda key: (order[key.partition(".")[0]], found.index(key)))
    )


def fact(record: Record, key: str) -> Any:
    """Return a number of the batch as the run solved it, else as its config has it."""
    return record.facts.get(key, record.config.get(f"batch.{key}"))


def cut_of(record: Record) -> str:
    """Return how the run's batch is cut into micro-batches and ranks."""
    keys = ("micro_batch_size", "gradient_accumulation_steps", "dp_size")
    return str([fact(record, key) for key in keys])


def folded(records: Sequence[Record], left_out: Container[int]) -> list[list[Record]]:
    """Group runs that differ in nothing but the seed; repeats of one seed are no new evidence and
    stay apart. A run that takes part goes before one that is `left_out`, which it may have been
    made to replace."""
    groups: dict[Any, list[Record]] = {}
    for r in sorted(records, key=lambda r: id(r) in left_out):
        if not r.config or SEED not in r.config:
            groups[r.path.resolve()] = [r]
            continue
        essential = _essential(r.config, {SEED})
        again = 0
        while any(
            r.config[SEED] == other.config[SEED] for other in groups.get((essential, again), [])
        ):
            again += 1
        groups.setdefault((essential, again), []).append(r)
    return list(groups.values())


def _essential(config: Mapping[str, Any], without: Collection[str]) -> tuple[tuple[str, str], ...]:
    whole = {TWIN: 0, **config}  # a run of before the twins is its own twin 0
    return tuple(
        sorted((k, text(v)) for k, v in whole.items() if k not in without and not is_execution(k))
    )


def computation(record: Record) -> object:
    """Return what is equal for runs that compute the same but for rounding, seeds aside: cuts of
    one batch, twins.

    A cut also changes what dropout draws, so with dropout only twins and repeats are one
    computation.
    """
    if not record.config:
        return record.path
    dropout = any("dropout" in k and v not in (0, None) for k, v in record.config.items())
    cut = set() if dropout else {k for k in record.config if affects(k) == "rounding"}
    return _essential(record.config, {SEED, TWIN, *cut}), text(fact(record, "real_batch_size"))


def entry_of(
    group: Sequence[Record],
    differing: Sequence[str],
    measured: Mapping[int, dict[str, float]],
    left_out: Mapping[int, str],
    tokenizer: str = "",
) -> Entry:
    """Make the entry of runs that differ in the seed alone: means over those that take part, notes,
    state.

    `measured`: the figures by id of the run; `left_out`: why a run takes no part; `tokenizer`:
    named where several are.
    """
    several = len(group) > 1
    name = group[0].name
    if several:
        name = (
            f"{re.sub(r'(?<![A-Za-z])seed_?[0-9]+[,+]?', '', name).strip('+,_- ')} x{len(group)}"
        ).strip()
    whole = [measured[id(r)] for r in group]
    taking_part = [m for r, m in zip(group, whole, strict=True) if id(r) not in left_out]
    usable = taking_part or whole
    values: dict[str, float] = {}
    intervals = {}
    for column in COLUMNS:
        known = [m[column.key] for m in usable if column.key in m]
        if known:
            values[column.key], interval = mean_interval(known)
            if (
                interval and len(known) > 2
            ):  # of two it would be six times as wide as they lie apart
                intervals[column.key] = interval
    keys = differing if group[0].config else ()
    return Entry(
        name=name,
        runs=tuple(group),
        values={k: group[0].config.get(k) for k in keys if not (several and k == SEED)},
        figures=values,
        intervals=intervals,
        state=max((r.state for r in group), key=lambda s: _STATES.index(s) if s in _STATES else 0),
        note="; ".join(dict.fromkeys(_notes(group, len(usable), left_out, tokenizer))),
        run_figures=tuple(whole),
        standing=Standing("" if taking_part else left_out.get(id(group[0]), "")),
        computation=computation(group[0]),
    )


def _notes(
    group: Sequence[Record], used: int, left_out: Mapping[int, str], tokenizer: str
) -> list[str]:
    notes = []
    if len(group) > 1:
        notes.append(f"mean of {used} seeds" if used > 1 else "the figures are of 1 seed")
        tally = Counter(r.state for r in group)
        if tally.keys() != {"finished"}:
            others = ", ".join(f"{tally[s]} {s}" for s in tally if s != "finished")
            notes.append(f"{tally['finished']} of {len(group)} seeds finished, {others}")
    if tokenizer:
        notes.append(tokenizer)
    for r in group:
        if r.lost:
            notes.append(r.lost)
        if r.rung is not None:
            notes.append(f"left out after {r.rung:.0%} of its steps")
        if r.state in ("failed", "preempted") and (error := r.status.get("error")):
            # The newlines of a repr are two characters.
            notes.append(" ".join(str(error).replace("\\n", " ").split())[:200])
    if not group[0].config:
        notes.append("without a config")
    return notes


def factors(entries: Sequence[Entry], differing: Sequence[str]) -> tuple[str, ...]:
    """Return the differing keys less the seed, and less those that follow from others: the real
    batch from the accumulation, the rate from the batch by optimizer.lr_rule."""
    entries = [e for e in entries if e.values]
    swept = [key for e in entries for r in e.runs for key in r.swept]
    varied = [key for key in differing if len({text(e.values.get(key)) for e in entries}) > 1]
    keys = [key for key in varied if all(key in e.values for e in entries) and key != SEED]
    rules = [
        r.config.get("optimizer.lr_rule") in ("linear", "sqrt") for e in entries for r in e.runs
    ]
    if all(rules) or "optimizer.lr_rule" in swept:
        keys = [key for key in keys if key in swept or not _RATES.fullmatch(key)]

    def weight(key: str) -> tuple[bool, bool, int, int]:
        preferred = _PREFERRED.index(key) if key in _PREFERRED else -1
        return key not in swept, not key.startswith("batch."), preferred, keys.index(key)

    kept: list[str] = []
    for key in sorted(keys, key=weight):
        if not any(_decides(other, key, entries, swept) for other in kept):
            kept.append(key)
    return tuple(sorted(kept, key=lambda key: (key == TWIN, differing.index(key))))


def _decides(other: str, key: str, entries: Sequence[Entry], swept: Sequence[str]) -> bool:
    """Tell whether the value of `key` follows from that of `other`: a key of its section, or a
    batch that decides the budget."""
    follows = key.startswith("train.max_") and other.startswith("batch.")
    if key in swept or not (follows or key.partition(".")[0] == other.partition(".")[0]):
        return False
    pairs = {(text(e.values[other]), text(e.values[key])) for e in entries}
    return len(pairs) == len({first for first, _ in pairs})


def labelled(entries: Sequence[Entry], keys: Sequence[str]) -> list[Entry]:
    """Give each entry its short name. Repeats would share one: a single run has the name of its
    folder, a set of seeds a number behind the name."""
    names = [label(e, keys) for e in entries]
    found = []
    for i, (e, name) in enumerate(zip(entries, names, strict=True)):
        if names.count(name) > 1:
            name = e.name if len(e.runs) == 1 else f"{name} ({names[: i + 1].count(name)})"
        found.append(dataclasses.replace(e, label=name))
    return found


def label(entry: Entry, keys: Sequence[str]) -> str:
    """Return the short name of an entry: accum=1 clip=0.5. Where nothing sets it apart, or too
    much, or where it is none of the family of the others: its seeds, or the name of its run."""
    shown = {}
    if entry.standing.mark not in APART and entry.values and len(keys) <= 4:
        shown = {key: entry.values.get(key) for key in keys if key != TWIN or entry.values.get(key)}
    if shown or len(entry.runs) == 1 or len(keys) > 4:
        return labels.label(shown) or entry.name
    seeds = sorted({s for r in entry.runs if isinstance(s := r.config.get(SEED), int)})
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"seeds {seeds[0]}-{seeds[-1]}"
    return (
        "seeds " + " and ".join(map(str, seeds)) if len(seeds) == 2 else f"{len(entry.runs)} seeds"
    )
