"""Runs in, a comparison out: what differs, what came of it, in which order, and what follows.

records -> left out | found -> figures at one position -> budgets, verdicts, floor -> headline,
notes, why
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmexp.compare import folding
from llmexp.compare.figures import (
    UNITS,
    axis_of,
    columns_of,
    figures,
    left_out,
    own_keys,
    target_figures,
    target_of,
)
from llmexp.compare.judging import NEGLIGIBLE, judge
from llmexp.compare.notes import with_words
from llmexp.compare.position import begins_after, common_position, common_rows, positions
from llmexp.compare.records import APART, REACHED, TWIN, Column, Record, Result, Setting, is_loss
from llmexp.compare.screening import screen
from llmexp.compare.sources import gathered
from llmexp.compare.strangers import Asked
from llmexp.config.commands import command
from llmexp.config.knobs import SEED
from llmexp.config.values import ConfigError, nearest
from llmexp.metrics.keys import TIMINGS, is_score
from llmexp.system.text import first_of


def compare(paths: Sequence[Any], *, asked: Asked | None = None, **how: Any) -> Result:
    """Compare the runs under the paths and globs (run folders, sweeps, folders of them).

    Or those of tables, about which `asked` says what must be known.

    `align` (tokens, steps, time) is what the runs must have had alike when their losses are read.
    `sort` names a figure; default: the val loss, else the train loss, and bits per byte where
    tokenizers differ. `min_effect`: nats below which a difference does not matter; default: that of
    the runs' sweep, else 0.002. `target`: a figure that runs are to reach, such as `val/loss=3.28`;
    they are compared by where they first do. Raises ConfigError for what does not go together;
    what cannot be read is among `problems`.
    """
    target, sort = how.get("target"), how.get("sort")
    if target is not None and sort is not None:
        raise ConfigError(
            "conflict", f"--sort {sort}: --target orders the table by itself; leave one out"
        )
    records, problems, said = gathered(paths, asked or Asked())
    if target is not None and records and all(r.foreign and r.step < 2 for r in records):
        text = "needs the curves of runs; name them: --curves FILE"
        raise ConfigError("missing_value", f"--target {target}: {text}")
    f = with_words(findings(records, problems, **how))
    return replace(f, notes=(*f.notes, *said))


def no_runs_found(found: Result, name: str = "compare") -> str:
    """Return that no run was found, and what was in the way."""
    text = f"there is no run to show; for example {command(name, 'outputs/default')}"
    return "\n".join((*found.problems, text))


def findings(
    records: Sequence[Record],
    problems: Sequence[str] = (),
    *,
    align: str = "tokens",
    sort: str | None = None,
    min_effect: float | None = None,
    target: str | None = None,
) -> Result:
    """Find out what runs show that have been read."""
    measured = next((r.measured for r in records if r.foreign), "val/loss")
    align = axis_of(records, align)
    sort = sort or (measured if measured != "val/loss" else None)
    out = left_out(records, align, sort or "val/loss", target is None)
    alive = [r for r in records if r not in out]
    read = common_position(alive, align, sort or "val/loss")
    if read is not None and any(begins_after(r, align, read.at) for r in alive):
        read = None  # branches of a trunk: each is read at its own end
    more = {key for r in records for key in own_keys(r)} | ({sort} if sort else set())
    # which way the figures of hooks are better, as these have declared it
    ways = (pair for r in records for pair in r.facts.get("better", {}).items())
    better = {key: way for key, way in ways if way in ("lower", "higher")}
    aim = None if target is None else target_of(target, better)
    counted = common_rows(alive, align, [measured, *more, *([aim.key] if aim else ())])
    known = {r: figures(r, align, read, more, counted.get(r)) for r in records}
    if aim is not None:
        sort = f"target/{align}"
        known = {r: known[r] | target_figures(counted.get(r, r), aim, align) for r in records}
    records = [replace(r, out=out.get(r, ""), figures=known[r]) for r in records]
    taking_part = [r for r in records if not r.out]
    groups = folding.folded(records)
    differing = folding.differing_keys([group[0] for group in groups])
    mixed = len({tokenizer_sha(r) for r in taking_part} - {""}) > 1
    notes = [_tokenizer_note(group[0]) if mixed else "" for group in groups]
    found = [folding.setting_of(g, differing, note) for g, note in zip(groups, notes, strict=True)]
    columns = columns_of({measured, *(key for s in found for key in s.figures)}, better)
    columns = tuple(replace(c, digits=5) if c.key == measured else c for c in columns)
    metric = _metric(found, columns, sort, mixed)
    found = _ranked(found, metric, mixed)
    factors = folding.factors([s for s in found if s.out not in APART], differing)
    folding.label(found, factors)
    damage = [p if r.name in p else f"{r.name}: {p}" for r in records for p in r.problems]
    if min_effect is None:
        min_effect = _min_effect(records, metric)
    result = Result(
        settings=found, differing=differing, factors=factors, columns=(), metric=metric,
        align=align, align_at=None if read is None else read.at, target=aim, mixed=mixed,
        min_effect=min_effect,
        batch=_batch(taking_part), problems=(*problems, *damage),
    )  # fmt: skip
    result.columns = _columns(result, columns)
    result.metric = next((c for c in result.columns if c.key == metric.key), metric)
    judge(result)
    keys = [key for key in factors if key != SEED]
    if result.comparable and result.ranked and keys and all(r.screen for r in records):
        values = [{key: s.values.get(key) for key in keys} for s in result.ranked]
        result.screen = screen(values, [s.seeds for s in result.ranked])
    return result


def _metric(
    found: Sequence[Setting], columns: Sequence[Column], sort: str | None, mixed: bool
) -> Column:
    """Return the column that orders the found. Raises ConfigError for a name that is none."""
    known = {c.key: c for c in columns}
    if sort is not None:
        key = {"step": "steps", "tokens": "tokens_seen", "time": "train_time"}.get(sort, sort)
        if key not in known:
            there = [c for c in known if any(c in s.figures for s in found)]
            text = f"--sort {sort}: there is no such figure.{nearest(sort, known)} {_groups(there)}"
            raise ConfigError("unknown_row", f"{text}; for example --sort val/loss")
        return known[key]
    # The figures that are read at one position.
    order = ("val/bits_per_byte" if mixed else "val/loss", "train/loss")
    live = [e for e in found if not e.out] or found
    return known[next((key for key in order if any(key in e.figures for e in live)), order[0])]


def _min_effect(records: Sequence[Record], metric: Column) -> float:
    """Return the difference that matters in the sweep of all runs, else the usual one."""
    of_sweeps = {r.min_effect for r in records}
    own = of_sweeps.pop() if len(of_sweeps) == 1 else None
    if own is None:
        own = NEGLIGIBLE if is_loss(metric.key) else 0.0  # a figure of others has no known unit
    return own


def _groups(keys: Sequence[str]) -> str:
    """Return the figures that runs have as a user may name them, in groups."""
    losses = [key for key in keys if is_loss(key) or is_score(key)]
    costs = [k for k in keys if k in (*TIMINGS, "tokens_seen", "own_tokens", "steps", "train_time")]
    others = [key for key in keys if key not in (*losses, *costs, "line_time")]
    groups = {"Losses and scores": losses, "time and cost": costs, "others": others}
    return "; ".join(f"{name}: {first_of(of, 8)}" for name, of in groups.items() if of)


def _ranked(found: Sequence[Setting], metric: Column, mixed: bool) -> list[Setting]:
    """Order settings: the best first, a twin behind what it repeats, last what takes no part."""
    originals = {e.computation: e for e in found if not e.values.get(TWIN)}
    unordered = mixed and metric.key.endswith("/loss")  # losses per token of several tokenizers

    def place(s: Setting) -> tuple[bool, float, float, bool]:
        twin = bool(s.values.get(TWIN))
        original = originals.get(s.computation, s) if twin else s
        value = original.figures.get(metric.key)
        if metric.key not in s.figures or unordered:
            value = None
        never = 1.0 - original.figures.get(REACHED, 1.0)
        last = bool(s.out) or (value is None and never in (0.0, 1.0))
        return last, never, math.inf if value is None else metric.sign * value, twin

    return sorted(found, key=place)


def _columns(f: Result, columns: Sequence[Column]) -> tuple[Column, ...]:
    """Return the columns of which a setting has a figure, the one that orders first."""
    known, titles = {key for s in f.settings for key in s.figures}, dict[str, str]()
    alive = [s.figures for s in f.settings if not s.out]
    if f.align_at is not None and any(a.get("val/loss") != a.get("final val/loss") for a in alive):
        titles["val/loss"] = f"val loss at {f.position} {UNITS[f.align]}"
    curves = (positions(r, f.align) for r in f.taking_part if r.foreign and r.step > 1)
    of_others = {at[-1] for at in curves if len(at)}
    if f.align_at is not None and f.judged and any(end > f.align_at for end in of_others):
        titles[f.key] = f"{f.metric.title} at {f.position} {UNITS[f.align]}"
    if "own_tokens" in known:
        titles |= {"tokens_seen": "tokens with parent", "train_time": "own time (s)"}
    if f.target:
        own = [f"target/{axis}" for axis in UNITS]
        titles |= {c.key: c.title.replace("target", str(f.target)) for c in columns if c.key in own}

    of = [*(s.figures for s in f.settings), *(r.figures for r in f.runs)]
    counts = {k: all(float(one[k]).is_integer() for one in of if k in one) for k in known}
    shown = sorted((c for c in columns if c.key in known), key=lambda c: c.key != f.key)
    return tuple(replace(c, title=titles.get(c.key, c.title), counts=counts[c.key]) for c in shown)


def _batch(records: Sequence[Record]) -> str:
    """Return the word for how the batches of runs differ.

    It is iso-batch where one real batch is cut in several ways, scaling where it varies, mixed for
    both, same otherwise.
    """
    cuts = defaultdict(set)
    for r in records:
        size = r.batch("real_batch_size")
        if isinstance(size, int):
            cuts[size, repr(r.config.get("batch.ramp"))].add(folding.batch_cut(r))
    several = any(len(found) > 1 for found in cuts.values())
    if len(cuts) > 1:
        return "mixed" if several else "scaling"
    return "iso-batch" if several else "same"


def tokenizer_sha(record: Record) -> str:
    """Return what tells tokenizers apart; empty where it is not known."""
    sha256 = record.facts.get("data_fingerprint", {}).get("tokenizer_sha256")
    return sha256 if isinstance(sha256, str) else str(record.facts.get("tokenizer") or "")


def _tokenizer_note(record: Record) -> str:
    name = record.facts.get("tokenizer") or "unknown"
    return f"tokenizer {name} ({tokenizer_sha(record)[:8] or 'unknown'})"
