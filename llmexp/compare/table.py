"""A comparison as a table: for the terminal, as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from llmexp import features
from llmexp.compare.records import REACHED, TWIN, Result, Setting, difference, figure_text
from llmexp.config.labels import short_keys, short_value
from llmexp.metrics.keys import is_of_named_set
from llmexp.system import child
from llmexp.system.printing import Printer, Shown
from llmexp.tracker.wandb import MARKS

_STYLES = {
    "best": "bold green",
    "lowest": "bold",
    "highest": "bold",
    "lowest of budget": "bold",
    "worse": "red",
    "undecided": "yellow",
}
_MOST = 40  # characters of a name
# Shown first, where they fit; then the losses of named sets, those of _NEXT, the others.
_FIRST = ("difference", REACHED, "val/loss", "final val/loss")
_NEXT = ("train/loss", "tokens_per_sec", "peak_memory_gib", "train_time")


def shown_columns(c: Result) -> dict[str, Shown]:
    """Return the columns by key: the standing, what differs, the figures."""
    short, settings = short_keys(c.differing), c.settings
    sizes = [e.size for e in settings]
    found = {
        "mark": Shown("standing", [_mark(e) for e in settings]),
        "difference": Shown("difference", [difference(e) for e in settings], sizes),
        "basis": Shown("basis", [e.basis for e in settings]),
    }
    for key in c.differing:
        found[key] = Shown(short[key], [_setting(e, key) for e in settings])
    for k in c.columns:
        values = [e.figures.get(k.key) for e in settings]
        found[k.key] = Shown(k.title, [figure_text(e, k) for e in settings], values)
    found["seeds"] = Shown("seeds", [str(len(e.runs)) for e in settings])
    found["state"] = Shown("state", [e.state for e in settings])
    return found


def show(comparison: Result, to: TextIO, width: int | None = None, why: bool = False) -> None:
    """Print the result in a line, the table and the notes, at any width.

    With `why` also what they rest on.
    """
    c, printer = comparison, Printer(to, width)
    printer.say(filter(None, [c.headline]), "bold")
    styles = [_STYLES.get(s.mark, "") for s in c.settings]
    printer.table(_fitting(c, printer.width, printer.encoding), styles)
    printer.say([*c.notes, *(c.why if why else ())])
    if why:
        printer.say([f"{s.label or s.name}: {s.note}" for s in c.settings if s.note], "dim")


def lines(comparison: Result, width: int) -> list[str]:
    """Return what `show` prints, line by line."""
    out = io.StringIO()
    show(comparison, out, width)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _fitting(c: Result, width: int, encoding: str) -> list[Shown]:
    """Return the columns that fit: settings, mark and metric always, then the others."""
    found = {
        key: replace(column, cells=[child.printable(cell, encoding) for cell in column.cells])
        for key, column in shown_columns(c).items()
    }
    metric = [found[c.key]] if c.key in found else []
    kept = [*_names(c), Shown("", found["mark"].cells), *metric]
    keys = [column.key for column in c.columns]
    rest = dict.fromkeys([*_FIRST, *filter(is_of_named_set, keys), *_NEXT, *keys])
    room = width - sum(column.width for column in kept)
    for key in rest:
        if key not in found or (key.endswith("bits_per_byte") and not c.mixed):
            continue  # bits per byte are a multiple of the loss
        # The metric's own column, or one before, says it already.
        column = found[key]
        news = len(set(column.cells)) > 1 and all(column.cells != k.cells for k in kept)
        if news and room >= column.width:
            room -= column.width
            kept.append(column)
    if room < -2:  # a very narrow terminal (nothing stands behind the last column): names give way
        spare = max(6, kept[0].width + room)
        kept[0] = Shown(_cut(kept[0].title, spare), [_cut(x, spare) for x in kept[0].cells])
    return kept


def _names(c: Result) -> list[Shown]:
    """Return a column for each key that varies, under its short name.

    Where these do not tell the settings apart, it is one with their names.
    """
    columns = [Shown(name, [_setting(e, key) for e in c.settings]) for key, name in c.names.items()]
    rows = set(zip(*(column.cells for column in columns), strict=True))
    named = any(e.label == e.name for e in c.settings)
    if named or not 0 < len(columns) <= 4 or len(rows) < len(c.settings):
        cut = {e.label: _cut(e.label, _MOST) for e in c.settings}
        several = len({*cut.values()}) < len(cut)
        return [Shown("run", [e.label if several else cut[e.label] for e in c.settings])]
    return columns


def _setting(setting: Setting, key: str) -> str:
    value = setting.values.get(key, "")
    return "" if key == TWIN and not value else _cut(short_value(value), 24)


def _mark(setting: Setting) -> str:
    unfinished = len(setting.runs) == 1 and setting.state != "finished"
    return setting.mark or (setting.state if unfinished else "")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def columns_in_full(c: Result, ends: bool = True) -> dict[str, list[Any]]:
    """Return what is known of the settings in full, a list a column, values in their own types.

    With `ends` those of intervals follow their figure where there are some.
    """
    of = c.settings
    found: dict[str, list[Any]] = {
        "name": [s.name for s in of],
        "mark": [s.mark or None for s in of],
        "difference": [s.size for s in of],
        "half": [s.half for s in of],
        "basis": [s.basis or None for s in of],
        "seeds": [len(s.runs) for s in of],
        "state": [s.state for s in of],
        "path": [str(s.runs[0].path) for s in of],
    }
    keys = [key for key in c.differing if any(key in s.values for s in of)]
    found |= {key: [s.values.get(key) for s in of] for key in keys}
    for key in (column.key for column in c.columns):
        found[key] = [s.figures.get(key) for s in of]
        if ends and any(key in s.intervals for s in of):
            for i, end in enumerate(("low", "high")):
                found[f"{key} {end}"] = [s.intervals.get(key, (None, None))[i] for s in of]
    return found | {"note": [s.note or None for s in of]}


def marks_of(c: Result) -> dict[Path, dict[str, Any]]:
    """Return what a tracker keeps of each run: its mark, the difference, half its interval."""
    marks = {}
    for s in c.settings:
        for run in s.runs:
            values = (run.out, None, None) if run.out else (s.mark or None, s.size, s.half)
            marks[run.path] = dict(zip(MARKS, values, strict=True))
    return marks


def data(c: Result) -> dict[str, Any]:
    """Return what --json prints, which is strict.

    It is {"headline": "...", "notes": [...], "runs": [{name, path, state, keys that differ,
    figures, ...}], ...}.
    """
    full, runs = columns_in_full(c, ends=False), []
    for s, *values in zip(c.settings, *full.values(), strict=True):  # the same keys for all
        row = dict(zip(full, values, strict=True)) | {"label": s.label, "intervals": s.intervals}
        row |= features.merged("compare", "values", s, full)
        row["paths"] = [str(r.path) for r in s.runs]
        runs.append({key: _strict(value) for key, value in row.items()})
    names = ("headline", "notes", "why", "problems", "align", "align_at", "batch", "differing")
    whole = {name: getattr(c, name) for name in names} | {"metric": c.key, "runs": runs}
    whole["sentences"] = [text for text in (c.headline, *c.notes, *c.why) if text]
    whole["screen"] = c.screen and {
        "runs": c.screen.runs,
        "resolution": c.screen.resolution,
        "effects": [
            {key: getattr(one, key) for key in ("effect", "half", "p", "found")}
            | {"key": key, "levels": [*c.screen.levels[key]]}
            | {"confounded": [*c.screen.confounded[key]]}
            for key, one in c.screen.knobs.items()
        ],
    }
    whole["target"] = c.target and {"key": c.target.key, "value": c.target.value}
    return dict(json.loads(json.dumps(whole, allow_nan=False)))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [_strict(v) for v in value] if isinstance(value, list) else value


def to_csv(c: Result) -> str:
    """Return `columns_in_full` as CSV; settings are spelled as overrides are."""
    found = columns_in_full(c)
    for key in found.keys() & {*c.differing}:
        found[key] = [
            value if type(value) is float or key not in s.values else short_value(value)
            for value, s in zip(found[key], c.settings, strict=True)
        ]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[*found], *zip(*found.values(), strict=True)])
    return out.getvalue()


def to_markdown(c: Result) -> str:
    """Return the result, the table and the notes."""
    columns = [Shown("run", [e.name for e in c.settings]), *shown_columns(c).values()]
    rows = [[k.title for k in columns], ["---"] * len(columns)]
    rows += map(list, zip(*(k.cells for k in columns), strict=True))
    lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in rows]
    points = [f"- {_escaped(s)}" for s in (*c.notes, *c.why)]
    return "\n".join([_escaped(c.headline), "", *lines, "", *points]) + "\n"


def _escaped(text: str) -> str:
    for sign in "\\|`<*":
        text = text.replace(sign, "\\" + sign)
    return text
