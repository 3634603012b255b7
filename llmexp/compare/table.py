"""A comparison as a table: for the terminal, as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import textwrap
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmexp.compare.figures import setting
from llmexp.compare.records import Column, Comparison, Entry

NAME_LEAST, NAME_MOST = 16, 48  # characters of the name's column
_STYLES = {"finished": "green", "running": "cyan", "failed": "red", "cut": "red", "preempted": "yellow"}


def show(comparison: Comparison, to: TextIO, width: int | None = None) -> None:
    """The table and the sentences, at any width: figures give way from the right, name, metric and state stay."""
    console = Console(file=to, width=width, highlight=False, markup=False, emoji=False)
    figures = {c.key: _figure_column(comparison, c) for c in comparison.columns}
    metric = [figures.pop(comparison.metric)] if comparison.metric in figures else []
    state = ["state", *(e.state for e in comparison.entries)]
    settings = _settings(comparison)
    natural = [*metric, state, *settings.values(), *figures.values()]
    kept = [*metric, state]
    longest = max(len(e.name) for e in comparison.entries)
    room = console.width - sum(map(_width, kept)) - min(longest, NAME_MOST if console.width > 160 else 24) - 2
    left_out = []
    for column in _by_weight(comparison, metric, settings, figures):
        if room >= _width(column):
            room -= _width(column)
            kept.append(column)
        else:
            left_out.append(column[0].replace("_\n", "_").replace(".\n", ".").replace("\n", " ").strip())
    kept = [column for column in natural if any(column is k for k in kept)]
    spare = max(NAME_LEAST, console.width - sum(map(_width, kept)) - 2)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    # Where columns say all that the name of a point does, its number is enough of it.
    told = bool(comparison.factors) and all(any(settings.get(k) is c for c in kept) for k in comparison.factors)
    name_width = min(longest, spare, max(NAME_MOST, spare // 2))
    table.add_column("run", width=name_width, overflow="ellipsis" if told else "fold", no_wrap=told, vertical="bottom")
    for column in kept:
        words = column is state or not any(any(ch.isdigit() for ch in cell) for cell in column[1:])
        justify = "left" if words else "right"
        table.add_column(Text(column[0]), justify=justify, overflow="fold", no_wrap=True)  # type: ignore[arg-type]
    for i, entry in enumerate(comparison.entries, 1):
        style = _STYLES.get(entry.state, "")
        cells = [Text(column[i], style=style if column is state else "") for column in kept]
        table.add_row(Text(entry.name), *cells)
    console.print(table)
    console.print()
    for sentence in comparison.sentences:
        console.print(Text(sentence))
    for entry in comparison.entries:
        if entry.note:
            console.print(Text(f"{entry.name}: {entry.note}", style="dim"))
    if left_out:
        console.print(Text(f"Not shown at this width: {', '.join(left_out)}; --json has all.", style="dim"))


def _width(column: list[str]) -> int:
    return max(len(line) for cell in column for line in cell.split("\n")) + 3  # padding and rule


def _by_weight(
    c: Comparison, metric: list[list[str]], settings: dict[str, list[str]], figures: dict[str, list[str]]
) -> list[list[str]]:
    """What was swept, the figures that differ, what follows from the swept keys, and last what is the same for all."""
    said = [column[1:] for column in metric]  # what the metric says already is no news

    def weight(column: list[str]) -> int:
        return 2 if len(c.entries) > 1 and (len(set(column[1:])) == 1 or column[1:] in said) else 0

    first = [(0 if key in c.factors else 1, column) for key, column in settings.items()]
    rest = [(weight(column) + (key == "val/bits_per_byte"), column) for key, column in figures.items()]
    return [column for _, column in sorted(first + rest, key=lambda pair: pair[0])]


def _settings(c: Comparison) -> dict[str, list[str]]:
    """A column for each differing key, with its section over the first of each section."""
    found, section = {}, None
    for key in c.differing:
        if not any(key in e.values for e in c.entries):
            continue
        head, _, last = key.rpartition(".")
        title = f"{head + '.' if head != section else ''}\n" + last.replace("_", "_\n", 2 if len(last) > 16 else 0)
        found[key] = [title, *(_cell(e.values.get(key, "")) for e in c.entries)]
        section = head
    return found


def _cell(value: Any, most: int = 24) -> str:
    text = setting(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def _figure_column(c: Comparison, column: Column) -> list[str]:
    title = "\n".join(textwrap.wrap(column.title, 11))
    return [title, *(figure(entry, column) for entry in c.entries)]


def figure(entry: Entry, column: Column) -> str:
    """A figure as text, with the half width of its interval; empty where it is not known."""
    value = entry.figures.get(column.key)
    if value is None:
        return ""
    text = shown(value, column.digits)
    if column.key in entry.intervals:
        low, high = entry.intervals[column.key]
        if (half := (high - low) / 2) > 1e-12 * abs(value):  # else the same for all seeds, such as steps
            text += f" ±{half:.2g}"
    return text


def shown(value: float, digits: int) -> str:
    """A number with so many significant digits; large ones whole, with separators."""
    if 10 ** (digits - 1) <= abs(value) < 1e15 or (value == int(value) and abs(value) < 1e15):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) < 1e-3 or abs(value) >= 1e15 else f"{value:#.{digits}g}"


def to_json(c: Comparison) -> str:
    """Strict JSON: {"runs": [{name, path, state, keys that differ, figures, ...}], "sentences": [...], ...}."""
    # Every run has every key, null where it has no such figure or setting.
    figures = list(dict.fromkeys([*(col.key for col in c.columns), *(key for e in c.entries for key in e.figures)]))
    settings = [key for key in c.differing if any(key in e.values for e in c.entries)]
    runs = []
    for e in c.entries:
        row: dict[str, Any] = {"name": e.name, "path": str(e.runs[0].path), "state": e.state}
        row |= {key: _strict(e.values.get(key)) for key in settings}
        row |= {key: e.figures.get(key) for key in figures}
        row["paths"] = [str(r.path) for r in e.runs]
        row["intervals"] = {key: list(interval) for key, interval in e.intervals.items()}
        row["note"] = e.note or None
        runs.append(row)
    whole = {"runs": runs, "sentences": list(c.sentences), "problems": list(c.problems), "metric": c.metric}
    whole |= {"align": c.align, "align_at": c.align_at, "batch": c.batch, "differing": list(c.differing)}
    return json.dumps(whole, indent=2, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [_strict(v) for v in value] if isinstance(value, list) else value


def to_csv(c: Comparison) -> str:
    """A row an entry, figures in full; the ends of intervals follow their figure where there are some."""
    keys: list[str] = []
    for column in c.columns:
        bounds = any(column.key in e.intervals for e in c.entries)
        keys += [column.key, *([f"{column.key} low", f"{column.key} high"] if bounds else [])]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["name", "path", "state", *c.differing, *keys, "note"])
    for e in c.entries:
        ends = {
            f"{k} {end}": v for k, pair in e.intervals.items() for end, v in zip(("low", "high"), pair, strict=True)
        }
        known = {**e.figures, **ends}
        settings = [str(v) if type(v := e.values.get(k, "")) is float else _cell(v, 400) for k in c.differing]
        writer.writerow([e.name, e.runs[0].path, e.state, *settings, *(known.get(k, "") for k in keys), e.note])
    return out.getvalue()


def to_markdown(c: Comparison) -> str:
    """The table and the sentences."""
    heads = ["run", "state", *c.differing, *(column.title for column in c.columns)]
    rows = [
        [e.name, e.state, *(_cell(e.values[k]) if k in e.values else "" for k in c.differing)]
        + [figure(e, column) for column in c.columns]
        for e in c.entries
    ]
    rules = ["---"] * (2 + len(c.differing)) + ["---:"] * len(c.columns)
    lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in (heads, rules, *rows)]
    return "\n".join([*lines, "", *(f"- {_escaped(s)}" for s in c.sentences)]) + "\n"


def _escaped(text: str) -> str:
    for sign in "\\|`<*":
        text = text.replace(sign, "\\" + sign)
    return text
