"""Runs in, a comparison out: what differs, what came of it, in which order, and what can be said.

records -> left out | entries -> figures at one position -> budgets, verdicts, floor -> headline,
notes, why
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from llmexp.compare import settings
from llmexp.compare.answer import SETTLED, headline
from llmexp.compare.figures import COLUMNS, LOSSES, common_position, figures, rounded
from llmexp.compare.findings import Findings, find_out
from llmexp.compare.judging import MARKS, NEGLIGIBLE, Verdict
from llmexp.compare.notes import notes, why
from llmexp.compare.reading import find, read
from llmexp.compare.records import Column, Comparison, Entry, Record, Standing
from llmexp.compare.selection import APART, left_out
from llmexp.config import ConfigError, nearest

ALIGNMENTS = ("tokens", "steps", "time")


def compare(
    paths: Sequence[str | Path],
    *,
    align: str = "tokens",
    sort: str | None = None,
    whole: bool = False,
    negligible: float | None = None,
) -> Comparison:
    """Compare the runs under the paths and globs (run folders, sweeps, folders of them).

    `align` (tokens, steps, time) is what the runs must have had alike when their losses are read.
    `sort` names a figure; default: the val loss, else the train loss, and bits per byte where
    tokenizers differ. `whole` reads every column at once, which is quicker where all will be
    needed. `negligible`: nats below which a difference does not matter; default: that of the runs'
    sweep, else 0.002. Raises ConfigError for an `align` or `sort` that there is not; what cannot be
    read is among `problems`.
    """
    if align not in ALIGNMENTS:
        raise ConfigError(
            f"--align {align}: must be one of {', '.join(ALIGNMENTS)}; for example --align steps"
        )
    found, problems = find(paths)
    records = read(found, whole)
    return compare_records(records, problems, align=align, sort=sort, negligible=negligible)


def compare_records(
    records: Sequence[Record],
    problems: Sequence[str] = (),
    *,
    align: str = "tokens",
    sort: str | None = None,
    negligible: float | None = None,
) -> Comparison:
    """Compare runs that have been read."""
    if negligible is None:
        of_sweeps = {r.negligible for r in records}
        negligible = next(iter(of_sweeps), None) if len(of_sweeps) == 1 else None
        negligible = NEGLIGIBLE if negligible is None else negligible
    out = left_out(records, align)
    taking_part = [r for r in records if id(r) not in out]
    at = common_position(taking_part, align)
    position, limiting = at if at else (None, None)
    measured = {id(r): figures(r, align, position) for r in records}
    groups = settings.folded(records, out)
    differing = settings.differing_keys([group[0] for group in groups])
    mixed = len({t for r in taking_part if (t := _tokenizer(r))}) > 1
    entries = [
        settings.entry_of(g, differing, measured, out, _tokenizer_note(g[0]) if mixed else "")
        for g in groups
    ]
    metric = _metric(entries, sort, mixed)
    family = [e for e in entries if not e.standing.mark]
    if len(family) < 2:
        family = [e for e in entries if e.standing.mark not in APART]
    factors = settings.factors(family, differing)
    entries = settings.labelled(_ranked(entries, metric, mixed), factors)
    c = Comparison(
        entries=tuple(entries),
        differing=differing,
        columns=_columns(entries, metric, position, align),
        metric=metric.key,
        align=align,
        align_at=position,
        batch=_batch(taking_part),
        problems=(
            *problems,
            *(f"{r.name}: {p}" if r.name not in p else p for r in records for p in r.problems),
        ),
        factors=factors,
    )
    f = find_out(
        c,
        next(col for col in (*c.columns, metric) if col.key == metric.key),
        out,
        negligible,
        mixed,
    )
    return dataclasses.replace(
        c,
        entries=_standings(c, f),
        headline=headline(c, f),
        notes=notes(c, f),
        why=why(c, f, limiting),
    )


def _standings(c: Comparison, f: Findings) -> tuple[Entry, ...]:
    """Mark each entry: best, same, worse, undecided, or why it is left out. Those of one budget
    stand together."""
    first = f.ranked[0].name if len(f.ranked) > 1 else None
    extreme = "lowest" if f.metric.sign > 0 else "highest"
    leading = Counter(lead.name for lead in f.leads.values())
    verdicts = {j.verdict for j in f.judged.values()}
    decided = (
        Verdict.WORSE in verdicts
        and verdicts <= {*SETTLED, Verdict.WORSE}
        and f.comparable
        and not f.without
    )
    missing = {e.name for e in f.without} if f.ranked else set()
    found = []
    for e in c.entries:
        standing = e.standing
        if e.name == first:
            standing = Standing("best" if decided else extreme)
        elif leading[e.name] > 1 and f.tasks == 1:
            standing = Standing(f"{extreme} of budget")
        elif e.name in missing:
            standing = Standing("not evaluated" if "val" in f.metric.key else "")
        elif j := f.judged.get(e.name):
            d = j.difference
            mark = MARKS[j.verdict] if f.metric.key in LOSSES else ""
            standing = Standing(mark, j.size, d.half if d else None, d.basis if d else "")
        found.append(dataclasses.replace(e, standing=standing))
    group_of = {e.name: i for i, group in enumerate(f.budgets) for e in group}
    return tuple(sorted(found, key=lambda e: group_of.get(e.name, len(group_of))))


def _metric(entries: Sequence[Entry], sort: str | None, mixed: bool) -> Column:
    """Return the column that orders the entries. Raises ConfigError for a name that is none."""
    columns = {c.key: c for c in COLUMNS}
    if sort is not None:
        key = {"step": "steps", "tokens": "tokens_seen", "time": "train_time"}.get(sort, sort)
        if key not in columns:
            raise ConfigError(
                f"--sort {sort}: there is no such figure.{nearest(sort, columns)} "
                f"Known: {', '.join(columns)}; for example --sort val/loss"
            )
        return columns[key]
    order = (
        ("val/bits_per_byte", "train/loss") if mixed else ("val/loss", "train/loss")
    )  # read at one position
    live = [e for e in entries if not e.standing.mark] or list(entries)
    return columns[next((key for key in order if any(key in e.figures for e in live)), order[0])]


def _ranked(entries: Sequence[Entry], metric: Column, mixed: bool) -> list[Entry]:
    """Order the entries: the best first, a twin behind what it repeats, last what takes no part."""
    originals = {e.computation: e for e in entries if not e.values.get(settings.TWIN)}

    def place(entry: Entry) -> tuple[bool, float, bool]:
        twin = bool(entry.values.get(settings.TWIN))
        original = originals.get(entry.computation, entry) if twin else entry
        value = original.figures.get(metric.key)
        if metric.key not in entry.figures or (mixed and metric.key.endswith("/loss")):
            value = None  # losses per token of several tokenizers have no order
        return (
            bool(entry.standing.mark) or value is None,
            math.inf if value is None else metric.sign * value,
            twin,
        )

    return sorted(entries, key=place)


def _columns(
    entries: Sequence[Entry], metric: Column, at: float | None, align: str
) -> tuple[Column, ...]:
    """Return the columns of which an entry has a figure, the loss at the common position only where
    it is not the final one."""
    known = {key for e in entries for key in e.figures}
    alive = [e for e in entries if not e.standing.mark]
    moved = any(e.figures.get("val/loss") != e.figures.get("final val/loss") for e in alive)
    found = [c for c in COLUMNS if c.key in known]
    if not moved:
        same = "final val/loss" if metric.key != "final val/loss" else "val/loss"
        plain = {"val/loss", "final val/loss"} - {same}
        found = [
            dataclasses.replace(c, title="val loss") if c.key in plain else c
            for c in found
            if c.key != same
        ]
    elif at is not None:
        where = f"{rounded(at)} {'s' if align == 'time' else align}"
        found = [
            dataclasses.replace(c, title=f"val loss at {where}") if c.key == "val/loss" else c
            for c in found
        ]
    return tuple(sorted(found, key=lambda c: c.key != metric.key))


def _batch(records: Sequence[Record]) -> str:
    """iso-batch: one real batch, cut in several ways. scaling: the real batch varies. mixed:
    both."""
    known = [r for r in records if isinstance(settings.fact(r, "real_batch_size"), int)]
    cuts: dict[int, set[str]] = {}
    for r in known:
        cuts.setdefault(settings.fact(r, "real_batch_size"), set()).add(settings.cut_of(r))
    several = any(len(found) > 1 for found in cuts.values())
    if len(cuts) > 1:
        return "mixed" if several else "scaling"
    return "iso-batch" if several else "same"


def _tokenizer(record: Record) -> str:
    """Return what tells tokenizers apart; empty where it is not known."""
    prints = record.facts.get("data_fingerprint")
    if isinstance(prints, dict) and isinstance(prints.get("tokenizer_sha256"), str):
        return str(prints["tokenizer_sha256"])
    return str(record.facts.get("tokenizer") or "")


def _tokenizer_note(record: Record) -> str:
    name, print_ = str(record.facts.get("tokenizer") or "unknown"), _tokenizer(record)
    return (
        f"tokenizer {name}: losses per token compare with no other ({print_[:8]})" if print_ else ""
    )
