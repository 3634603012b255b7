"""A comparison as a table: for the terminal, as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from llmexp import features
from llmexp.compare.columns import difference, figure_text
from llmexp.compare.records import REACHED, TWIN, Result, Setting
from llmexp.metrics.keys import is_of_named_set
from llmexp.settings.labels import short_keys, short_value
from llmexp.system import child
from llmexp.system.text import in_lines, padded_cells

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


@dataclass(frozen=True)
class Shown:
    """A column as every form of the table shows it: its title, and a text for each setting."""

    title: str
    cells: list[str]
    values: list[Any] = field(default_factory=list)  # what they are sorted by, where it is not them

    @property
    def width(self) -> int:
        texts = [*_words(self.title), *self.cells]
        return max(map(cell_len, texts), default=0) + 2

    @property
    def is_numbers(self) -> bool:
        """Tell whether its cells are figures, which end together."""
        return bool(self.title) and any(ch.isdigit() for cell in self.cells for ch in cell)


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
    c, encoding = comparison, getattr(to, "encoding", None) or sys.stdout.encoding or "utf-8"
    console = Console(file=to, width=width, highlight=False, markup=False, emoji=False)
    if c.headline:
        line = child.printable(c.headline, encoding)
        console.print(Text(in_lines(line, console.width), style="bold"))
    for row in _rows(c, _fitting(c, console.width, encoding)):
        console.print(row, no_wrap=True, overflow="ellipsis")
    for line in (*c.notes, *(c.why if why else ())):
        console.print(Text(in_lines(child.printable(line, encoding), console.width)))
    for setting in c.settings if why else ():
        if setting.note:
            console.print(Text(f"{setting.label or setting.name}: {setting.note}", style="dim"))


def _words(title: str) -> list[str]:
    return textwrap.wrap(title, 14, break_long_words=False)


def _rows(c: Result, columns: Sequence[Shown]) -> Iterator[Text]:
    """Yield the lines of the table: those of the titles, then one a setting."""
    titles = [_words(k.title) for k in columns]
    height = max(map(len, titles))
    heads = zip(*([""] * (height - len(words)) + words for words in titles), strict=True)
    cells = zip(*(k.cells for k in columns), strict=True)
    rows = padded_cells([*heads, *cells], [i for i, k in enumerate(columns) if not k.is_numbers])
    for row in rows[:height]:
        yield Text("  ".join(row).rstrip(), style="dim")
    for e, row in zip(c.settings, rows[height:], strict=True):
        styles = ["" if k.title else _STYLES.get(e.mark, "") for k in columns]
        line = Text("  ").join(Text(*pair) for pair in zip(row, styles, strict=True))
        line.rstrip()
        yield line


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
    mark = Shown("", found["mark"].cells)
    metric = [found[c.key]] if c.key in found else []
    names = _names(c)
    kept = [*names, mark, *metric]
    keys = [column.key for column in c.columns]
    rest = dict.fromkeys([*_FIRST, *filter(is_of_named_set, keys), *_NEXT, *keys])
    if not c.key.endswith("bits_per_byte"):
        rest.pop("val/bits_per_byte", None)  # a multiple of the loss
    room = width - sum(column.width for column in kept)
    for column in (found[key] for key in rest if key in found):
        # The metric's own column says it already.
        news = len(set(column.cells)) > 1 and all(column.cells != k.cells for k in metric)
        if news and room >= column.width:
            room -= column.width
            kept.append(column)
    if room < -2:  # a very narrow terminal (nothing stands behind the last column): titles give way
        for i, name in enumerate(names):
            most = max(2, *map(cell_len, name.cells))
            kept[i] = Shown(_cut(name.title, most), name.cells)
        room = width - sum(column.width for column in kept)
    if room < -2:  # and then the names
        spare = max(6, kept[0].width + room)
        kept[0] = Shown(_cut(kept[0].title, spare), [_cut(x, spare) for x in kept[0].cells])
    return kept


def _names(c: Result) -> list[Shown]:
    """Return a column for each key that varies, under its short name.

    Where these do not tell the settings apart, it is one with their names.
    """
    short = c.names
    columns = [Shown(short[key], [_setting(e, key) for e in c.settings]) for key in c.factors]
    rows = set(zip(*(column.cells for column in columns), strict=True))
    named = any(e.label == e.name for e in c.settings)
    if named or not 0 < len(columns) <= 4 or len(rows) < len(c.settings):
        whole = [e.label for e in c.settings]
        cut = [_cut(label, _MOST) for label in whole]
        return [Shown("run", cut if len({*cut}) == len({*whole}) else whole)]
    return columns


def _setting(setting: Setting, key: str) -> str:
    value = setting.values.get(key, "")
    return "" if key == TWIN and not value else _cut(short_value(value), 24)


def _mark(setting: Setting) -> str:
    unfinished = len(setting.runs) == 1 and setting.state != "finished"
    return setting.mark or (setting.state if unfinished else "")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _rows_of(c: Result) -> list[dict[str, Any]]:
    """Return what is known of each setting, under the same keys for all, null where it is not."""
    named = [column.key for column in c.columns]
    figures = dict.fromkeys([*named, *(key for e in c.settings for key in e.figures)])
    settings = [key for key in c.differing if any(key in e.values for e in c.settings)]
    rows = []
    for e in c.settings:
        row = {
            "name": e.name, "path": str(e.runs[0].path), "state": e.state,
            **{key: e.values.get(key) for key in settings}, **figures, **e.figures,
            "paths": [str(r.path) for r in e.runs], "intervals": e.intervals,
            "note": e.note or None, "label": e.label, "mark": e.mark or None,
            "difference": e.size, "half": e.half,
        }  # fmt: skip
        for values_of in features.offered("compare", "values"):
            row |= values_of(e, figures)
        rows.append(row | {"basis": e.basis or None})
    return rows


def to_json(c: Result) -> str:
    """Return strict JSON.

    It is {"headline": "...", "notes": [...], "runs": [{name, path, state, keys that differ,
    figures, ...}], ...}.
    """
    runs = [{key: _strict(value) for key, value in row.items()} for row in _rows_of(c)]
    names = ("sentences", "problems", "metric", "align", "align_at", "batch", "differing")
    whole: dict[str, Any] = {"headline": c.headline, "notes": c.notes, "why": c.why, "runs": runs}
    whole |= {name: getattr(c, name) for name in names} | {"metric": c.key}
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
    return json.dumps(whole, indent=2, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [_strict(v) for v in value] if isinstance(value, list) else value


def columns_in_full(c: Result) -> dict[str, list[Any]]:
    """Return the figures of the settings in full, a list a column, values in their own types.

    The ends of intervals follow their figure where there are some.
    """
    keys: list[str] = []
    for key in (column.key for column in c.columns):
        keys.append(key)
        if any(key in e.intervals for e in c.settings):
            keys += [f"{key} low", f"{key} high"]
    rows = _rows_of(c)
    for row in rows:
        for key, (low, high) in row["intervals"].items():
            row |= {f"{key} low": low, f"{key} high": high}
        row["note"] = row["note"] or ""
    standing = ("mark", "difference", "half", "basis")
    heads = ("name", "path", "state", *standing, *c.differing, *keys, "note")
    return {head: [row.get(head) for row in rows] for head in heads}


def to_csv(c: Result) -> str:
    """Return `columns_in_full` as CSV; settings are spelled as overrides are."""
    found = columns_in_full(c)
    for key in set(found) & set(c.differing):
        there = [key in setting.values for setting in c.settings]
        pairs = zip(found[key], there, strict=True)
        found[key] = [
            ("" if not known else str(v) if type(v) is float else short_value(v))
            for v, known in pairs
        ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(found)
    writer.writerows(zip(*found.values(), strict=True))
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
