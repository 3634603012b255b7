"""Read the figures of a run off its records, at its end or at a common position.

It also tells which runs take part.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from llmexp import features
from llmexp.compare.budgets import CLOSE
from llmexp.compare.position import (
    ROWS,
    Position,
    evaluations,
    of_rows,
    positions,
    time_before,
    until,
)
from llmexp.compare.reading import elapsed, finite
from llmexp.compare.records import (
    APART,
    LOSS_FIGURES,
    REACHED,
    Column,
    Record,
    Result,
    Target,
    column_of,
)
from llmexp.config.knobs import SEED, is_record
from llmexp.config.values import ConfigError
from llmexp.metrics.keys import ROW_KEYS, SCORES, is_of_named_set, is_score, title_of
from llmexp.system.text import number

TAIL = 0.05  # share of the steps whose mean is the train loss; at least 10 steps
# Share of the median length below which a run of another sweep says nothing about the others.
_SHORT = 0.1
_DEAD = ("failed", "crashed", "queued")  # what they lack says nothing about the setting
MOVE_VALIDATION = (
    "data._target_", "data.files", "data.train_files", "data.val_files", "data.val_ratio",
    "data.seed",
)  # fmt: skip


UNITS = {"tokens": "tokens", "steps": "steps", "time": "s"}  # of the axes
_COLUMNS = (
    column_of("val/loss"),
    column_of("val/loss", "final "),
    column_of("val/loss", "best "),
    *map(column_of, ("val/bits_per_byte", "train/loss", "tokens_seen")),
    Column("own_tokens", "own tokens"),
    Column("steps", "steps"),
    Column("train_time", "time (s)", "lower"),
    Column("line_time", "time with parent (s)", "lower"),
    *map(column_of, ("tokens_per_sec", "peak_memory_gib", "skipped_steps")),
    *itertools.chain(*features.offered("compare", "COLUMNS")),
    Column("target/tokens", "tokens to target", "lower"),
    Column("target/steps", "steps to target", "lower"),
    Column("target/time", "time to target (s)", "lower"),
    Column("target/after", "evaluated before it", "", 6),
    Column("target/by", "and behind it", "", 6),
    Column("target/reached", "share that reached it", "higher", 3),
)
_FIXED = frozenset(column.key for column in _COLUMNS)


def over_items(key: str, runs: Sequence[Record]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean score of runs by the standard errors in their rows.

    The runs answered the same items, so further runs make it no narrower.
    """
    known = [r for r in runs if key in r.figures]
    errors = [_last(finite(r.columns, f"{key}_stderr")) or 0.0 for r in known]
    if min(errors, default=0.0) <= 0:
        return None
    half, mean = 1.96 * float(np.mean(errors)), float(np.mean([r.figures[key] for r in known]))
    return mean - half, mean + half


def _last(values: Sequence[float] | np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None


def broken(record: Record) -> str:
    """Return why a run has no say in how far all have come, in a word or two; "" where it has.

    It has none where it broke off, was left out, is short of rows or steps, or where nobody can say
    what was trained.
    """
    if record.rung is not None:
        return f"out at {record.rung:.0%}"
    if record.state in _DEAD:
        return record.state
    if record.lost:
        return "rows lost"
    if bad := record.facts.get("not_finite"):
        return f"{record.measured} is {bad}"
    if record.foreign and not len(finite(record.columns, record.measured)):
        return f"no {record.measured}"
    if not record.config:
        return "no config"
    return "" if record.step > record.parent.get("step", 0) else "no steps"


def left_out(
    records: Sequence[Record], align: str, loss: str, ends: bool = True
) -> dict[Record, str]:
    """Return the runs that take no part, with the reason as a word or two.

    Runs that broke off, lost rows or were left out by successive halving never take part. Those
    that are unfinished do only while fewer than two runs have finished. A run of another validation
    text, or far shorter than the others and not of their sweep, would spoil the comparison of the
    rest. So would one of others that ends (`ends`: no target is where it may) before its setting.
    """
    reasons = {r: why for r in records if (why := broken(r))}

    def alive() -> list[Record]:
        return [r for r in records if r not in reasons]

    # The lowest of many trials is luck too: those with fresh seeds decide, once there are some.
    fresh = Counter(r.sweep for r in alive() if r.state == "finished" and not r.trial)
    reasons |= {r: "trial" for r in alive() if r.trial and fresh[r.sweep] >= 2}
    if sum(r.state == "finished" for r in alive()) >= 2:
        reasons |= {r: r.state for r in alive() if r.state not in ("finished", "")}
    ranked = Counter(task(r, loss) for r in alive() if not r.foreign).most_common(2)
    if len(ranked) > 1 and ranked[0][1] > max(1, ranked[1][1]):
        others = (r for r in alive() if not r.foreign)
        reasons |= {r: APART[0] for r in others if task(r, loss) != ranked[0][0]}
    # Runs of others that say nothing new, or of which nobody knows how long they trained.
    foreign, seen = [r for r in alive() if r.foreign], set[object]()
    if placed := {r for r in foreign if len(positions(r, align))}:
        reasons |= {r: f"no {align}" for r in foreign if r not in placed}
    for r in (r for r in foreign if r not in reasons):
        known = frozenset(r.essence.items())
        if known in seen:  # nobody knows whether it is the same run again
            reasons[r] = "repeat"
        seen.add(known)
    if ends and align != "time":
        reasons |= dict.fromkeys(_broken_off(alive(), align), APART[1])
    return reasons | dict.fromkeys(_short(alive(), align), APART[1])


def axis_of(records: Sequence[Record], align: str) -> str:
    """Return what runs are compared along: as asked, else what most runs of others know."""
    foreign = [r for r in records if r.foreign]
    axes = (align, "tokens", "steps") if foreign else (align,)
    return max(axes, key=lambda axis: sum(len(positions(r, axis)) > 0 for r in foreign))


def task(record: Record, key: str = "val/loss") -> str:
    """Return what a validation loss is measured on.

    It is the files, else all of the data section but what the sweep of the run varies and cannot
    move that text.
    """
    if record.foreign:  # nobody knows
        return ""
    named = key.split("/")[1] if is_of_named_set(key) else None
    files = record.facts.get("data_fingerprint", {}).get("val_files")
    if known := record.facts.get("val_texts", {}).get(named) or files:
        return repr(known)
    still = {"data.max_tokens", *record.swept} - set(MOVE_VALIDATION)
    keys = [k for k in record.config if k.startswith("data.") and not is_record(k)]
    return repr(sorted((k, repr(record.config[k])) for k in keys if k not in still))


def _broken_off(alive: Sequence[Record], align: str) -> list[Record]:
    """Find runs of others that end before a run of their setting does, if others end there too."""
    ends = {r: x[-1] for r in alive if r.foreign and len(x := positions(r, align))}
    of = {r: frozenset((k, v) for k, v in r.essence.items() if k != SEED) for r in ends}
    longest = {of[r]: ends[r] for r in sorted(ends, key=ends.__getitem__)}
    count = Counter(ends.values())
    whole = {r: longest[of[r]] for r in ends}
    return [r for r, end in ends.items() if end < (1 - CLOSE) * whole[r] and count[whole[r]] > 1]


def _short(alive: Sequence[Record], align: str) -> list[Record]:
    """Find runs far shorter than the others, or that have just begun.

    What their sweep makes so on purpose does not count.
    """
    ends = {r: float(x[-1]) for r in alive if len(x := positions(r, align))}
    if len(ends) < 3:
        return []
    median = float(np.median(list(ends.values())))
    # One that ends before the others are first evaluated would leave nothing of them to read.
    firsts = [at[0] for r in alive if len(at := evaluations(r, align))]
    least = max(_SHORT * median, min(float(np.median(firsts or [0.0])), median))
    short = [r for r in alive if ends.get(r, 0.0) < least]
    usual = {r.sweep for r in alive if r not in short} - {None}
    return [
        r for r in short
        if (r.sweep not in usual if r.state == "finished" else ends.get(r, 0.0) < _SHORT * median)
    ]  # fmt: skip


def own_keys(record: Record) -> list[str]:
    """Return the keys of a run's rows that its hooks have added, or of one of others all keys."""
    keys = record.columns if record.config.get("hooks") or record.foreign else ()
    return [key for key in keys if key not in ROW_KEYS and is_other(key)]


def is_other(key: str) -> bool:
    """Tell whether a key is none of the figures that every comparison knows."""
    return key not in _FIXED and not is_of_named_set(key) and not key.startswith(SCORES)


def figures(
    record: Record,
    align: str,
    read: Position | None,
    more: Iterable[str] = (),
    counted: Record | None = None,
) -> dict[str, float]:
    """Return all figures known of the run.

    Losses are those where all are `read`, never interpolated; a run that was not evaluated there
    has no `val/loss`. None: at its own end. `more`: other keys of rows, each with its last value up
    to there. These, and the lowest loss, are of the rows that are `counted`, if it has any there.
    """
    columns, where = record.columns, positions(record, align)
    common = (counted or record).columns
    step, evaluated = record.step, read is None
    if read is not None and len(where):
        step, seen = until(where, read.at), evaluations(record, align)
        least = (read.at - read.slack) * (1 - 1e-9)
        evaluated = any(least <= at for at in seen[: until(seen, read.at)][-1:])
        evaluated &= align != "time" or bool(where[-1] >= read.at * (1 - 1e-9))
    rows = until(columns["step"], step)
    found = {}
    if record.lost:  # of the end it has only what it wrote down itself
        found["final val/loss"] = number(record.summary.get("final val/loss"))
    else:
        keys = ("val/bits_per_byte", *filter(is_of_named_set, columns), record.measured)
        found |= {key: _last(finite(columns, key, rows)) for key in (keys if evaluated else ())}
        found["final val/loss"] = _last(finite(columns, "val/loss"))
        losses = (finite(of, "val/loss", rows) for of in (common, columns))
        found["best val/loss"] = min(map(float, next(filter(len, losses), ())), default=None)
        if step > record.parent.get("step", 0) and not record.foreign:
            found["train/loss"] = number(float(train_losses(record)[step - 1]))
    own = _ends(record)
    for key in (column.key for column in _COLUMNS if column.key not in LOSS_FIGURES):
        found[key] = number(record.summary.get(f"mean {key}", record.summary.get(key)))
        if found[key] is None:
            found[key] = own.get(key, _last(finite(columns, key)))
    found |= features.merged("compare", "figures", record)
    for key in (key for key in more if is_other(key) and key != record.measured):
        found[key] = _last([*finite(columns, key, rows), *finite(common, key, rows)])
    for key in filter(is_score, columns):  # at the end of each run
        found[key] = _last(finite(columns, key))
    if record.parent:
        if (tokens := found["tokens_seen"]) is not None:
            found["own_tokens"] = tokens - record.parent["tokens_seen"]
        if found["train_time"] is not None and (seconds := time_before(record)) is not None:
            found["line_time"] = found["train_time"] + seconds
    return {key: value for key, value in found.items() if value is not None}


def _ends(record: Record) -> dict[str, float | None]:
    """Return how far a run has come, where its summary does not say it."""
    found = {"steps": _last(positions(record, "steps"))}
    found["tokens_seen"] = _last(record.steps.get("tokens", ()))
    if record.foreign:
        found["train_time"] = _last(positions(record, "time"))
    elif record.state != "finished":
        found["train_time"] = _last(elapsed(record.columns, record.parent.get("step", 0)))
    return found


def train_losses(record: Record) -> np.ndarray:
    """Return the train loss after each step; NaN where it is not known.

    It is the loss of all targets of the last steps, whichever of them have rows, and goes back into
    those of a fork's parents.
    """
    if not record.step:
        return np.zeros(0)
    losses, targets = (record.steps[key] for key in ("train/loss", "target_tokens"))
    known = np.isfinite(losses)
    sums, counts = (
        np.append(0.0, np.cumsum(np.where(known, x, 0.0))) for x in (losses * targets, targets)
    )
    ends = np.arange(1, record.step + 1)
    begins = np.maximum(0, ends - np.maximum(10, np.ceil(TAIL * ends).astype(int)))
    with np.errstate(invalid="ignore"):
        return (sums[ends] - sums[begins]) / (counts[ends] - counts[begins])


def columns_of(
    known: Collection[str], better: Mapping[str, str] | None = None
) -> tuple[Column, ...]:
    """Return all columns, with those of the further keys of rows among the keys `known`.

    These are of named validation sets, tasks and hooks. `better`: lower or higher, for keys of
    hooks.
    """
    keys, way = sorted(known), better or {}
    others = list(filter(is_other, keys))
    return (
        *_COLUMNS,
        *(Column(key, title_of(key), "lower", 5) for key in filter(is_of_named_set, keys)),
        *(Column(key, key.removeprefix(SCORES), "higher", 3) for key in filter(is_score, keys)),
        *(column_of(key) for key in others if key in ROW_KEYS),
        *(Column(key, key, way.get(key, "")) for key in others if key not in ROW_KEYS),
    )


def target_of(given: object, better: Mapping[str, str]) -> Target:
    """Return the target of `KEY=NUMBER`. `better`: lower or higher, for keys of hooks.

    Raises ConfigError.
    """
    key, _, text = str(given).partition("=")
    known = ROW_KEYS.get(f"val/{key.rpartition('/')[2]}" if is_of_named_set(key) else key)
    way = "higher" if is_score(key) else better.get(key) or (known.better if known else "")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not way:
        text = "a figure of the rows that is better when lower or higher is needed, and a number"
        raise ConfigError(
            "wrong_type" if way else "unknown_row",
            f"--target {given}: {text}; for example --target val/loss=3.28",
        )
    return Target(key, value, -1.0 if way == "higher" else 1.0)


def target_figures(record: Record, target: Target, align: str) -> dict[str, float]:
    """Return where a run first reaches the target, between two evaluations by a straight line.

    `target/reached` is 1 or 0, absent for a run that was never evaluated. `target/after` and
    `target/by` are the positions of the two evaluations. One that is there at its first has no
    `target/after`, and where it first was is not known.
    """
    steps, values = course(record, target.key)
    if not len(values):
        return {}
    there = np.flatnonzero(target.sign * values <= target.sign * target.value)
    if not len(there):
        return {REACHED: 0.0}
    by, after = there[0], there[0] - 1  # -1: there at the first evaluation already
    share = 1.0
    if after >= 0:
        share = float((values[after] - target.value) / (values[after] - values[by]))
    found = {REACHED: 1.0}
    before = record.before
    rows = np.concatenate([_column(c, "step") for c in (before, record.columns)])
    for axis in UNITS:
        parents = elapsed(before) if axis == "time" else _column(before, ROWS[axis])
        known = np.concatenate([parents, of_rows(record, axis)])
        if len(known) != len(rows):
            continue
        if target.key == "train/loss" and axis != "time":
            where = positions(record, axis)[steps.astype(int) - 1]
        else:
            where = np.interp(steps, np.append(0.0, rows), np.append(0.0, known))
        low, high = float(where[max(after, 0)]), float(where[by])
        found[f"target/{axis}"] = low + share * (high - low)
        if axis == align:
            found |= {"target/by": high} | ({"target/after": low} if after >= 0 else {})
    return found


def course(record: Record, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps at which a run has a figure, and its values; those of parents come first.

    The train loss is that of the table: there is one after each step, whatever the rows.
    """
    if key == "train/loss" and not record.foreign:
        values = train_losses(record)
        steps = np.arange(1.0, len(values) + 1)
    else:
        parts = (record.before, record.columns)
        values = np.concatenate([_column(c, key) for c in parts])
        steps = np.concatenate([_column(c, "step") for c in parts])
    there = np.isfinite(values)
    return steps[there], values[there]


def _column(columns: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    return columns.get(key, np.full(len(columns.get("step", ())), np.nan))


def cap_of(f: Result) -> float:
    """Return the end of the first of the runs to end that never reached the target."""
    never = [positions(r, f.align) for r in f.taking_part if r.figures.get(REACHED) == 0.0]
    return min((float(where[-1]) for where in never if len(where)), default=math.inf)
