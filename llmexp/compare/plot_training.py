"""The figures over training: losses, and whatever else is in the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.curves import AXES, Curve, curve, downsample, lineage
from llmexp.compare.figures import own_keys
from llmexp.compare.plotting import GREY, Options, Plot, SettingStyle, looks, menus, packed, plot
from llmexp.compare.records import Result, Setting
from llmexp.metrics.keys import ROW_KEYS, is_of_named_set, title_of
from llmexp.metrics.plot import running_mean

POINTS = 600  # of a curve at most: about one per pixel
# of one quantity over all settings, so that 200 runs stay a page that can be mailed
POINTS_OF_ALL = 40_000
_MANY = 40  # settings at most behind whose losses the rows are shown too; of more they are a fog
LISTED = 50  # settings at most that the pointer lists; of more it tells the nearest one
SMOOTHED = 0.05  # share of the rows whose mean a train loss is
_OTHERS = ("grad_norm", "lr", "tokens_per_sec", "clip_coefficient", "val/bits_per_byte")
_CAPTION = (
    "Lines are train losses, each the mean over 5 % of the rows around it, with their rows pale "
    "behind them; validation is dashed. Later losses are those from a tenth of the steps on."
)
FORKS = " The rows of a fork's parents, up to its step, are thin and dotted."
_SEEDS = " A band spans the seeds, from the lowest to the highest; the line is their mean."
CLICK = " A click on a name hides its curves, a double click shows them alone."


@dataclass(frozen=True)
class Line:
    """Hold a trace, and where it lies on each axis."""

    trace: dict[str, Any]
    x: dict[str, np.ndarray]
    y: np.ndarray

    def along(self, axis: str) -> dict[str, str]:
        return packed(self.x.get(axis, np.zeros(0)))


def losses(c: Result) -> Plot | None:
    """Draw train and validation loss of every setting.

    The rows themselves stand pale behind what is smoothed.
    """
    lines = [line for e, look in looks(c).items() for line in _lines(c, e, look)]
    if not lines:
        return None
    axes = [a for a in AXES if any(a in line.x for line in lines)]
    axis = c.align if c.align in axes else axes[0]
    every, later = list(range(len(lines))), _later(lines)
    target = c.target.value if c.target and c.target.key in ("val/loss", "train/loss") else None
    over: Options = [
        (a.capitalize(), [{"x": [line.along(a) for line in lines]}, _axis(c, a, target), every])
        for a in axes
    ]
    ranges: Options = []
    for name, kind, span in (("later losses", "linear", later), ("all losses", "linear", None),
                             ("log-log", "log", None)):  # fmt: skip
        axes_of = {"xaxis.type": kind, "yaxis.type": kind, "xaxis.range": None, "yaxis.range": span}
        ranges.append((name, [{}, axes_of, [0]]))
    several, forks = any(len(e.runs) > 1 for e in c.settings), any(r.parent for r in c.runs)
    caption = _CAPTION + FORKS * forks + _SEEDS * several + CLICK * (len(c.settings) > 1)
    layout = _layout(c, axis, "Loss (nats per token)") | _axis(c, axis, target)
    layout |= {
        "yaxis.range": later,
        "updatemenus": menus((over, axes.index(axis)), (ranges, 0)),
        "hoverdistance": max(20, 600 // min(len(line.y) for line in lines)),
    }
    traces = [go.Scatter(x=line.along(axis), y=packed(line.y), **line.trace) for line in lines]
    return plot("losses", "Losses over training", traces, layout, caption)


def _points(c: Result) -> int:
    return min(POINTS, max(200, POINTS_OF_ALL // max(1, len(c.settings))))


def _lines(c: Result, setting: Setting, look: SettingStyle) -> list[Line]:
    """Return the lines of a setting: those of its parents, its train loss and its validation."""
    few = len(c.settings) <= _MANY
    group = dict(legendgroup=setting.name, showlegend=False, name=look.title)
    behind = {**group, "hoverinfo": "skip", "zorder": 0, "mode": "lines"}
    front = {**group, "zorder": 2 if look.lead else 1, "showlegend": len(c.settings) > 1}
    line = {"color": look.colour, "width": 1}
    lines = []
    for key in ("train/loss", "val/loss"):
        if (before := lineage(setting, key)) is not None:
            drawn = before.thinned(_points(c))
            dotted = {**behind, "line": {**line, "dash": "dot"}}
            lines.append(Line(dotted, drawn.x, drawn.mean))
    train, val = curve(setting, "train/loss"), curve(setting, "val/loss")
    if train is not None:
        kept = downsample(train.mean, _points(c))
        drawn = train.at(kept)
        if few:
            pale = {**behind, "line": line, "opacity": 0.22}
            lines.append(Line(pale, drawn.x, drawn.mean))
        smooth = running_mean(train.y, int(SMOOTHED * train.y.shape[-1]) // 2)[:, kept]
        hover = {
            "customdata": _evaluated(drawn, val),
            "hovertemplate": "train %{y:.4f}%{customdata}",
        }
        trace = {**front, **hover, "mode": "lines", "line": look.line(2.4, 1.3)}
        lines += _with_band(drawn, smooth, trace, behind, look)
        # the train loss has the key and the words
        front |= {"showlegend": False, "hoverinfo": "skip"}
    if val is not None:
        drawn = val.thinned(POINTS)
        marked = few and len(drawn.y[0]) <= 60
        trace = {
            "hovertemplate": "val %{y:.4f}" if train is None else None, **front,
            "mode": "lines+markers" if marked else "lines",
            "line": look.line(2.8, 1.6, dash="dash"), "marker": look.point(8, 5),
        }  # fmt: skip
        lines += _with_band(drawn, drawn.y, trace, behind, look)
    return lines


def _evaluated(train: Curve, val: Curve | None) -> list[str]:
    """Return for each row the last evaluation at or before it: nothing is interpolated."""
    if val is None:
        return [""] * len(train.y[0])
    at, mean = np.searchsorted(val.x["steps"], train.x["steps"], side="right") - 1, val.mean
    return [f", val {mean[k]:.4f}" if k >= 0 else "" for k in at]


def _with_band(
    drawn: Curve,
    y: np.ndarray,
    trace: dict[str, Any],
    behind: dict[str, Any],
    look: SettingStyle,
) -> list[Line]:
    """Return the mean over the seeds, behind it a band from the lowest to the highest."""
    mean = Line(trace, drawn.x, y.mean(axis=0))
    if len(y) < 2:
        return [mean]
    band = {**behind, "line": {"width": 0}, "fill": "toself", "fillcolor": look.colour + "2e"}
    around = {axis: np.concatenate([x, x[::-1]]) for axis, x in drawn.x.items()}
    return [Line(band, around, np.concatenate([y.max(axis=0), y.min(axis=0)[::-1]])), mean]


def _layout(c: Result, axis: str, title: str) -> dict[str, Any]:
    count = len(c.settings)
    return {
        **_axis(c, axis),
        "yaxis.title.text": title,
        "hovermode": "x unified" if count <= LISTED else "closest",
        "height": max(440, min(1020, 100 + 19 * count)),
        "legend": dict(x=1.01, y=1, font_size=12 if count <= 20 else 10.5, traceorder="normal"),
    }


def _axis(c: Result, axis: str, target: float | None = None) -> dict[str, Any]:
    """Return an axis, with a line where the runs are compared, and one at the target."""
    place: dict[str, Any] = {}
    if target is not None:
        place = dict(x0=0, x1=1, xref="paper", y0=target, y1=target)
    elif axis == c.align and c.align_at is not None and len(c.settings) > 1:
        place = dict(x0=c.align_at, x1=c.align_at, y0=0, y1=1, yref="paper")
    stroke = {"dash": "dot", "color": GREY, "width": 1}
    return {
        "xaxis.title.text": AXES[axis],
        "xaxis.hoverformat": ",.1f" if axis == "time" else ",.0f",
        "xaxis.range": None,
        "shapes": [dict(type="line", line=stroke, **place)] if place else [],
    }


def _later(lines: Sequence[Line]) -> list[float]:
    """Return the lowest and the highest loss after a tenth of the steps.

    Those before would press the others flat.
    """
    later = [line.y[line.x["steps"] >= line.x["steps"].max() / 10] for line in lines]
    values = np.concatenate(later)
    low, high = float(values.min()), float(values.max())
    pad = 0.05 * (high - low) or 0.05
    return [low - pad, high + pad]


def other_quantities(c: Result) -> Plot | None:
    """Return one quantity at a time, as it was logged, over the axis of the comparison."""
    options: Options = []
    nothing = Curve({"steps": np.zeros(0)}, np.zeros((1, 0)))
    named = sorted({key for r in c.runs for key in filter(is_of_named_set, r.columns)})
    own = sorted({key for r in c.runs for key in own_keys(r)})
    sorted_by = [c.key] if c.key in ROW_KEYS else []
    for key in dict.fromkeys((*_OTHERS, *named, *own, *sorted_by)):
        found = [curve(e, key) or nothing for e in c.settings]
        if any(each is not nothing for each in found):
            drawn = [each.thinned(_points(c)) for each in found]
            x = [packed(each.x.get(c.align, each.x["steps"])) for each in drawn]
            data = {"x": x, "y": [packed(each.mean) for each in drawn]}
            title = ROW_KEYS[key].plot or ROW_KEYS[key].label if key in ROW_KEYS else key
            title = title_of(key) if is_of_named_set(key) else title
            layout = {"yaxis.title.text": title, "yaxis.range": None}
            options.append((title, [data, layout, list(range(len(drawn)))]))
    if not options:
        return None
    title, (first, *_) = options[0]
    traces = [
        go.Scatter(
            x=x, y=y, mode="lines", name=look.title, hovertemplate="%{y:.5~g}",
            zorder=int(look.lead), line=look.line(2.4, 1.3), showlegend=len(c.settings) > 1,
        )
        for x, y, look in zip(first["x"], first["y"], looks(c).values(), strict=True)
    ]  # fmt: skip
    layout = _layout(c, c.align, title) | {"updatemenus": menus((options, 0))}
    return plot("others", "Other quantities over training", traces, layout)
