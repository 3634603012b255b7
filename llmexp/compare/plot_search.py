"""Draw what a search and a screen have found.

Of a search the trials in order and, apart from them, the fresh seeds; of a screen its effects by
size, and all contrasts against what noise would make.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.columns import half_width
from llmexp.compare.plotting import (
    ABOVE,
    GREY,
    TEN_COLOURS,
    Plot,
    SettingStyle,
    looks,
    plot,
    points,
    text,
)
from llmexp.compare.records import Record, Result, Setting
from llmexp.compare.screening import Screen, spelled
from llmexp.runs.rundir import by_number
from llmexp.settings.labels import short_value


def search_plots(c: Result) -> list[Plot]:
    """Return the figure of a search, with a place of its own for each trial that was confirmed."""
    trials = sorted((r for r in c.runs if r.trial), key=lambda r: by_number(r.path))
    known = [(at, r, r.figures[c.key]) for at, r in enumerate(trials, 1) if c.key in r.figures]
    if c.metric not in c.columns or not known:
        return []
    look, values = looks(c), [v for _, _, v in known]
    colours = {r: look[e].colour for e in look if len(e.runs) > 1 for r in e.runs}
    words = [f"trial {at}: {text(c.label_of(r))}<br>{c.digits(v)}" for at, r, v in known]
    x = [at for at, _, _ in known]
    marker = {"color": [colours.get(r, GREY) for _, r, _ in known], "size": 7,
              "symbol": "circle-open", "line_width": 1.6}  # fmt: skip
    traces = [points(x, values, words, name="a trial", marker=marker)]
    layout: dict[str, Any] = {
        "height": 340, "yaxis.title.text": text(c.metric.title), "xaxis.title.text": "trial",
        "legend": ABOVE, "margin.t": 34, "xaxis.showgrid": False,
    }  # fmt: skip
    caption = "The lowest of many trials is low by chance too."
    fresh = {e: [r for r in e.runs if not r.trial and c.key in r.figures] for e in look}
    again = [e for e in look if fresh[e]]
    if again:
        edge = len(trials) + 0.5
        places = itertools.count(len(trials) + 1)
        traces += [_fresh(c, e, look[e], fresh[e], next(places)) for e in again]
        stroke = {"color": GREY, "width": 1, "dash": "dot"}
        layout["shapes"] = [dict(type="line", x0=edge, x1=edge, yref="paper", y0=0, y1=1,
                                 line=stroke)]  # fmt: skip
        ticks = np.unique(np.linspace(1, len(trials), min(10, len(trials))).round())
        layout |= {"xaxis.tickvals": ticks.tolist(), "xaxis.range": [0.3, edge + 1 + len(traces)]}
        caption += " Right of the line the best ones again, with fresh seeds; these are compared."
    return [plot("search", "The search", traces, layout, caption)]


def _fresh(c: Result, e: Setting, look: SettingStyle, fresh: Sequence[Record], place: int) -> Any:
    """Return the fresh seeds of a trial, with their mean and its interval."""
    values = [r.figures[c.key] for r in fresh]
    mean, count = sum(values) / len(values), len(values)
    half = half_width(e, c.metric) if len(e.taking_part) == count else None
    words = [f"{look.title}, mean of {count}<br>{c.digits(mean)}"]
    words += [f"{look.title}, seed {text(r.seed)}<br>{c.digits(r.figures[c.key])}" for r in fresh]
    first = look.point(15, 11)
    marker = {"color": look.colour, "symbol": [first["symbol"], *["line-ew-open"] * count],
              "size": [first["size"], *[9] * count], "line_width": 1.5}  # fmt: skip
    bars = dict(array=[half or 0.0, *[0.0] * count], color=look.colour, width=5, visible=bool(half))
    x = [place] * (1 + count)
    return points(x, [mean, *values], words, name=look.title, marker=marker, error_y=bars)


def screen_plots(c: Result) -> list[Plot]:
    """Return a Pareto of the effects and a half-normal plot of all contrasts of a screen."""
    return [_pareto(c, c.screen), _half_normal(c, c.screen)] if c.screen else []


def _pareto(c: Result, screen: Screen) -> Plot:
    names, knobs = c.names, list(screen.knobs.items())[::-1]
    labels = []
    for key, _ in knobs:
        first, second = map(short_value, screen.levels[key])
        labels.append(text(f"{names[key]}: {second} against {first}", 40))
    trace = go.Bar(
        y=labels, x=[k.effect for _, k in knobs], orientation="h",
        error_x=dict(array=[k.half for _, k in knobs], color=GREY),
        marker={"color": [TEN_COLOURS[0] if k.found else GREY for _, k in knobs]},
        hovertemplate="%{y}<br>%{x:.3g}<extra></extra>",
    )  # fmt: skip
    layout = {"height": 120 + 34 * len(knobs), "yaxis.automargin": True}
    caption = "Bars in colour are told from noise; the whiskers are 95 % intervals."
    return plot("effects", f"Effects on {c.key}", [trace], layout, caption)


def _half_normal(c: Result, screen: Screen) -> Plot:
    from scipy.special import ndtri

    every = sorted([*screen.knobs.values(), *screen.others], key=lambda k: abs(k.effect))
    titles = [text(spelled(k.names, c.names)) or "higher" for k in every]
    knobs = [c.names[k.names[0]] if k in screen.knobs.values() else "" for k in every]
    x = ndtri(0.5 + 0.5 * (np.arange(len(every)) + 0.5) / len(every)).tolist()
    marker = {"size": 9, "symbol": ["circle" if knob else "circle-open" for knob in knobs],
              "color": [TEN_COLOURS[0] if k.found else GREY for k in every]}  # fmt: skip
    trace = go.Scatter(
        x=x, y=[abs(k.effect) for k in every], mode="markers+text", marker=marker,
        text=[text(knob, 30) for knob in knobs],
        textposition="top center", cliponaxis=False, customdata=titles,
        hovertemplate="%{customdata}<br>%{y:.3g}<extra></extra>",
    )  # fmt: skip
    layout = {
        "height": 340, "xaxis.title.text": "half-normal quantile", "xaxis.range": [-0.25, 2.6],
        "yaxis.title.text": "size of the contrast",
    }  # fmt: skip
    caption = "Noise alone lies on a line through the origin, what matters above it. Open: pairs."
    return plot("half-normal", "All contrasts", [trace], layout, caption)
