"""The figures over training: losses, and whatever else is in the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.curves import curve, downsample, smooth
from llmexp.compare.plotting import GREY, Choice, Look, Plot, looks, packed
from llmexp.compare.records import Comparison, Entry
from llmexp.metrics.keys import KEYS

POINTS = 600  # of a curve at most: about one per pixel
# of one quantity over all entries, so that 200 runs stay a page that can be mailed
POINTS_OF_ALL = 40_000
MANY = 40  # entries at most behind whose losses the rows are shown too; of more they are a fog
LISTED = 50  # entries at most that the pointer lists; of more it tells the nearest one
SMOOTHING = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)  # shares of the rows
USUAL = 3  # of these
AXES = {"tokens": "Tokens seen", "steps": "Steps", "time": "Training time (s)"}
OTHERS = ("grad_norm", "lr", "tokens_per_sec", "clip_coefficient", "val/bits_per_byte")
Options = list[tuple[str, list[Any]]]


@dataclass(frozen=True)
class Line:
    """A trace with what the controls change: where it lies on each axis, and how at each level of
    smoothing."""

    trace: dict[str, Any]
    x: dict[str, np.ndarray]
    y: Sequence[np.ndarray]  # one where it is never smoothed

    @property
    def usual(self) -> np.ndarray:
        return self.y[min(USUAL, len(self.y) - 1)]


def losses(c: Comparison) -> Plot | None:
    """Train and validation loss of every entry; the rows themselves stand pale behind what is
    smoothed."""
    lines = [
        line for e, look in zip(c.entries, looks(c), strict=True) for line in _lines(c, e, look)
    ]
    if not lines:
        return None
    axes = [axis for axis in AXES if any(axis in line.x for line in lines)]
    axis = c.align if c.align in axes else axes[0]
    every, smoothed = (
        list(range(len(lines))),
        [i for i, line in enumerate(lines) if len(line.y) > 1],
    )
    over: Options = [
        (
            AXES[a],
            [{"x": [packed(line.x.get(a, np.zeros(0))) for line in lines]}, _axis(c, a), every],
        )
        for a in axes
    ]
    words = [f"{share:.0%} of the rows" if share else "none" for share in SMOOTHING]
    levels: Options = [
        (word, [{"y": [packed(lines[i].y[k]) for i in smoothed]}, {}, smoothed])
        for k, word in enumerate(words)
    ]
    later = _later(lines)
    kinds = (
        ("from a tenth of the steps on", "linear", later),
        ("all", "linear", None),
        ("logarithmic", "log", None),
    )
    ranges: Options = [
        (
            word,
            [
                {},
                {"xaxis.type": kind, "yaxis.type": kind, "xaxis.range": None, "yaxis.range": span},
                [0],
            ],
        )
        for word, kind, span in kinds
    ]
    choices = {
        "axis": Choice("over", over, axes.index(axis)),
        "smoothing": Choice("smoothing", levels, USUAL, slider=True),
        "range": Choice("losses", ranges),
    }
    traces = [
        go.Scatter(x=packed(line.x.get(axis, np.zeros(0))), y=packed(line.usual), **line.trace)
        for line in lines
    ]
    layout = _layout(c, axis, "Loss (nats per token)")
    layout["yaxis.range"] = later
    layout["hoverdistance"] = max(20, 600 // min(len(line.y[0]) for line in lines))
    caption = (
        "A click on a name hides its curves, a double click shows them alone."
        if len(c.entries) > 1
        else ""
    )
    if any(len(e.runs) > 1 for e in c.entries):
        caption = (
            "A band spans the seeds, from the lowest to the highest; the line is their "
            f"mean. {caption}"
        )
    traces += _keys(c, lines)
    return Plot("losses", "Losses over training", traces, layout, _small(c), choices, caption)


def points(c: Comparison) -> int:
    return min(POINTS, max(200, POINTS_OF_ALL // max(1, len(c.entries))))


def _lines(c: Comparison, entry: Entry, look: Look) -> list[Line]:
    train, val = curve(entry, "train/loss"), curve(entry, "val/loss")
    few = len(c.entries) <= MANY
    group = dict(
        legendgroup=entry.name, showlegend=False, name=look.title, zorder=2 if look.lead else 1
    )
    behind = {**group, "hoverinfo": "skip", "zorder": 0, "mode": "lines"}
    band = {**behind, "line": {"width": 0}, "fill": "toself", "fillcolor": look.colour + "2e"}
    lines = []

    def with_band(
        kept: np.ndarray, x: dict[str, np.ndarray], levels: list[np.ndarray], trace: dict[str, Any]
    ) -> None:
        x = {axis: values[kept] for axis, values in x.items()}
        levels = [level[:, kept] for level in levels]
        if len(levels[0]) > 1:
            around = {axis: np.concatenate([values, values[::-1]]) for axis, values in x.items()}
            lines.append(
                Line(band, around, [np.concatenate([y.max(0), y.min(0)[::-1]]) for y in levels])
            )
        lines.append(Line(trace, x, [level.mean(axis=0) for level in levels]))

    if train is not None:
        kept = downsample(train.y.mean(axis=0), points(c))
        if few:
            pale = {**behind, "line": {"color": look.colour, "width": 1}, "opacity": 0.22}
            lines.append(
                Line(
                    pale,
                    {axis: x[kept] for axis, x in train.x.items()},
                    [train.y[:, kept].mean(axis=0)],
                )
            )
        there = [""] * len(kept)
        if val is not None:  # the last evaluation at or before the row: nothing is interpolated
            at = np.searchsorted(val.x["steps"], train.x["steps"][kept], side="right") - 1
            there = [f", val {val.y[:, k].mean():.4f}" if k >= 0 else "" for k in at]
        told = dict(customdata=there, hovertemplate="train %{y:.4f}%{customdata}")
        stroke = {"color": look.colour, "width": 2.4 if look.lead else 1.3}
        levels = [smooth(train.y, share) for share in SMOOTHING]
        with_band(kept, train.x, levels, {**group, "mode": "lines", "line": stroke, **told})
    if val is not None:
        kept = downsample(val.y.mean(axis=0), POINTS)
        stroke = {"color": look.colour, "width": 2.8 if look.lead else 1.6, "dash": "dash"}
        marker = {
            "color": look.colour,
            "size": 8 if look.lead else 5,
            "symbol": "star" if look.lead else "circle",
        }
        mode = "lines+markers" if few and len(kept) <= 60 else "lines"
        silent = {"hoverinfo": "skip"} if train is not None else {"hovertemplate": "val %{y:.4f}"}
        with_band(
            kept,
            val.x,
            [val.y],
            {**group, "mode": mode, "line": stroke, "marker": marker, **silent},
        )
    return lines


def _keys(c: Comparison, lines: Sequence[Line]) -> list[go.Scatter]:
    """Return the legends: what the strokes mean, and a colour for each entry."""
    strokes = {
        "validation": any(line.trace["line"].get("dash") for line in lines)
        and {"line.dash": "dash"},
        "train, smoothed": any(len(line.y) > 1 for line in lines) and {"line.dash": "solid"},
        "train, each row": any(line.trace.get("opacity") for line in lines) and {"opacity": 0.35},
        "compared here": bool(_here(c)) and {"line.dash": "dot", "line.width": 1},
    }
    common = dict(x=[None], y=[None], hoverinfo="skip", mode="lines")
    keys = [
        go.Scatter(**common, name=words, line_color=GREY, legend="legend2").update(stroke)
        for words, stroke in strokes.items()
        if stroke
    ]
    for entry, look in zip(c.entries, looks(c), strict=True) if len(c.entries) > 1 else []:
        stroke = {"color": look.colour, "width": 4 if look.lead else 2}
        title = f"<b>★ {look.title}</b>" if look.lead else look.title
        keys.append(go.Scatter(**common, name=title, line=stroke, legendgroup=entry.name))
    return keys


def _layout(c: Comparison, axis: str, title: str) -> dict[str, Any]:
    count = len(c.entries)
    return {
        **_axis(c, axis),
        "yaxis.title.text": title,
        "hovermode": "x unified" if count <= LISTED else "closest",
        "height": max(440, min(1020, 100 + 19 * count)),
        "margin": dict(l=8, r=12, t=34, b=8),
        "legend": dict(x=1.01, y=1, font_size=12 if count <= 20 else 10.5, traceorder="normal"),
        "legend2": dict(orientation="h", x=0, y=1, yanchor="bottom", itemclick=False),
    }


def _small(c: Comparison) -> dict[str, Any]:
    """On a phone the names stand below, and the figure becomes as high as they ask for."""
    longest = max((len(look.title) for look in looks(c)), default=0)
    rows = -(-len(c.entries) // (2 if longest <= 14 else 1)) if len(c.entries) > 1 else 0
    legend = dict(
        orientation="h", x=0, y=-0.24, yanchor="top", traceorder="normal", maxheight=19 * rows + 20
    )
    return {
        "height": 350 + 19 * rows,
        "legend": legend,
        "margin": dict(l=8, r=8, t=50, b=50 + 19 * rows),
    }


def _axis(c: Comparison, axis: str) -> dict[str, Any]:
    digits = ",.1f" if axis == "time" else ",.0f"
    shapes = _here(c) if axis == c.align else []
    return {
        "xaxis.title.text": AXES[axis],
        "xaxis.hoverformat": digits,
        "xaxis.range": None,
        "shapes": shapes,
    }


def _here(c: Comparison) -> list[dict[str, Any]]:
    """Return a line where the runs are compared."""
    line = dict(
        type="line", x0=c.align_at, x1=c.align_at, y0=0, y1=1, yref="paper", line={"dash": "dot"}
    )
    return [line] if c.align_at is not None and len(c.entries) > 1 else []


def _later(lines: Sequence[Line]) -> list[float]:
    """From the lowest to the highest loss after a tenth of the steps: those before would press the
    others flat."""
    values = [line.usual[line.x["steps"] >= line.x["steps"].max() / 10] for line in lines]
    low, high = float(min(y.min() for y in values)), float(max(y.max() for y in values))
    pad = 0.05 * (high - low) or 0.05
    return [low - pad, high + pad]


def others(c: Comparison) -> Plot | None:
    """Return one quantity at a time, as it was logged, over the axis of the comparison."""
    options: Options = []
    for key in OTHERS:
        title = KEYS[key].plot
        found = [curve(e, key) for e in c.entries]
        data: dict[str, list[Any]] = {"x": [], "y": []}
        for each in found:
            kept = downsample(each.y.mean(axis=0), points(c)) if each else np.zeros(0, int)
            data["x"].append(packed(each.x.get(c.align, each.x["steps"])[kept] if each else kept))
            data["y"].append(packed(each.y.mean(axis=0)[kept] if each else kept))
        if any(found):
            options.append(
                (
                    title,
                    [
                        data,
                        {"yaxis.title.text": title, "yaxis.range": None},
                        list(range(len(found))),
                    ],
                )
            )
    if not options:
        return None
    title, (first, *_) = options[0]
    traces = [
        go.Scatter(x=x, y=y, mode="lines", name=look.title, hovertemplate="%{y:.5~g}",
        zorder=int(look.lead),
                   line={"color": look.colour, "width": 2.4 if look.lead else 1.3},
                   showlegend=len(c.entries) > 1)
        for x, y, look in zip(first["x"], first["y"], looks(c), strict=True)
    ]  # fmt: skip
    choices = {"quantity": Choice("show", options)}
    return Plot(
        "others",
        "Other quantities over training",
        traces,
        _layout(c, c.align, title),
        _small(c),
        choices,
    )
