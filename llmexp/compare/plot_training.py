"""The figures over training: losses, and whatever else is in the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.curves import AXES, Curve, curve, downsample, smooth
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
OTHERS = ("grad_norm", "lr", "tokens_per_sec", "clip_coefficient", "val/bits_per_byte")


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

    def along(self, axis: str) -> dict[str, str]:
        return packed(self.x.get(axis, np.zeros(0)))


def losses(c: Comparison) -> Plot | None:
    """Draw train and validation loss of every entry; the rows themselves stand pale behind what
    is smoothed."""
    lines = [line for e, look in looks(c).items() for line in _lines(c, e, look)]
    if not lines:
        return None
    axis = c.align if any(c.align in line.x for line in lines) else next(iter(lines[0].x))
    later = _later(lines)
    traces = [go.Scatter(x=line.along(axis), y=packed(line.usual), **line.trace) for line in lines]
    layout = {
        **_layout(c, axis, "Loss (nats per token)"),
        "yaxis.range": later,
        "hoverdistance": max(20, 600 // min(len(line.y[0]) for line in lines)),
    }
    caption = ""
    if any(len(e.runs) > 1 for e in c.entries):
        caption = "A band spans the seeds, from the lowest to the highest; the line is their mean. "
    if len(c.entries) > 1:
        caption += "A click on a name hides its curves, a double click shows them alone."
    return Plot(
        "losses",
        "Losses over training",
        traces + _keys(c, lines),
        layout,
        _small(c),
        {"axis": _over(c, lines, axis), "smoothing": _smoothing(lines), "range": _ranges(later)},
        caption,
    )


def _over(c: Comparison, lines: Sequence[Line], axis: str) -> Choice:
    axes = [a for a in AXES if any(a in line.x for line in lines)]
    every = list(range(len(lines)))
    options = [
        (AXES[a], [{"x": [line.along(a) for line in lines]}, _axis(c, a), every]) for a in axes
    ]
    return Choice("over", options, axes.index(axis))


def _smoothing(lines: Sequence[Line]) -> Choice:
    smoothed = {i: line for i, line in enumerate(lines) if len(line.y) > 1}
    options = []
    for k, share in enumerate(SMOOTHING):
        words = f"{share:.0%} of the rows" if share else "none"
        level = {"y": [packed(line.y[k]) for line in smoothed.values()]}
        options.append((words, [level, {}, list(smoothed)]))
    return Choice("smoothing", options, USUAL, slider=True)


def _ranges(later: list[float]) -> Choice:
    kinds = (
        ("from a tenth of the steps on", "linear", later),
        ("all", "linear", None),
        ("logarithmic", "log", None),
    )
    options = []
    for words, kind, span in kinds:
        axes = {"xaxis.type": kind, "yaxis.type": kind, "xaxis.range": None, "yaxis.range": span}
        options.append((words, [{}, axes, [0]]))
    return Choice("losses", options)


def points(c: Comparison) -> int:
    return min(POINTS, max(200, POINTS_OF_ALL // max(1, len(c.entries))))


def _lines(c: Comparison, entry: Entry, look: Look) -> list[Line]:
    few = len(c.entries) <= MANY
    train, val = curve(entry, "train/loss"), curve(entry, "val/loss")
    group = dict(legendgroup=entry.name, showlegend=False, name=look.title)
    behind = {**group, "hoverinfo": "skip", "zorder": 0, "mode": "lines"}
    band = {**behind, "line": {"width": 0}, "fill": "toself", "fillcolor": look.colour + "2e"}
    group["zorder"] = 2 if look.lead else 1
    lines = []
    if train is not None:
        kept = downsample(train.y.mean(axis=0), points(c))
        shown = train.at(kept)
        if few:
            pale = {**behind, "line": {"color": look.colour, "width": 1}, "opacity": 0.22}
            lines.append(Line(pale, shown.x, [shown.y.mean(axis=0)]))
        trace = {
            **group, "mode": "lines", "line": look.line(2.4, 1.3),
            "customdata": _evaluated(shown, val), "hovertemplate": "train %{y:.4f}%{customdata}",
        }  # fmt: skip
        levels = [smooth(train.y, share)[:, kept] for share in SMOOTHING]
        lines += _with_band(shown, levels, trace, band)
    if val is not None:
        shown = val.at(downsample(val.y.mean(axis=0), POINTS))
        marked = few and len(shown.y[0]) <= 60
        trace = {
            **group, "mode": "lines+markers" if marked else "lines",
            "line": look.line(2.8, 1.6, dash="dash"), "marker": look.point(8, 5),
        } | ({"hoverinfo": "skip"} if train else {"hovertemplate": "val %{y:.4f}"})  # fmt: skip
        lines += _with_band(shown, [shown.y], trace, band)
    return lines


def _evaluated(train: Curve, val: Curve | None) -> list[str]:
    """Return for each row the last evaluation at or before it: nothing is interpolated."""
    if val is None:
        return [""] * len(train.y[0])
    at = np.searchsorted(val.x["steps"], train.x["steps"], side="right") - 1
    return [f", val {val.y[:, k].mean():.4f}" if k >= 0 else "" for k in at]


def _with_band(
    shown: Curve, levels: Sequence[np.ndarray], trace: dict[str, Any], band: dict[str, Any]
) -> list[Line]:
    """Return the mean over the seeds, behind it a band from the lowest to the highest."""
    mean = Line(trace, shown.x, [level.mean(axis=0) for level in levels])
    if len(shown.y) < 2:
        return [mean]
    around = {axis: np.concatenate([x, x[::-1]]) for axis, x in shown.x.items()}
    ends = [np.concatenate([y.max(axis=0), y.min(axis=0)[::-1]]) for y in levels]
    return [Line(band, around, ends), mean]


def _keys(c: Comparison, lines: Sequence[Line]) -> list[go.Scatter]:
    """Return the legends: what the strokes mean, and a colour for each entry."""
    common = dict(x=[None], y=[None], hoverinfo="skip", mode="lines")
    traces = [line.trace for line in lines]
    strokes = [
        ("validation", {"line.dash": "dash"}, any("dash" in t["line"] for t in traces)),
        ("train, smoothed", {"line.dash": "solid"}, any(len(line.y) > 1 for line in lines)),
        ("train, each row", {"opacity": 0.35}, any("opacity" in t for t in traces)),
        ("compared here", {"line.dash": "dot", "line.width": 1}, bool(_here(c))),
    ]
    keys = [
        go.Scatter(**common, name=words, line_color=GREY, legend="legend2").update(stroke)
        for words, stroke, there in strokes
        if there
    ]
    for entry, look in looks(c).items() if len(c.entries) > 1 else ():
        title = f"<b>★ {look.title}</b>" if look.lead else look.title
        keys.append(go.Scatter(**common, name=title, line=look.line(4, 2), legendgroup=entry.name))
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
    """Put the names below on a phone, and make the figure as high as they need."""
    longest = max((len(look.title) for look in looks(c).values()), default=0)
    rows = -(-len(c.entries) // (2 if longest <= 14 else 1)) if len(c.entries) > 1 else 0
    legend = dict(orientation="h", x=0, y=-0.24, yanchor="top", traceorder="normal")
    return {
        "height": 350 + 19 * rows,
        "legend": {**legend, "maxheight": 19 * rows + 20},
        "margin": dict(l=8, r=8, t=50, b=50 + 19 * rows),
    }


def _axis(c: Comparison, axis: str) -> dict[str, Any]:
    return {
        "xaxis.title.text": AXES[axis],
        "xaxis.hoverformat": ",.1f" if axis == "time" else ",.0f",
        "xaxis.range": None,
        "shapes": _here(c) if axis == c.align else [],
    }


def _here(c: Comparison) -> list[dict[str, Any]]:
    """Return a line where the runs are compared."""
    if c.align_at is None or len(c.entries) < 2:
        return []
    place = dict(x0=c.align_at, x1=c.align_at, y0=0, y1=1, yref="paper")
    return [dict(type="line", line={"dash": "dot"}, **place)]


def _later(lines: Sequence[Line]) -> list[float]:
    """Return the lowest and the highest loss after a tenth of the steps: those before would press
    the others flat."""
    values = [line.usual[line.x["steps"] >= line.x["steps"].max() / 10] for line in lines]
    low, high = float(min(y.min() for y in values)), float(max(y.max() for y in values))
    pad = 0.05 * (high - low) or 0.05
    return [low - pad, high + pad]


def others(c: Comparison) -> Plot | None:
    """Return one quantity at a time, as it was logged, over the axis of the comparison."""
    options: list[tuple[str, list[Any]]] = []
    every = list(range(len(c.entries)))
    nothing = Curve({"steps": np.zeros(0)}, np.zeros((1, 0)))
    for key in OTHERS:
        found = [curve(e, key) or nothing for e in c.entries]
        shown = [each.at(downsample(each.y.mean(axis=0), points(c))) for each in found]
        data = {
            "x": [packed(each.x.get(c.align, each.x["steps"])) for each in shown],
            "y": [packed(each.y.mean(axis=0)) for each in shown],
        }
        if any(each is not nothing for each in found):
            layout = {"yaxis.title.text": KEYS[key].plot, "yaxis.range": None}
            options.append((KEYS[key].plot, [data, layout, every]))
    if not options:
        return None
    title, (first, *_) = options[0]
    traces = [
        go.Scatter(
            x=x, y=y, mode="lines", name=look.title, hovertemplate="%{y:.5~g}",
            zorder=int(look.lead), line=look.line(2.4, 1.3), showlegend=len(c.entries) > 1,
        )
        for x, y, look in zip(first["x"], first["y"], looks(c).values(), strict=True)
    ]  # fmt: skip
    choices = {"quantity": Choice("show", options)}
    layout = _layout(c, c.align, title)
    return Plot("others", "Other quantities over training", traces, layout, _small(c), choices)
