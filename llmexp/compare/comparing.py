"""Runs in, a comparison out: what differs, what came of it, and in which order."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmexp.compare.figures import COLUMNS, DEAD, common_position, counts, figures
from llmexp.compare.judging import SEED
from llmexp.compare.reading import find, read
from llmexp.compare.records import Column, Comparison, Entry, Record
from llmexp.compare.statistics import mean_interval
from llmexp.compare.verdicts import sentences
from llmexp.config import ConfigError, nearest
from llmexp.knobs import is_record

ALIGNMENTS = ("tokens", "steps", "time")
_STATES = ("finished", "running", "queued", "preempted", "cut", "failed")  # from good to bad
_PREFERRED = ("batch.gradient_accumulation_steps", "batch.real_batch_size", "batch.micro_batch_size")


def compare(
    paths: Sequence[str | Path], *, align: str = "tokens", sort: str | None = None, whole: bool = False
) -> Comparison:
    """Compares the runs under the paths and globs (run folders, sweeps, folders of them).

    `align` (tokens, steps, time) is what the runs must have had alike when their losses are read. `sort` names a
    figure; default: the val loss, else the train loss, and bits per byte where tokenizers differ. `whole` reads every
    column at once, which is quicker where all will be needed.
    Raises ConfigError for an `align` or `sort` that there is not; what cannot be read is among `problems`.
    """
    if align not in ALIGNMENTS:
        raise ConfigError(f"--align {align}: must be one of {', '.join(ALIGNMENTS)}; for example --align steps")
    found, problems = find(paths)
    records = read(found, whole)
    return compare_records(records, problems, align=align, sort=sort)


def compare_records(
    records: Sequence[Record], problems: Sequence[str] = (), *, align: str = "tokens", sort: str | None = None
) -> Comparison:
    """The comparison of runs that have been read."""
    at = common_position(records, align)
    position = at[0] if at else None
    measured = {id(r): figures(r, align, position) for r in records}
    groups = _folded(records)
    differing = _differing([group[0] for group in groups])
    tokenizers = {t for r in records if (t := _tokenizer(r))}
    mixed = len(tokenizers) > 1
    entries = [_entry(group, differing, measured, mixed, position is not None) for group in groups]
    metric = _metric(entries, sort, mixed)
    entries = _ranked(entries, metric, mixed)
    columns = _columns(entries, metric)
    damage = [f"{r.name}: {p}" if r.name not in p else p for r in records for p in r.problems]
    comparison = Comparison(
        entries=tuple(entries),
        differing=differing,
        columns=columns,
        metric=metric.key,
        align=align,
        align_at=position,
        batch=_batch(records),
        sentences=(),
        problems=(*problems, *damage),
        factors=_factors(entries, differing),
    )
    return dataclasses.replace(comparison, sentences=sentences(comparison, metric, at[1] if at else None, mixed))


def _execution(key: str) -> bool:
    """Whether a key names, records or carries out a run; such keys are shown only where nothing else differs."""
    return is_record(key) or key == "hooks"


def _text(value: Any) -> str:
    return f"{type(value).__name__ if isinstance(value, bool) else ''}{value!r}"


def _differing(records: Sequence[Record]) -> tuple[str, ...]:
    """The config keys whose values are not the same in all runs that have a config, by section."""
    configs = [r.config for r in records if r.config]
    keys = dict.fromkeys(key for config in configs for key in config)
    found = [key for key in keys if len({_text(config.get(key)) for config in configs}) > 1]
    essential = [key for key in found if not _execution(key)]
    order: dict[str, int] = {}
    for key in keys:
        order.setdefault(key.partition(".")[0], len(order))
    return tuple(sorted(essential or found, key=lambda key: (order[key.partition(".")[0]], found.index(key))))


def _folded(records: Sequence[Record]) -> list[list[Record]]:
    """Runs that differ in nothing but the seed together; repeats of one seed are no new evidence and stay apart."""
    groups: dict[Any, list[Record]] = {}
    for r in records:
        if not r.config or SEED not in r.config:
            groups[r.path.resolve()] = [r]
            continue
        essential = tuple(sorted((k, _text(v)) for k, v in r.config.items() if k != SEED and not _execution(k)))
        again = 0
        while any(r.config[SEED] == other.config[SEED] for other in groups.get((essential, again), [])):
            again += 1
        groups.setdefault((essential, again), []).append(r)
    return list(groups.values())


def _entry(
    group: list[Record], differing: tuple[str, ...], measured: dict[int, dict[str, float]], mixed: bool, aligned: bool
) -> Entry:
    several = len(group) > 1
    name = group[0].name
    if several:
        name = f"{re.sub(r'(?<![A-Za-z])seed_?[0-9]+[,+]?', '', name).strip('+,_- ')} x{len(group)}".strip()
    whole = [measured[id(r)] for r in group]
    usable = [m for r, m in zip(group, whole, strict=True) if counts(r)] or whole
    values: dict[str, float] = {}
    intervals = {}
    for column in COLUMNS:
        known = [m[column.key] for m in usable if column.key in m]
        if known:
            values[column.key], interval = mean_interval(known)
            if interval:
                intervals[column.key] = interval
    notes = []
    if several:
        notes.append(f"mean of {len(usable)} seeds" if len(usable) > 1 else "the figures are of 1 seed")
        tally = Counter(r.state for r in group)
        if tally.keys() != {"finished"}:
            others = ", ".join(f"{tally[s]} {s}" for s in tally if s != "finished")
            notes.append(f"{tally['finished']} of {len(group)} seeds finished, {others}")
    if mixed and (tokenizer := _tokenizer(group[0])):
        notes.append(f"tokenizer {_tokenizer_name(group[0])}: losses per token compare with no other ({tokenizer[:8]})")
    for r in group:
        if r.lost:
            notes.append(r.lost)
        if r.rung is not None:
            notes.append(f"left out after {r.rung:.0%} of its steps")
        if r.mark:
            notes.append(f"mark: {r.mark}")
        if r.state in ("failed", "preempted") and (error := r.status.get("error")):
            notes.append(
                " ".join(str(error).replace("\\n", " ").split())[:200]
            )  # newlines of a repr are two characters
    if not group[0].config:
        notes.append("without a config")
    state = max((r.state for r in group), key=lambda s: _STATES.index(s) if s in _STATES else 0)
    keys = differing if group[0].config else ()
    return Entry(
        name=name,
        runs=tuple(group),
        values={k: group[0].config.get(k) for k in keys if not (several and k == SEED)},
        figures=values,
        intervals=intervals,
        state=state,
        note="; ".join(dict.fromkeys(notes)),
        run_figures=tuple(whole),
    )


def _metric(entries: Sequence[Entry], sort: str | None, mixed: bool) -> Column:
    """The column that orders the entries. Raises ConfigError for a name that is none."""
    columns = {c.key: c for c in COLUMNS}
    if sort is not None:
        key = {"step": "steps", "tokens": "tokens_seen", "time": "train_time"}.get(sort, sort)
        if key not in columns:
            raise ConfigError(
                f"--sort {sort}: there is no such figure.{nearest(sort, columns)} "
                f"Known: {', '.join(columns)}; for example --sort val/loss"
            )
        return columns[key]
    order = ("val/bits_per_byte", "train/loss") if mixed else ("val/loss", "train/loss")  # read at one position
    live = [e for e in entries if e.state not in DEAD] or list(entries)
    for key in order:
        if any(key in e.figures for e in live):
            return columns[key]
    return columns[order[0]]


def _ranked(entries: Sequence[Entry], metric: Column, mixed: bool) -> list[Entry]:
    """The best first; behind them those that broke off or have no such figure."""
    sign = -1.0 if metric.better == "higher" else 1.0

    def place(entry: Entry) -> tuple[bool, float]:
        value = entry.figures.get(metric.key)
        alive = any(counts(r) for r in entry.runs)
        if mixed and metric.key.endswith("/loss"):
            value = None  # losses per token of several tokenizers have no order
        return (not alive or value is None, math.inf if value is None else sign * value)

    return sorted(entries, key=place)


def _columns(entries: Sequence[Entry], metric: Column) -> tuple[Column, ...]:
    """Those of which an entry has a figure; the val loss at the common position only where it is not the final one."""
    known = {key for e in entries for key in e.figures}
    alive = [e for e in entries if any(counts(r) for r in e.runs)]
    moved = any(e.figures.get("val/loss") != e.figures.get("final val/loss") for e in alive)
    shown = [c for c in COLUMNS if c.key in known and (c.key != "val/loss" or moved or metric.key == "val/loss")]
    if not moved and metric.key == "val/loss":  # they are the same
        shown = [c for c in shown if c.key != "final val/loss"]
        shown = [Column(c.key, "val loss", c.better, c.digits) if c.key == "val/loss" else c for c in shown]
    return tuple(sorted(shown, key=lambda c: c.key != metric.key))


def _fact(record: Record, key: str) -> Any:
    return record.facts.get(key, record.config.get(f"batch.{key}"))


def _batch(records: Sequence[Record]) -> str:
    """iso-batch: one real batch, cut in several ways. scaling: the real batch varies. mixed: both."""
    known = [r for r in records if isinstance(_fact(r, "real_batch_size"), int)]
    cuts: dict[int, set[str]] = {}
    for r in known:
        cut = [_fact(r, key) for key in ("micro_batch_size", "gradient_accumulation_steps", "dp_size")]
        cuts.setdefault(_fact(r, "real_batch_size"), set()).add(str(cut))
    several = any(len(found) > 1 for found in cuts.values())
    if len(cuts) > 1:
        return "mixed" if several else "scaling"
    return "iso-batch" if several else "same"


def _tokenizer(record: Record) -> str:
    """What tells tokenizers apart; empty where it is not known."""
    prints = record.facts.get("data_fingerprint")
    if isinstance(prints, dict) and isinstance(prints.get("tokenizer_sha256"), str):
        return str(prints["tokenizer_sha256"])
    return str(record.facts.get("tokenizer") or "")


def _tokenizer_name(record: Record) -> str:
    return str(record.facts.get("tokenizer") or "unknown")


def _factors(entries: Sequence[Entry], differing: tuple[str, ...]) -> tuple[str, ...]:
    """The differing keys less the seed and those that another one determines (the real batch by the accumulation)."""
    entries = [e for e in entries if e.values]
    swept = [key for e in entries for r in e.runs for key in r.swept]
    keys = [key for key in differing if all(key in e.values for e in entries) and key != SEED]
    order = sorted(
        keys,
        key=lambda k: (
            k not in swept,
            not k.startswith("batch."),
            _PREFERRED.index(k) if k in _PREFERRED else -1,
            keys.index(k),
        ),
    )
    kept: list[str] = []
    for key in order:
        for other in kept:
            scaled = key.startswith("optimizer.") and "optimizer.reference_batch" in keys  # by optimizer.lr_rule
            follows = (key.startswith("train.max_") or scaled) and other.startswith("batch.")
            if key in swept or not (follows or key.partition(".")[0] == other.partition(".")[0]):
                continue
            pairs = {(_text(e.values[other]), _text(e.values[key])) for e in entries}
            if len(pairs) == len({a for a, _ in pairs}):  # `other` decides it
                break
        else:
            kept.append(key)
    return tuple(key for key in differing if key in kept)
