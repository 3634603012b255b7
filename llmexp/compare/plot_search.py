"""Draw the history of a search: its trials in order and, apart from them, the fresh seeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from llmexp.compare.figures import half_width
from llmexp.compare.plotting import ABOVE, GREY, Plot, looks, plot, text
from llmexp.compare.records import Record, Result
from llmexp.runs.rundir import by_number


def search_plots(c: Result) -> list[Plot]:
    """Return the figure of a search, with a place of its own for each trial that was confirmed."""
    trials = sorted((r for r in c.runs if r.trial), key=lambda r: by_number(r.path))
    known = [(at, r) for at, r in enumerate(trials, 1) if c.metric.key in r.figures]
    if c.metric not in c.columns or not known:
        return []
    values = [r.figures[c.metric.key] for _, r in known]
    lowest = itertools.accumulate(values, min if c.metric.sign > 0 else max)
    places = [at for at, _ in known]
    words = [f"trial {at}: {text(c.label_of(r))}<br>{v:.4f}"
             for (at, r), v in zip(known, values, strict=True)]  # fmt: skip
    colours = {r: look.colour for e, look in looks(c).items() if len(e.runs) > 1 for r in e.runs}
    traces = [
        go.Scatter(
            x=places, y=list(lowest), mode="lines", name="best so far", hoverinfo="skip",
            line={"color": GREY, "width": 1.4, "shape": "hv"},
        ),
        go.Scatter(
            x=places, y=values, mode="markers", name="a trial", text=words,
            marker={"color": [colours.get(r, GREY) for _, r in known], "size": 7,
                    "symbol": "circle-open", "line_width": 1.6},
            hovertemplate="%{text}<extra></extra>",
        ),
        *_confirmed(c, trials),
    ]  # fmt: skip
    layout: dict[str, Any] = {
        "height": 340, "yaxis.title.text": text(c.metric.title), "xaxis.title.text": "trial",
        "legend": ABOVE, "margin.t": 34,
        "xaxis.showgrid": False,
    }  # fmt: skip
    caption = "The lowest of many trials is low by chance too."
    if len(traces) > 2:
        edge = len(trials) + 0.5
        layout["shapes"] = [dict(type="line", x0=edge, x1=edge, yref="paper", y0=0, y1=1,
                                 line={"color": GREY, "width": 1, "dash": "dot"})]  # fmt: skip
        layout |= {"xaxis.tickvals": _ticks(len(trials)), "xaxis.range": [0.3, edge + len(traces)]}
        caption += " Right of the line the best ones again, with fresh seeds; these are compared."
    return [plot("search", "The search", traces, layout, caption)]


def _ticks(trials: int) -> list[int]:
    """Return some numbers of trials; there are none right of the last one."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if trials <= 10 * s or s == 1000)
    return [1, *range(step, trials + 1, step)] if step > 2 else list(range(step, trials + 1, step))


def _confirmed(c: Result, trials: Sequence[Record]) -> list[Any]:
    """Return the fresh seeds of each trial that has some, with their mean and its interval."""
    found, place = [], len(trials) + 1
    for e, look in looks(c).items():
        fresh = [r for r in e.runs if not r.trial and c.metric.key in r.figures]
        if not fresh or not trials:
            continue
        values = [r.figures[c.metric.key] for r in fresh]
        half = half_width(e, c.metric) if len(e.taking_part) == len(fresh) else None
        words = [f"{look.title}, seed {text(r.seed)}<br>{v:.4f}"
                 for r, v in zip(fresh, values, strict=True)]  # fmt: skip
        mean = sum(values) / len(values)
        found.append(
            go.Scatter(
                x=[place] * (1 + len(fresh)), y=[mean, *values], name=look.title, mode="markers",
                text=[f"{look.title}, mean of {len(fresh)}<br>{mean:.4f}", *words],
                marker={
                    "color": look.colour,
                    "symbol": [look.point(15, 11)["symbol"], *["line-ew-open"] * len(fresh)],
                    "size": [15 if look.lead else 11, *[9] * len(fresh)], "line_width": 1.5,
                },
                error_y=dict(array=[half or 0.0, *[0.0] * len(fresh)], color=look.colour, width=5,
                             visible=bool(half)),
                hovertemplate="%{text}<extra></extra>",
            )
        )  # fmt: skip
        place += 1
    return found
