"""A comparison as a table: for the terminal, as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import textwrap
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmexp.compare.figures import difference, figure
from llmexp.compare.records import TWIN, Comparison, Entry
from llmexp.labels import short_keys
from llmexp.labels import shown as setting

_STYLES = {
    "best": "bold green",
    "lowest": "bold",
    "highest": "bold",
    "lowest of budget": "bold",
    "worse": "red",
    "undecided": "yellow",
}
_MOST = 40  # characters of a name
# Shown first, where they fit; then the others.
_FIRST = (
    "val/loss", "final val/loss", "train/loss", "tokens_per_sec", "peak_memory_gib", "train_time",
)  # fmt: skip


def show(comparison: Comparison, to: TextIO, width: int | None = None, why: bool = False) -> None:
    """Print the result in a line, the table and the notes, at any width; with `why`, what they rest
    on."""
    c = comparison
    console = Console(file=to, width=width, highlight=False, markup=False, emoji=False)
    if c.headline:
        console.print(Text(c.headline, style="bold"))
    table = Table(
        box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), collapse_padding=True
    )
    columns = _fitting(c, console.width)
    for head, *cells in columns:
        numbers = head and any(ch.isdigit() for cell in cells for ch in cell)
        justify: Any = "right" if numbers else "left"
        table.add_column(Text(head, style="dim"), justify=justify, no_wrap=True, vertical="bottom")
    styles = [_STYLES.get(e.standing.mark, "") for e in c.entries]
    for i, style in enumerate(styles, 1):
        table.add_row(*(Text(cells[i], style="" if cells[0] else style) for cells in columns))
    console.print(table)
    for line in (*c.notes, *(c.why if why else ())):
        console.print(Text(line))
    for entry in c.entries if why else ():
        if entry.note:
            console.print(Text(f"{entry.label or entry.name}: {entry.note}", style="dim"))


def lines(comparison: Comparison, width: int) -> list[str]:
    """Return what `show` prints, line by line."""
    out = io.StringIO()
    show(comparison, out, width)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _fitting(c: Comparison, width: int) -> list[list[str]]:
    """Return the columns that fit, each as its head and cells: settings, mark and metric always,
    then the others."""
    figures = {}
    for column in c.columns:
        head = "\n".join(textwrap.wrap(column.title, 14))
        figures[column.key] = [head, *(figure(e, column) for e in c.entries)]
    metric = [figures.pop(c.metric)] if c.metric in figures else []
    names = _names(c)
    kept = [*names, ["", *(_mark(e) for e in c.entries)], *metric]
    if not c.metric.endswith("bits_per_byte"):
        figures.pop("val/bits_per_byte", None)  # a multiple of the loss
    first = [figures.pop(key) for key in _FIRST if key in figures]
    differences = ["difference", *(difference(e) for e in c.entries)]
    room = width - sum(map(_width, kept))
    for cells in (differences, *first, *figures.values()):
        # The metric's own column says it already.
        news = len(set(cells[1:])) > 1 and all(cells[1:] != known[1:] for known in metric)
        if news and room >= _width(cells):
            room -= _width(cells)
            kept.append(cells)
    if room < 0:  # a very narrow terminal: the names give way
        spare = max(6, _width(names[0]) - 2 + room)
        names[0][:] = [_cut(cell, spare) for cell in names[0]]
    return kept


def _names(c: Comparison) -> list[list[str]]:
    """Return a column for each key that varies, under its short name; else, or where these do not
    tell the entries apart, one with their names."""
    short = short_keys(c.factors)
    columns = [[short[key], *(_setting(e, key) for e in c.entries)] for key in c.factors]
    rows = list(zip(*columns, strict=True))[1:]
    named = any(e.label == e.name for e in c.entries)
    if named or not 0 < len(columns) <= 4 or len(set(rows)) < len(rows):
        return [["run", *(_cut(e.label, _MOST) for e in c.entries)]]
    return columns


def _setting(entry: Entry, key: str) -> str:
    value = entry.values.get(key, "")
    return "" if key == TWIN and not value else _cell(value)


def _mark(entry: Entry) -> str:
    unfinished = len(entry.runs) == 1 and entry.state != "finished"
    return entry.standing.mark or (entry.state if unfinished else "")


def _width(column: list[str]) -> int:
    return max(cell_len(line) for cell in column for line in cell.split("\n")) + 2


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _cell(value: Any) -> str:
    return _cut(setting(value), 24)


def to_json(c: Comparison) -> str:
    """Return strict JSON: {"headline": "...", "notes": [...], "runs": [{name, path, state, keys
    that differ, figures, ...}], ...}."""
    # Every run has every key, null where it has no such figure or setting.
    named = [column.key for column in c.columns]
    figures = dict.fromkeys([*named, *(key for e in c.entries for key in e.figures)])
    settings = [key for key in c.differing if any(key in e.values for e in c.entries)]
    runs = []
    for e in c.entries:
        row: dict[str, Any] = {"name": e.name, "path": str(e.runs[0].path), "state": e.state}
        row |= {key: _strict(e.values.get(key)) for key in settings}
        row |= figures | e.figures
        row |= {
            "paths": [str(r.path) for r in e.runs],
            "intervals": {key: list(interval) for key, interval in e.intervals.items()},
            "note": e.note or None,
            "label": e.label,
            "mark": e.standing.mark or None,
            "difference": e.standing.difference,
            "half": e.standing.half,
            "basis": e.standing.basis or None,
        }
        runs.append(row)
    whole = {
        "headline": c.headline,
        "notes": c.notes,
        "why": c.why,
        "runs": runs,
        "sentences": c.sentences,
        "problems": c.problems,
        "metric": c.metric,
        "align": c.align,
        "align_at": c.align_at,
        "batch": c.batch,
        "differing": c.differing,
    }
    return json.dumps(whole, indent=2, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [_strict(v) for v in value] if isinstance(value, list) else value


def to_csv(c: Comparison) -> str:
    """Return a row an entry, figures in full; the ends of intervals follow their figure where there
    are some."""
    keys: list[str] = []
    for key in (column.key for column in c.columns):
        keys.append(key)
        if any(key in e.intervals for e in c.entries):
            keys += [f"{key} low", f"{key} high"]
    out = io.StringIO()
    heads = ["name", "path", "state", *c.differing, *keys, "note"]
    writer = csv.DictWriter(out, heads, "", "ignore", lineterminator="\n")
    writer.writeheader()
    for e in c.entries:
        row: dict[str, Any] = {key: _in_full(value) for key, value in e.values.items()}
        row |= {"name": e.name, "path": e.runs[0].path, "state": e.state, "note": e.note}
        for key, (low, high) in e.intervals.items():
            row |= {f"{key} low": low, f"{key} high": high}
        writer.writerow(row | e.figures)
    return out.getvalue()


def _in_full(value: Any) -> str:
    return str(value) if type(value) is float else _cut(setting(value), 400)


def to_markdown(c: Comparison) -> str:
    """Return the result, the table and the notes."""
    heads = ["run", "mark", "difference", *c.differing, *(column.title for column in c.columns)]
    rules = ["---"] * (3 + len(c.differing)) + ["---:"] * len(c.columns)
    rows = [heads, rules]
    for e in c.entries:
        settings = [_cell(e.values.get(key, "")) for key in c.differing]
        figures = [figure(e, column) for column in c.columns]
        rows.append([e.name, _mark(e), difference(e), *settings, *figures])
    lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in rows]
    points = [f"- {_escaped(s)}" for s in (*c.notes, *c.why)]
    return "\n".join([_escaped(c.headline), "", *lines, "", *points]) + "\n"


def _escaped(text: str) -> str:
    for sign in "\\|`<*":
        text = text.replace(sign, "\\" + sign)
    return text


def columns() -> int:
    """Return the width of the terminal; COLUMNS goes before, and 120 where there is none."""
    return max(20, shutil.get_terminal_size((120, 24)).columns)
