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
from llmexp.compare.records import TWIN, Column, Comparison, Entry
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
# Where they fit.
_FIRST = (
    "val/loss",
    "final val/loss",
    "train/loss",
    "tokens_per_sec",
    "peak_memory_gib",
    "train_time",
)


def show(comparison: Comparison, to: TextIO, width: int | None = None, why: bool = False) -> None:
    """Print the result in a line, the table and the notes, at any width; with `why`, what they rest
    on."""
    console = Console(file=to, width=width, highlight=False, markup=False, emoji=False)
    if comparison.headline:
        console.print(Text(comparison.headline, style="bold"))
    columns = _fitting(comparison, console.width)
    table = Table(
        box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), collapse_padding=True
    )
    for head, *cells in columns:
        words = not any(any(ch.isdigit() for ch in cell) for cell in cells) or head == ""
        table.add_column(
            Text(head, style="dim"),
            justify="left" if words else "right",
            no_wrap=True,
            vertical="bottom",
        )
    for i, entry in enumerate(comparison.entries, 1):
        style = _STYLES.get(entry.standing.mark, "")
        table.add_row(
            *(Text(column[i], style=style if column[0] == "" else "") for column in columns)
        )
    console.print(table)
    for line in comparison.notes:
        console.print(Text(line))
    for line in comparison.why if why else ():
        console.print(Text(line))
    for entry in comparison.entries if why else ():
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
    names = _names(c)
    figures = {column.key: _figure_column(c, column) for column in c.columns}
    metric = [figures.pop(c.metric)] if c.metric in figures else []
    kept = [*names, ["", *(_mark(e) for e in c.entries)], *metric]
    if not c.metric.endswith("bits_per_byte"):
        figures.pop("val/bits_per_byte", None)  # a multiple of the loss
    wanted = [["difference", *(difference(e) for e in c.entries)]]
    wanted += [
        figures[key]
        for key in sorted(figures, key=lambda k: _FIRST.index(k) if k in _FIRST else len(_FIRST))
    ]
    room = width - sum(map(_width, kept))
    known = [column[1:] for column in metric]  # what the metric says already is no news
    for column in wanted:
        news = len(set(column[1:])) > 1 and column[1:] not in known
        if news and room >= _width(column):
            room -= _width(column)
            kept.append(column)
    if room < 0:  # a very narrow terminal: the names give way
        spare = max(6, _width(names[0]) - 2 + room)
        names[0][:] = [_cut(cell, spare) for cell in names[0]]
    return kept


def _names(c: Comparison) -> list[list[str]]:
    """Return a column for each key that varies, under its short name; else, or where these do not
    tell the entries apart, one with their names."""
    rows = [tuple(_setting(e, key) for key in c.factors) for e in c.entries]
    if (
        not 0 < len(c.factors) <= 4
        or len(set(rows)) < len(rows)
        or any(e.label == e.name for e in c.entries)
    ):
        return [["run", *(_cut(e.label, _MOST) for e in c.entries)]]
    short = short_keys(c.factors)
    return [[short[key], *column] for key, *column in zip(c.factors, *rows, strict=True)]


def _setting(entry: Entry, key: str) -> str:
    value = entry.values.get(key, "")
    return "" if key == TWIN and not value else _cell(value)


def _mark(entry: Entry) -> str:
    unfinished = entry.state if len(entry.runs) == 1 and entry.state != "finished" else ""
    return entry.standing.mark or unfinished


def _width(column: list[str]) -> int:
    return max(cell_len(line) for cell in column for line in cell.split("\n")) + 2


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _cell(value: Any, most: int = 24) -> str:
    return _cut(setting(value), most)


def _figure_column(c: Comparison, column: Column) -> list[str]:
    return [
        "\n".join(textwrap.wrap(column.title, 14)),
        *(figure(entry, column) for entry in c.entries),
    ]


def to_json(c: Comparison) -> str:
    """Strict JSON: {"runs": [{name, path, state, keys that differ, figures, ...}], "sentences":
    [...], ...}."""
    # Every run has every key, null where it has no such figure or setting.
    figures = list(
        dict.fromkeys(
            [*(col.key for col in c.columns), *(key for e in c.entries for key in e.figures)]
        )
    )
    settings = [key for key in c.differing if any(key in e.values for e in c.entries)]
    runs = []
    for e in c.entries:
        row: dict[str, Any] = {"name": e.name, "path": str(e.runs[0].path), "state": e.state}
        row |= {key: _strict(e.values.get(key)) for key in settings}
        row |= {key: e.figures.get(key) for key in figures}
        row["paths"] = [str(r.path) for r in e.runs]
        row["intervals"] = {key: list(interval) for key, interval in e.intervals.items()}
        row["note"] = e.note or None
        row |= {
            "label": e.label,
            "mark": e.standing.mark or None,
            "difference": e.standing.difference,
        }
        row |= {"half": e.standing.half, "basis": e.standing.basis or None}
        runs.append(row)
    answer: dict[str, Any] = {"headline": c.headline, "notes": list(c.notes), "why": list(c.why)}
    whole = {
        **answer,
        "runs": runs,
        "sentences": list(c.sentences),
        "problems": list(c.problems),
        "metric": c.metric,
    }
    whole |= {
        "align": c.align,
        "align_at": c.align_at,
        "batch": c.batch,
        "differing": list(c.differing),
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
    for column in c.columns:
        bounds = any(column.key in e.intervals for e in c.entries)
        keys += [column.key, *([f"{column.key} low", f"{column.key} high"] if bounds else [])]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["name", "path", "state", *c.differing, *keys, "note"])
    for e in c.entries:
        ends = {
            f"{k} {end}": v
            for k, pair in e.intervals.items()
            for end, v in zip(("low", "high"), pair, strict=True)
        }
        known = {**e.figures, **ends}
        settings = [
            str(v) if type(v := e.values.get(k, "")) is float else _cell(v, 400)
            for k in c.differing
        ]
        writer.writerow(
            [e.name, e.runs[0].path, e.state, *settings, *(known.get(k, "") for k in keys), e.note]
        )
    return out.getvalue()


def to_markdown(c: Comparison) -> str:
    """Return the result, the table and the notes."""
    heads = ["run", "mark", "difference", *c.differing, *(column.title for column in c.columns)]
    rows = [
        [
            e.name,
            _mark(e),
            difference(e),
            *(_cell(e.values[k]) if k in e.values else "" for k in c.differing),
        ]
        + [figure(e, column) for column in c.columns]
        for e in c.entries
    ]
    rules = ["---"] * (3 + len(c.differing)) + ["---:"] * len(c.columns)
    lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in (heads, rules, *rows)]
    said = [f"- {_escaped(s)}" for s in (*c.notes, *c.why)]
    return "\n".join([_escaped(c.headline), "", *lines, "", *said]) + "\n"


def _escaped(text: str) -> str:
    for sign in "\\|`<*":
        text = text.replace(sign, "\\" + sign)
    return text


def columns() -> int:
    """Return the width of the terminal; COLUMNS goes before, and 120 where there is none."""
    return max(20, shutil.get_terminal_size((120, 24)).columns)
