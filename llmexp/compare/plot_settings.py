"""The figures over what was swept: the loss over each key, over pairs of keys, and over all of
them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from llmexp.compare.curves import Scale, cells, scale
from llmexp.compare.figures import figure, half_width, shown
from llmexp.compare.judging import MARKS
from llmexp.compare.plotting import GREY, LEADING, Choice, Plot, looks, metric, palette, text
from llmexp.compare.records import APART, Column, Comparison, Entry
from llmexp.labels import label, short_keys

NAMED = 10  # settings of the other keys at most that have colours and names
MAPS = 6  # pairs of keys, at most
_COMPARED = {"", *LEADING, *MARKS.values(), "lowest of budget", "highest of budget"} - set(APART)


def _swept(c: Comparison) -> list[Entry]:
    """Return the entries that have a value of every swept key and are of the same task and
    length."""
    family = [e for e in c.entries if e.standing.mark not in APART]
    return [e for e in family if all(k in e.values for k in c.factors)]


def _compared(c: Comparison) -> list[Entry]:
    """Return those of them that are compared by the figure that orders the table."""
    return [e for e in _swept(c) if c.metric in e.figures and e.standing.mark in _COMPARED]


def _described(entry: Entry, column: Column) -> str:
    """Return the entry and its figure, for the label over its point."""
    return f"<b>{text(entry.label)}</b><br>{text(column.title)} {figure(entry, column)}"


def over_keys(c: Comparison) -> list[Plot]:
    """Return the figure that orders the table over each swept numeric key, with its interval where
    there are seeds."""
    column, entries = metric(c), _compared(c)
    if column is None:
        return []
    scales = {key: scale(entries, key) for key in c.factors}
    numeric = {k: s for k, s in scales.items() if len(s.levels) > 1 and s.kind != "category"}
    return [_over_key(c, key, along, column, entries) for key, along in numeric.items()]


def _over_key(
    c: Comparison, key: str, along: Scale, column: Column, entries: Sequence[Entry]
) -> Plot:
    groups: dict[str, list[Entry]] = defaultdict(list)
    for e in sorted(entries, key=lambda e: float(e.values[key])):
        groups[label({k: e.values[k] for k in c.factors if k != key})].append(e)
    few = len(groups) <= NAMED
    legend = few and len(groups) > 1
    look = looks(c)
    traces = []
    colours = palette(len(groups)) if few else [GREY] * len(groups)
    for (title, group), colour in zip(groups.items(), colours, strict=True):
        halves = [half_width(e, column) for e in group]
        points = [look[e].point(15, 7) for e in group]
        traces.append(
            go.Scatter(
                x=[e.values[key] for e in group], y=[e.figures[column.key] for e in group],
                name=text(title, 40), mode="lines+markers",
                line={"color": colour, "width": 1.6 if few else 0.7},
                marker={
                    "color": colour, "opacity": 1, "line": {"width": 0},
                    "size": [p["size"] for p in points], "symbol": [p["symbol"] for p in points],
                },
                error_y=dict(array=halves, thickness=1.2, width=4, color=colour,
                             visible=any(halves)),
                text=[_described(e, column) for e in group],
                hovertemplate="%{text}<extra></extra>", showlegend=legend,
            )
        )  # fmt: skip
    layout = {
        "height": 340, "xaxis.title.text": text(key), "xaxis.type": along.kind,
        "yaxis.title.text": text(column.title), "yaxis.range": _span(entries, column),
        "margin.t": 30 if legend else 10,
        "legend": dict(orientation="h", x=0, y=1.02, yanchor="bottom"),
    }  # fmt: skip
    if len(along.levels) <= 12:
        layout |= {f"xaxis.{name}": value for name, value in _ticks(along, along.levels).items()}
    caption = "One seed each, so there are no intervals."
    if any(half_width(e, column) for e in entries):
        caption = "The bars are 95 % intervals over the seeds."
    title = f"{column.title[:1].upper()}{column.title[1:]} over {key}"
    return Plot(f"over {key}", title, traces, layout, caption=caption)


def _ticks(along: Scale, places: Sequence[Any]) -> dict[str, Any]:
    return {"tickvals": list(places), "ticktext": [text(words, 16) for words in along.labels]}


def _span(entries: Sequence[Entry], column: Column) -> list[float]:
    """Return the figures with their intervals, as far as these do not press the figures flat."""
    values = [e.figures[column.key] for e in entries]
    spread = max(values) - min(values) or 0.02 * abs(values[0]) or 1.0
    ends = [*values, *(end for e in entries for end in e.intervals.get(column.key, ()))]
    low = max(min(ends), min(values) - 1.5 * spread)
    high = min(max(ends), max(values) + 1.5 * spread)
    return [low - 0.08 * spread, high + 0.08 * spread]


def maps(c: Comparison) -> list[Plot]:
    """Return a map for each pair of swept keys of which a third of the cells at least are known: a
    random search has none."""
    entries = _swept(c)
    plots = []
    for pair in itertools.combinations(c.factors, 2) if c.columns else ():
        scales = {key: scale(entries, key) for key in pair}
        down, across = sorted(pair, key=lambda key: len(scales[key].levels))
        known = cells(entries, down, across)
        if 3 * len(known) >= len(scales[down].levels) * len(scales[across].levels):
            plots.append(_map(c, {across: scales[across], down: scales[down]}, known))
    return plots[:MAPS]


def _map(c: Comparison, scales: dict[str, Scale], known: dict[tuple[int, int], Entry]) -> Plot:
    columns, rows = (range(len(along.levels)) for along in scales.values())
    grid = [[known.get((i, j)) for j in columns] for i in rows]
    look = looks(c)

    def words(e: Entry | None, column: Column) -> str:
        if e is None:
            return ""
        lines = [shown(e.figures[column.key], column.digits)] if column.key in e.figures else []
        lines += [text(e.state)] if e.state != "finished" else []
        star = "★ " if look[e].lead and column.key == c.metric else ""
        return star + "<br>".join(lines)

    options: list[tuple[str, list[Any]]] = []
    for column in c.columns:
        values = [[e.figures.get(column.key) if e else None for e in row] for row in grid]
        change = {"z": [values], "text": [[[words(e, column) for e in row] for row in grid]]}
        better = {"coloraxis.reversescale": column.better == "lower"}
        options.append((column.title, [change, better, [0]]))
    keys = [column.key for column in c.columns]
    chosen = keys.index(c.metric) if c.metric in keys else 0
    first, reverse, _ = options[chosen][1]
    trace = go.Heatmap(
        z=first["z"][0], text=first["text"][0],
        customdata=[[text(e.label) if e else None for e in row] for row in grid],
        texttemplate="%{text}", hovertemplate="<b>%{customdata}</b><br>%{text}<extra></extra>",
        hoverongaps=False, coloraxis="coloraxis", xgap=3, ygap=3,
    )  # fmt: skip
    layout = {"height": 100 + 46 * min(len(rows), 12), **reverse}
    for axis, (key, along) in zip(("xaxis", "yaxis"), scales.items(), strict=True):
        name = {"text": text(short_keys(c.factors)[key])}
        layout[axis] = dict(title=name, showgrid=False, **_ticks(along, range(len(along.levels))))
    caption = "The stronger the colour, the better, where one direction is better."
    caption += " Each cell shows the best of its runs." if len(c.factors) > 2 else ""
    title = " and ".join(scales)
    choices = {"figure": Choice("show", options, chosen)}
    return Plot(f"map {title}", title, [trace], layout, {}, choices, caption)


def parallel(c: Comparison) -> list[Plot]:
    """Draw, from three keys on, a line for each entry, from its settings down to its figure. The
    axes lie, so that they have room on a phone."""
    column, drawn = metric(c), _compared(c)
    if len(c.factors) < 3 or column is None or not drawn:
        return []
    scales = {key: scale(drawn, key) for key in c.factors}
    figures = [e.figures[column.key] for e in drawn]
    low, span, last = min(figures), max(figures) - min(figures), len(scales)
    traces = []
    for e, look in ((e, looks(c)[e]) for e in drawn):
        places = [s.share(e.values[k]) for k, s in scales.items()]
        traces.append(
            go.Scatter(
                x=[*places, (e.figures[column.key] - low) / (span or 1.0)],
                y=list(range(last + 1)), mode="lines+markers", showlegend=False,
                zorder=int(look.lead), line=look.line(4, 1.5), marker=look.point(14, 5),
                text=_described(e, column), hovertemplate="%{text}<extra></extra>",
            )
        )  # fmt: skip
    notes = []
    for row, (key, along) in enumerate(scales.items()):
        step = -(-len(along.levels) // 8)
        places = [along.share(v) for v in along.levels[::step]]
        notes += _axis(row, key, dict(zip(places, along.labels[::step], strict=True)))
    quarters = [i / 4 for i in range(5 if span else 1)]
    figures_at = {at: shown(low + span * at, column.digits) for at in quarters}
    notes += _axis(last, column.title, figures_at)
    line = {"type": "line", "x0": 0, "x1": 1, "layer": "below"}
    layout = {
        "height": 80 + 84 * last, "annotations": notes,
        "xaxis": {"visible": False, "range": [-0.06, 1.06], "fixedrange": True},
        "yaxis": {"visible": False, "range": [last + 0.5, -0.6], "fixedrange": True},
        "shapes": [{**line, "y0": y, "y1": y} for y in range(last + 1)],
    }  # fmt: skip
    caption = "Each line is a run, from its settings down to its figure."
    return [Plot("parallel", "All swept keys", traces, layout, caption=caption)]


def _axis(row: int, title: str, marks: dict[float, str]) -> list[dict[str, Any]]:
    """Return the words of an axis that lies: its title above, the values below it."""
    below = {"y": row, "yanchor": "top", "yshift": -6}
    found = [{"x": at, **below, "text": text(words, 16)} for at, words in marks.items()]
    above = {"x": 0, "xanchor": "left", "y": row, "yanchor": "bottom", "yshift": 8}
    return [*found, {**above, "text": f"<b>{text(title)}</b>"}]
