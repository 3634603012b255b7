"""Draw quantities over training: the losses, and whatever else is in the rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.document import GREY, Options, Plot, menus, packed, plot, styles
from llmexp.compare.figures import broken, own_keys
from llmexp.compare.position import of_rows
from llmexp.compare.reading import finite
from llmexp.compare.records import Result, Setting
from llmexp.metrics.keys import ROW_KEYS, is_of_named_set, title_of
from llmexp.metrics.plot import running_mean

AXES = {"tokens": "Tokens seen", "steps": "Steps", "time": "Training time (s)"}
POINTS = 600  # of a curve at most: about one per pixel
# of one quantity over all settings, so that 200 runs stay a page that can be mailed
_POINTS_OF_ALL = 30_000
_MANY = 40  # settings at most behind whose losses the rows are shown too; of more they are a fog
LISTED = 50  # settings at most that the pointer lists; of more it tells the nearest one
SMOOTHED = 0.05  # share of the rows whose mean a train loss is
_OTHERS = ("grad_norm", "lr", "tokens_per_sec", "clip_coefficient", "val/bits_per_byte")
_CAPTION = (
    "Lines are train losses, smoothed over 5 % of the rows, with the rows pale behind them; "
    "validation is dashed, a fork's parents thin and dotted. A band spans the seeds; "
    "the line is their mean. Later losses are those from a tenth of the steps on. A click on a "
    "name hides its curves, a double click shows them alone."
)


class Curve(NamedTuple):
    """The rows that all runs of a setting have."""

    x: Mapping[str, np.ndarray]  # by axis
    y: np.ndarray  # [runs, rows], finite

    @property
    def place(self) -> np.ndarray:
        """Return where the rows lie, in steps where these are known."""
        return self.x.get("steps", next(iter(self.x.values())))

    def at(self, rows: np.ndarray) -> Curve:
        return Curve({axis: x[rows] for axis, x in self.x.items()}, self.y[:, rows])


def curve(setting: Setting, key: str) -> Curve | None:
    """Return the quantity over the steps that the runs share; None where none has it."""
    alive = [r for r in setting.runs if not broken(r)] or list(setting.runs)
    runs = [r for r in alive if len(finite(r.columns, key))]
    if not runs or any(r.foreign and len(r.columns["step"]) < 2 for r in runs):
        return None
    places = {r: r.columns["step"] for r in runs}
    for r in (r for r in runs if r.foreign):
        places[r] = r.steps.get("steps", r.steps.get("tokens", places[r]))
    steps_of = [places[r][np.isfinite(r.columns[key])] for r in runs]
    steps = functools.reduce(np.intersect1d, steps_of)
    if not len(steps):
        runs, steps = runs[:1], steps_of[0]
    rows = [(r, np.searchsorted(places[r], steps)) for r in runs]
    x = {
        axis: np.mean([of_rows(r, axis)[at] for r, at in rows], axis=0)
        for axis in AXES
        if all(len(of_rows(r, axis)) for r in runs)
    }
    return Curve(x or {"steps": steps}, np.stack([r.columns[key][at] for r, at in rows]))


def lineage(setting: Setting, key: str) -> Curve | None:
    """Return the quantity over the rows of a fork's parents, up to the first row of its own.

    None for a run that is no fork.
    """
    runs = [r for r in setting.runs if r.parent and len(r.before.get(key, ()))]
    parents = [replace(r, columns=r.before, facts={**r.facts, "parent": None}) for r in runs]
    own, found = curve(setting, key), curve(replace(setting, runs=tuple(parents)), key)
    if own is None or found is None:
        return None
    x = {a: np.append(found.x[a], own.x[a][0]) for a in found.x.keys() & own.x.keys()}
    return Curve(x, np.append(found.y.mean(axis=0), own.y[:, 0].mean())[None])


def downsample(y: np.ndarray, limit: int) -> np.ndarray:
    """Return indices of at most `limit` (>= 4) known values with which a curve looks as before.

    They ascend: the known values are cut into runs of equal length; of each its lowest and highest
    stay, and the first and the last value of all. So every spike stays visible, at the place where
    it was. What is not finite is left out.
    """
    known = np.flatnonzero(np.isfinite(y))
    if len(known) <= limit:
        return known
    inner = known[1:-1]
    width = -(-len(inner) // ((limit - 2) // 2))
    # The last bucket is filled up with its own last value, which changes neither its minimum nor
    # its maximum.
    buckets = np.pad(inner, (0, -len(inner) % width), mode="edge").reshape(-1, width)
    rows = np.arange(len(buckets))
    ends = [buckets[rows, pick(y[buckets], axis=1)] for pick in (np.argmin, np.argmax)]
    return np.unique(np.concatenate([known[:1], *ends, known[-1:]]))


Line = tuple[dict[str, Any], Curve]  # a trace, and where it lies on each axis


def _points(c: Result) -> int:
    return min(POINTS, max(200, _POINTS_OF_ALL // max(1, len(c.settings))))


def losses(c: Result) -> list[Plot]:
    """Draw train and validation loss of every setting, over an axis that a menu chooses."""
    lines = [line for s, (colour, name) in styles(c).items() for line in _lines(c, s, colour, name)]
    if not lines:
        return []
    axes = [a for a in dict.fromkeys((c.align, *AXES)) if any(a in of.x for _, of in lines)]
    over: Options = []
    for axis in axes:
        x = [packed(of.x.get(axis, np.zeros(0))) for _, of in lines]
        over.append((AXES[axis], [{"x": x}, _along(c, axis), list(range(len(lines)))]))
    # those before would press the others flat
    later = [of.y[0][of.place >= of.place.max() / 10] for _, of in lines]
    low, high = float(min(map(np.min, later))), float(max(map(np.max, later)))
    pad = 0.05 * (high - low) or 0.05
    ranges: Options = []
    for name, kind, span in (("later losses", "linear", [low - pad, high + pad]),
                             ("all losses", "linear", None), ("log-log", "log", None)):  # fmt: skip
        axes_of = {"xaxis.type": kind, "yaxis.type": kind, "xaxis.range": None, "yaxis.range": span}
        ranges.append((name, [{}, axes_of, [0]]))
    layout = {
        **_layout(c, c.metric.title if c.foreign else "Loss (nats per token)"),
        **over[0][1][1],
        "yaxis.range": [low - pad, high + pad],
        "updatemenus": menus(over, ranges),
        "hoverdistance": -1,
    }
    first = zip(over[0][1][0]["x"], lines, strict=True)
    traces = [go.Scatter(x=x, y=packed(of.y[0]), **trace) for x, (trace, of) in first]
    caption = _CAPTION[_CAPTION.index("A band") :] if c.foreign else _CAPTION
    return [plot("losses", "Losses over training", traces, caption, **layout)]


def _lines(c: Result, s: Setting, colour: str, name: str) -> Iterator[Line]:
    """Yield the lines of a setting: those of its parents, its train loss and its validation.

    Each lies behind those that follow; the rows themselves stand pale behind what is smoothed.
    """
    few = len(c.settings) <= _MANY
    group = dict(legendgroup=s.name, name=name, showlegend=False, mode="lines")
    behind = {**group, "hoverinfo": "skip", "zorder": 0, "line": {"color": colour, "width": 1}}
    front = {**group, "zorder": 1 + s.leads, "showlegend": len(c.settings) > 1}
    bold = {"color": colour, "width": 2.4 if s.leads else 1.3}
    for key in ("train/loss", "val/loss"):
        if (before := lineage(s, key)) is not None:
            dotted = {**behind, "line": {"color": colour, "width": 1, "dash": "dot"}}
            yield dotted, before.at(downsample(before.y[0], _points(c)))
    train = None if s.runs[0].foreign else curve(s, "train/loss")
    val = curve(s, s.runs[0].measured)
    if train is not None:
        kept = downsample(train.y.mean(axis=0), _points(c))
        drawn, whole = train.at(kept), train.y
        if few:
            yield {**behind, "opacity": 0.22}, drawn._replace(y=drawn.y.mean(axis=0)[None])
        smooth = running_mean(whole, int(SMOOTHED * whole.shape[-1]) // 2)[:, kept]
        seen = [""] * len(kept)
        if val is not None:  # the last evaluation at or before a row: nothing is interpolated
            at = np.searchsorted(val.place, drawn.place, side="right") - 1
            mean = val.y.mean(axis=0)
            seen = [f", val {mean[k]:.4f}" if k >= 0 else "" for k in at]
        hover = {"customdata": seen, "hovertemplate": "train %{y:.4f}%{customdata}"}
        yield from _with_band(Curve(drawn.x, smooth), {**front, **hover, "line": bold}, behind)
        # the train loss has the key and the words
        front |= {"showlegend": False, "hoverinfo": "skip"}
    if val is not None:
        drawn = val.at(downsample(val.y.mean(axis=0), POINTS))
        trace = {**front, "line": bold | {"dash": "dash"}, "marker": {"color": colour, "size": 5}}
        what = "" if s.runs[0].foreign else "val "
        trace |= {"hovertemplate": f"{what}%{{y:.4f}}"} if train is None else {}
        if few and len(drawn.y[0]) <= 60:
            trace["mode"] = "lines+markers"
        yield from _with_band(drawn, trace, behind)


def _with_band(drawn: Curve, trace: dict[str, Any], behind: dict[str, Any]) -> Iterator[Line]:
    """Yield a band from the lowest to the highest of several seeds, and their mean."""
    if len(drawn.y) > 1:
        fill = {"fill": "toself", "fillcolor": f"{behind['line']['color']}2e", "line": {"width": 0}}
        around = {axis: np.concatenate([x, x[::-1]]) for axis, x in drawn.x.items()}
        ends = np.concatenate([drawn.y.max(axis=0), drawn.y.min(axis=0)[::-1]])
        yield behind | fill, Curve(around, ends[None])
    yield trace, drawn._replace(y=drawn.y.mean(axis=0)[None])


def _layout(c: Result, title: str) -> dict[str, Any]:
    count = len(c.settings)
    return {
        **_along(c, c.align),
        "yaxis.title.text": title,
        "hovermode": "x unified" if count <= LISTED else "closest",
        "height": max(440, min(1020, 100 + 19 * count)),
        "legend": dict(x=1.01, y=1, font_size=12 if count <= 20 else 10.5, traceorder="normal"),
    }


def _along(c: Result, axis: str) -> dict[str, Any]:
    """Return an axis, with a line where the runs are compared, or at the target."""
    place = {}
    if c.target and c.target.key in ("val/loss", "train/loss", c.settings[0].runs[0].measured):
        place = dict(x0=0, x1=1, xref="paper", y0=c.target.value, y1=c.target.value)
    elif axis == c.align and c.align_at is not None and len(c.settings) > 1:
        place = dict(x0=c.align_at, x1=c.align_at, y0=0, y1=1, yref="paper")
    stroke = {"dash": "dot", "color": GREY, "width": 1}
    return {
        "xaxis.title.text": AXES[axis],
        "xaxis.hoverformat": ",.1f" if axis == "time" else ",.0f",
        "xaxis.range": None,
        "shapes": [dict(type="line", line=stroke, **place)] * bool(place),
    }


def quantities(c: Result) -> list[Plot]:
    """Draw one quantity at a time, as it was logged, over the axis of the comparison."""
    traces, titles, looks = list[go.Scatter](), list[str](), styles(c)
    more = {key for r in c.runs for key in (*filter(is_of_named_set, r.columns), *own_keys(r))}
    for key in dict.fromkeys((*_OTHERS, *sorted(more), *[c.key] * (c.key in ROW_KEYS))):
        title = title_of(key) if is_of_named_set(key) else key
        if key in ROW_KEYS:
            title = ROW_KEYS[key].plot or ROW_KEYS[key].label
        for s, (colour, name) in looks.items():
            if (of := curve(s, key)) is None:
                continue
            of = of.at(downsample(of.y.mean(axis=0), _points(c)))
            titles.append(title)
            traces.append(
                go.Scatter(
                    x=packed(of.x.get(c.align, of.place)),
                    y=packed(of.y.mean(axis=0)),
                    mode="lines",
                    name=name,
                    visible=title == titles[0],
                    hovertemplate="%{y:.5~g}",
                    zorder=int(s.leads),
                    showlegend=len(c.settings) > 1,
                    line={"color": colour, "width": 2.4 if s.leads else 1.3},
                )
            )
    options = []
    for title in dict.fromkeys(titles):
        axis = {"yaxis.title.text": title, "yaxis.range": None}
        options.append((title, [{"visible": [title == of for of in titles]}, axis]))
    if not options:
        return []
    layout = _layout(c, titles[0]) | {"updatemenus": menus(options)}
    return [plot("others", "Other quantities over training", traces, **layout)]
