"""The figures over what was swept: the loss over each key, over pairs of keys, and over all of
them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.figures import figure, half_width, number, shown
from llmexp.compare.judging import MARKS
from llmexp.compare.plotting import GREY, LEADING, Choice, Plot, looks, metric, palette, text
from llmexp.compare.records import APART, Column, Comparison, Entry
from llmexp.labels import label, short_keys
from llmexp.labels import shown as setting

RATES = ("lr", "learning_rate", "weight_decay", "eps")
NAMED = 10  # settings of the other keys at most that have colours and names
MAPS = 6  # pairs of keys, at most
_COMPARED = {"", *LEADING, *MARKS.values(), "lowest of budget", "highest of budget"} - set(APART)


@dataclass(frozen=True)
class Scale:
    """The values of a key along an axis: numbers where they stand, anything else in its order."""

    kind: str  # linear | log | category
    levels: tuple[Any, ...]
    labels: tuple[str, ...]

    def index(self, value: Any) -> int:
        # 1 and True are two values
        return [repr(level) for level in self.levels].index(repr(value))

    def share(self, value: Any) -> float:
        """Return where the value lies between the first and the last one, from 0 to 1."""
        category = self.kind == "category"
        ends = [
            float(self.index(v) if category else v)
            for v in (self.levels[0], self.levels[-1], value)
        ]
        first, last, at = np.log(ends) if self.kind == "log" else ends
        return float((at - first) / (last - first)) if last > first else 0.5


def scale(entries: Sequence[Entry], key: str) -> Scale:
    """Return the axis of a key: logarithmic for rates, and where their steps are alike as
    factors."""
    distinct = {repr(e.values.get(key)): e.values.get(key) for e in entries}
    levels = sorted(
        distinct.values(), key=lambda v: (number(v) is None, number(v) or 0.0, setting(v))
    )
    labels = [setting(v) for v in levels]
    labels = labels if len(set(labels)) == len(labels) else [repr(v) for v in levels]
    if any(number(v) is None for v in levels):
        return Scale("category", tuple(levels), tuple(labels))
    values = np.array(levels, dtype=float)
    rate = key.rpartition(".")[2] in RATES or key.endswith("_lr")
    log = values[0] > 0 and (rate or _geometric(values))
    return Scale("log" if log else "linear", tuple(levels), tuple(labels))


def _geometric(values: np.ndarray) -> bool:
    if len(values) < 2 or values[-1] < 4 * values[0]:
        return False
    factors, sums = np.diff(np.log(values)), np.diff(values)
    return bool(np.std(factors) / np.mean(factors) <= np.std(sums) / np.mean(sums))


def _described(entry: Entry, column: Column) -> str:
    """Return the entry and its figure, for the label over its point."""
    return f"<b>{text(entry.label)}</b><br>{text(column.title)} {figure(entry, column)}"


def _swept(c: Comparison) -> list[Entry]:
    """Return the entries that have a value of every swept key and are of the same task and
    length."""
    return [
        e
        for e in c.entries
        if all(k in e.values for k in c.factors) and e.standing.mark not in APART
    ]


def over_keys(c: Comparison) -> list[Plot]:
    """Return the figure that orders the table over each swept numeric key, with its interval where
    there are seeds."""
    column = metric(c)
    entries = [e for e in _swept(c) if c.metric in e.figures and e.standing.mark in _COMPARED]
    if column is None or not entries:
        return []
    scales = {key: scale(entries, key) for key in c.factors}
    numeric = {
        key: along
        for key, along in scales.items()
        if len(along.levels) > 1 and along.kind != "category"
    }
    return [_over_key(c, key, along, column, entries) for key, along in numeric.items()]


def _over_key(
    c: Comparison, key: str, along: Scale, column: Column, entries: Sequence[Entry]
) -> Plot:
    groups: dict[str, list[Entry]] = {}
    for e in sorted(entries, key=lambda e: float(e.values[key])):
        groups.setdefault(
            label({k: e.values[k] for k in c.factors if k in e.values and k != key}), []
        ).append(e)
    few = len(groups) <= NAMED
    lead = {id(e) for e, look in zip(c.entries, looks(c), strict=True) if look.lead}
    traces = []
    for (title, group), colour in zip(
        groups.items(), palette(len(groups)) if few else [GREY] * len(groups), strict=True
    ):
        halves = [half_width(e, column) for e in group]
        marker = {
            "color": colour, "opacity": 1, "line": {"width": 0},
            "size": [15 if id(e) in lead else 7 for e in group],
            "symbol": ["star" if id(e) in lead else "circle" for e in group],
        }  # fmt: skip
        traces.append(
            go.Scatter(
                x=[e.values[key] for e in group], y=[e.figures[column.key] for e in group],
                name=text(title, 40),
                mode="lines+markers", line={"color": colour, "width": 1.6 if few else 0.7},
                marker=marker,
                error_y=dict(array=halves, thickness=1.2, width=4, color=colour,
                visible=any(halves)),
                text=[_described(e, column) for e in group], hovertemplate="%{text}<extra></extra>",
                showlegend=few and len(groups) > 1,
            )
        )  # fmt: skip
    layout = {
        "height": 340, "xaxis.title.text": text(key), "xaxis.type": along.kind,
        "yaxis.title.text": text(column.title),
        "yaxis.range": _span(entries, column), "margin.t": 30 if few and len(groups) > 1 else 10,
        "legend": dict(orientation="h", x=0, y=1.02, yanchor="bottom"),
    }  # fmt: skip
    if len(along.levels) <= 12:
        layout |= {
            "xaxis.tickvals": along.levels,
            "xaxis.ticktext": [text(words, 16) for words in along.labels],
        }
    seeds = any(half_width(e, column) for e in entries)
    caption = (
        "The bars are 95 % intervals over the seeds."
        if seeds
        else "One seed each, so there are no intervals."
    )
    return Plot(
        f"over {key}",
        f"{column.title[:1].upper()}{column.title[1:]} over {key}",
        traces,
        layout,
        caption=caption,
    )


def _span(entries: Sequence[Entry], column: Column) -> list[float]:
    """Return the figures with their intervals, as far as these do not press the figures flat."""
    values = [e.figures[column.key] for e in entries]
    spread = max(values) - min(values) or 0.02 * abs(values[0]) or 1.0
    ends = [end for e in entries for end in e.intervals.get(column.key, ())]
    low = max(min([*values, *ends]), min(values) - 1.5 * spread)
    high = min(max([*values, *ends]), max(values) + 1.5 * spread)
    return [low - 0.08 * spread, high + 0.08 * spread]


def maps(c: Comparison) -> list[Plot]:
    """Return a map for each pair of swept keys of which a third of the cells at least are known: a
    random search has none."""
    scales = {key: scale(_swept(c), key) for key in c.factors}
    plots = []
    for pair in itertools.combinations(c.factors, 2):
        down, across = sorted(pair, key=lambda k: len(scales[k].levels))
        cells: dict[tuple[int, int], int] = {}
        for e in _swept(c):  # the best one first, and it stays where a cell has several
            at = scales[down].index(e.values[down]), scales[across].index(e.values[across])
            cells.setdefault(at, next(i for i, other in enumerate(c.entries) if other is e))
        if 3 * len(cells) >= len(scales[down].levels) * len(scales[across].levels) and c.columns:
            plots.append(_map(c, {across: scales[across], down: scales[down]}, cells))
    return plots[:MAPS]


def _map(c: Comparison, scales: dict[str, Scale], cells: dict[tuple[int, int], int]) -> Plot:
    columns, rows = (range(len(along.levels)) for along in scales.values())

    def grid(of: dict[int, Any]) -> list[list[Any]]:
        return [[of.get(cells.get((i, j), -1)) for j in columns] for i in rows]

    options: list[tuple[str, list[Any]]] = []
    for column in c.columns:
        values = {
            i: e.figures[column.key] for i, e in enumerate(c.entries) if column.key in e.figures
        }
        words = grid(
            {
                i: _in_cell(c, e, look.lead, column)
                for i, (e, look) in enumerate(zip(c.entries, looks(c), strict=True))
            }
        )
        change = {"z": [grid(values)], "text": [[[word or "" for word in row] for row in words]]}
        options.append(
            (column.title, [change, {"coloraxis.reversescale": column.better == "lower"}, [0]])
        )
    keys = [column.key for column in c.columns]
    chosen = keys.index(c.metric) if c.metric in keys else 0
    first, reverse, _ = options[chosen][1]
    trace = go.Heatmap(
        z=first["z"][0], text=first["text"][0], customdata=grid({i: text(e.label) for i,
        e in enumerate(c.entries)}),
        texttemplate="%{text}", hovertemplate="<b>%{customdata}</b><br>%{text}<extra></extra>",
        hoverongaps=False,
        coloraxis="coloraxis", xgap=3, ygap=3,
    )  # fmt: skip
    layout = {
        "height": 100 + 46 * min(len(rows), 12),
        "coloraxis": {"reversescale": reverse["coloraxis.reversescale"]},
    }
    for axis, (key, along) in zip(("xaxis", "yaxis"), scales.items(), strict=True):
        ticks = dict(
            tickvals=list(range(len(along.levels))),
            ticktext=[text(words, 16) for words in along.labels],
        )
        layout[axis] = dict(
            title={"text": text(short_keys(c.factors)[key])}, showgrid=False, **ticks
        )
    caption = "The stronger the colour, the better, where one direction is better."
    caption += " Each cell shows the best of its runs." if len(c.factors) > 2 else ""
    title = " and ".join(scales)
    return Plot(
        f"map {title}",
        title,
        [trace],
        layout,
        {},
        {"figure": Choice("show", options, chosen)},
        caption,
    )


def _in_cell(c: Comparison, entry: Entry, lead: bool, column: Column) -> str:
    words = [shown(entry.figures[column.key], column.digits)] if column.key in entry.figures else []
    words += [text(entry.state)] if entry.state != "finished" else []
    return ("★ " if lead and column.key == c.metric else "") + "<br>".join(words)


def parallel(c: Comparison) -> Plot | None:
    """From three keys on: a line for each entry, from its settings down to its figure. The axes
    lie, so that they have room on a phone."""
    column = metric(c)
    compared = [id(e) for e in _swept(c) if c.metric in e.figures and e.standing.mark in _COMPARED]
    drawn = [(e, look) for e, look in zip(c.entries, looks(c), strict=True) if id(e) in compared]
    if len(c.factors) < 3 or column is None or not drawn:
        return None
    scales = {key: scale([e for e, _ in drawn], key) for key in c.factors}
    figures = [e.figures[column.key] for e, _ in drawn]
    low, last = min(figures), len(scales)
    span = max(figures) - low
    traces = [
        go.Scatter(
            x=[*(s.share(e.values.get(k)) for k, s in scales.items()),
            (figure - low) / (span or 1.0)],
            y=list(range(last + 1)), mode="lines+markers", showlegend=False, zorder=int(look.lead),
            line={"color": look.colour, "width": 4 if look.lead else 1.5},
            hovertemplate="%{text}<extra></extra>",
            marker={"size": 14 if look.lead else 5, "symbol": "star" if look.lead else "circle",
            "color": look.colour},
            text=_described(e, column),
        )
        for (e, look), figure in zip(drawn, figures, strict=True)
    ]  # fmt: skip
    marks = [(row, s.share(v), t) for row, s in enumerate(scales.values()) for v, t in _few(s)]
    marks += [
        (last, i / 4, shown(low + span * i / 4, column.digits)) for i in range(5 if span else 1)
    ]
    notes = [
        {"x": at, "y": row, "yanchor": "top", "yshift": -6, "text": text(words, 16)}
        for row, at, words in marks
    ]
    for row, title in enumerate([*scales, column.title]):
        place = {"x": 0, "xanchor": "left", "y": row, "yanchor": "bottom", "yshift": 8}
        notes.append({**place, "text": f"<b>{text(title)}</b>"})
    layout = {
        "height": 80 + 84 * last, "annotations": notes,
        "xaxis": {"visible": False, "range": [-0.06, 1.06], "fixedrange": True},
        "yaxis": {"visible": False, "range": [last + 0.5, -0.6], "fixedrange": True},
        "shapes": [{"type": "line", "x0": 0, "x1": 1, "y0": y, "y1": y,
        "layer": "below"} for y in range(last + 1)],
    }  # fmt: skip
    caption = "Each line is a run, from its settings down to its figure."
    return Plot("parallel", "All swept keys", traces, layout, caption=caption)


def _few(along: Scale) -> list[tuple[Any, str]]:
    pairs = list(zip(along.levels, along.labels, strict=True))
    return pairs[:: -(-len(pairs) // 8)]
