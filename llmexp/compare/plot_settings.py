"""The figures over what was swept: the loss over each key, and a map for each pair of keys."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from llmexp.compare.columns import alone, figure_text, half_width
from llmexp.compare.curves import Scale, scale
from llmexp.compare.plotting import (
    ABOVE,
    GREY,
    Options,
    Plot,
    looks,
    menus,
    palette,
    plot,
    points,
    text,
)
from llmexp.compare.records import APART, Column, Result, Setting, Verdict
from llmexp.metrics.keys import is_score
from llmexp.settings.labels import plural, short_label

_NAMED = 10  # settings of the other keys at most that have colours and names
MAPS = 6  # pairs of keys, at most


def _swept(c: Result) -> list[Setting]:
    """Return the settings of the same task and length that have a value of every swept key."""
    family = [e for e in c.settings if e.mark not in APART]
    return [e for e in family if all(k in e.values for k in c.factors)]


def over_keys(c: Result) -> list[Plot]:
    """Return the figure that orders the table over each swept numeric key.

    It has its interval where there are seeds.
    """
    ranked = [e for e in _swept(c) if not e.out and e.verdict is not Verdict.TASK]
    settings = [e for e in ranked if c.key in e.figures]
    scales = {key: scale(settings, key) for key in c.factors if c.metric in c.columns}
    numeric = {k: s for k, s in scales.items() if len(s.levels) > 1 and s.kind != "category"}
    absent = len(ranked) - len(settings)
    return [_over_key(c, key, along, settings, absent) for key, along in numeric.items()]


def _over_key(c: Result, key: str, along: Scale, settings: list[Setting], absent: int) -> Plot:
    column, look = c.metric, looks(c)
    groups: dict[str, list[Setting]] = defaultdict(list)
    for e in sorted(settings, key=lambda e: float(e.values[key])):
        groups[short_label({k: e.values[k] for k in c.factors if k != key})].append(e)
    few = len(groups) <= _NAMED
    legend = few and len(groups) > 1
    colours = palette(len(groups)) if few else [GREY] * len(groups)
    traces = []
    for (title, group), colour in zip(groups.items(), colours, strict=True):
        marks = [look[e].point(15, 7) for e in group]
        halves = [half_width(e, column) for e in group]
        words = [f"<b>{text(e.label)}</b><br>{text(column.title)} {figure_text(e, column)}"
                 for e in group]  # fmt: skip
        traces.append(
            points(
                [e.values[key] for e in group], [e.figures[column.key] for e in group], words,
                name=text(title, 40), mode="lines+markers", showlegend=legend,
                line={"color": colour, "width": 1.6 if few else 0.7},
                marker={"color": colour, **{k: [m[k] for m in marks] for k in ("size", "symbol")}},
                error_y=dict(array=halves, width=4, color=colour, visible=any(halves)),
            )
        )  # fmt: skip
    layout = {
        "height": 340, "xaxis.title.text": text(key), "xaxis.type": along.kind,
        "yaxis.title.text": text(column.title), "margin.t": 30 if legend else 10,
        "legend": ABOVE,
    }  # fmt: skip
    if len(along.levels) <= 12:
        layout |= {f"xaxis.{name}": at for name, at in _ticks(along, along.levels).items()}
    most = max(len(e.taking_part) for e in settings)
    caption = "There are intervals of losses and scores alone."
    if most < 3:
        caption = ("Two seeds are too few for", "One seed each, so there are no")[most < 2]
        caption += " intervals."
    if any(half_width(e, column) for e in settings):
        what = "items of the task" if is_score(column.key) else "seeds"
        caption = f"The bars are 95 % intervals over the {what}."
    if absent:
        why = f"whose runs do not all reach {c.target}" if c.target else f"without {column.title}"
        caption += f" Left out: {plural(absent, 'setting')} {why}."
    title = f"{column.title[:1].upper()}{column.title[1:]} over {key}"
    return plot(f"over {key}", title, traces, layout, caption)


def _ticks(along: Scale, places: Any) -> dict[str, Any]:
    return {"tickvals": list(places), "ticktext": [text(words, 16) for words in along.labels]}


def maps(c: Result) -> list[Plot]:
    """Return a map for each pair of swept keys of which a third of the cells are known.

    A random search has none.
    """
    settings = _swept(c)
    plots = []
    for pair in itertools.combinations(c.factors, 2) if c.columns else ():
        scales = {key: scale(settings, key) for key in pair}
        down, across = sorted(pair, key=lambda key: len(scales[key].levels))
        of = {e: [scales[key].index(e.values[key]) for key in (down, across)] for e in settings}
        # where a cell has several settings, it is the best one, which comes first
        known = {(i, j): e for e, (i, j) in reversed(of.items())}
        if 3 * len(known) >= len(scales[down].levels) * len(scales[across].levels):
            plots.append(_map(c, {across: scales[across], down: scales[down]}, known))
    return plots[:MAPS]


def _map(c: Result, scales: Mapping[str, Scale], known: Mapping[tuple[int, int], Setting]) -> Plot:
    columns, rows = (range(len(along.levels)) for along in scales.values())
    grid = [[known.get((i, j)) for j in columns] for i in rows]
    options: Options = []
    for k in c.columns:
        z = [[e.figures.get(k.key) if e else None for e in row] for row in grid]
        words = [[_words(c, e, k) if e else "" for e in row] for row in grid]
        better = {"coloraxis.reversescale": k.better == "lower"}
        options.append((k.title, [{"z": [z], "text": [words]}, better, [0]]))
    chosen = c.columns.index(c.metric) if c.metric in c.columns else 0
    first, reverse, _ = options[chosen][1]
    trace = go.Heatmap(
        z=first["z"][0], text=first["text"][0],
        customdata=[[text(e.label) if e else None for e in row] for row in grid],
        texttemplate="%{text}", hovertemplate="<b>%{customdata}</b><br>%{text}<extra></extra>",
        hoverongaps=False, coloraxis="coloraxis", xgap=3, ygap=3,
    )  # fmt: skip
    height = 130 + 46 * min(len(rows), 12)
    layout = {"height": height, "updatemenus": menus((options, chosen)), **reverse}
    for axis, (key, along) in zip(("xaxis", "yaxis"), scales.items(), strict=True):
        ticks = _ticks(along, range(len(along.levels)))
        layout[axis] = dict(title={"text": text(c.names[key])}, showgrid=False, **ticks)
    caption = "The stronger the colour, the better, where one direction is better."
    caption += " Each cell shows the best of its runs." * (len(c.factors) > 2)
    title = " and ".join(scales)
    return plot(f"map {title}", title, [trace], layout, caption)


def _words(c: Result, e: Setting, column: Column) -> str:
    """Return what a cell shows of a setting: its figure, and its state unless it has finished."""
    lines = [alone(e, column)] if column.key in e.figures else []
    lines += [text(e.state)] * (e.state != "finished")
    return "★ " * (e.leads and column.key == c.key) + "<br>".join(lines)
