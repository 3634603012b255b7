"""Write the answer as an HTML page: losses over their axes, contours, runs about the law."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.document import (
    ABOVE,
    GREY,
    TEN_COLOURS,
    Cell,
    Plot,
    Row,
    Section,
    document,
    packed,
    palette,
    plot,
    text,
)
from llmexp.config.labels import plural
from llmexp.scaling import words
from llmexp.scaling.answer import Fits
from llmexp.scaling.gain import Gain
from llmexp.scaling.isoflop import Parabolas
from llmexp.scaling.law import Estimate, Law, Surface
from llmexp.scaling.words import big, bracketed, flops_text, table_of

CURVE = 60  # places of a curve
FRONT = 25  # places of a frontier, each with an interval
HOVER = "<b>%{text}</b><br>%{xaxis.title.text} %{x:.3s}<br>%{yaxis.title.text} %{y:.5~g}"


def page(a: Fits) -> str:
    """Return the page with everything inside."""
    runs = sum(len(law.losses) for law in a.laws)
    return document(
        list(_sections(a)),
        title=f"Scaling laws of {plural(runs, 'run')}",
        about=" · ".join(law.ladder.name for law in a.laws), headline=words.headline(a),
        notes=words.notes(a), why=words.reasons(a), problems=a.problems,
    )  # fmt: skip


def _sections(a: Fits) -> Iterator[Section]:
    """Yield the parts of the page: figures, and a table of each law."""
    over: dict[str, list[Law]] = {}
    for law in a.laws:
        over.setdefault(law.axis, []).append(law)
    yield Section("gain", "Compute at equal loss", [_gains(a.gains)] if a.gains else [])
    yield Section("laws", "The loss", [_losses(axis, laws) for axis, laws in over.items()])
    yield Section("isoflop", "Loss over size", [_isoflops(s, a.parabolas[s]) for s in a.surfaces])
    yield Section("contours", "Over size and tokens", [_contours(s) for s in a.surfaces])
    yield Section("residuals", "Runs about the law", [_residuals(law) for law in a.laws])
    for number, law in enumerate(a.laws):
        first, *others = table_of(law)
        colours = ["transparent"] * len(first.cells)
        if isinstance(law, Surface) and len(law.rungs) <= len(colours):
            colours[: len(law.rungs)] = palette(len(law.rungs))
        cells = map(list, zip(*(map(Cell, k.cells, k.values) for k in others), strict=True))
        rows = list(map(Row, colours, first.cells, cells))
        title = law.ladder.name if len(a.laws) > 1 else "Figures"
        yield Section(f"table-{number}", title, (), [k.title for k in (first, *others)], rows)


def _losses(axis: str, laws: Sequence[Law]) -> Plot:
    """Draw the loss of each law at best over its axis, with the runs and the prediction."""
    traces: list[Any] = []
    for law, colour in zip(laws, TEN_COLOURS * len(laws), strict=False):
        name, at = law.ladder.name, law.target
        traces.append(_marks(law.x, law.losses, _names(law), colour, name, marker_size=5))
        if not law.edge:
            along = np.geomspace(law.ends[0][0], max(law.ends[1][0], at or 0), FRONT)
            traces += _band(along, [law.loss_at(v) for v in along], colour, name)
        if at is not None and not law.edge:
            traces.append(_star(at, law.loss_at(at), "prediction", colour, name))
    caption = (
        "Dots: runs. Line and band: the law, of a surface at the best size, with the 95 % "
        "interval. A star: the prediction."
    )
    x = [v for law in laws for v in (*law.x, law.target or law.x[0])]
    y = {"title_text": laws[0].ladder.loss, "type": "log"}
    return _plot(f"law-{axis}", f"loss over {text(axis)}", traces, caption, _log(x, axis), y)


def _isoflops(s: Surface, beside: Parabolas | None) -> Plot:
    """Draw loss over size of each rung: runs, the law, its best size, and the parabola."""
    traces: list[Any] = []
    curves = {p.flops: p.curve for p in beside.minima} if beside else {}
    for rung, best, colour in zip(s.rungs, s.places, palette(len(s.rungs)), strict=True):
        n, budget = s.sizes[rung.runs], rung.what == "budget"
        name = flops_text(best.flops) if budget else big(float(n[0]))
        runs = [s.points[i].name for i in rung.runs]
        traces.append(_marks(n, s.losses[rung.runs], runs, colour, name, showlegend=True))
        if not budget:
            continue
        x = _around(n, 0.2)
        law = s.at(x, rung.compute - s.frontier.price.at(x))
        traces.append(_line(np.exp(x), law, colour, name))
        if best.flops in curves:
            law = np.polyval(curves[best.flops], x)
            traces.append(_line(np.exp(x), law, colour, name, "dot"))
        if not s.edge:
            traces.append(_star(best.parameters, best.loss.value, "best size", colour, name))
    caption = (
        "Dots: runs, a colour for each budget. Lines: the law; a star is its best size, with the "
        "95 % interval. Dotted: the parabola of the budget."
    )
    axes = _log(s.sizes, "parameters"), {"title_text": s.ladder.loss}
    return _plot("isoflop", "loss over size", traces, caption, *axes, s)


def _contours(s: Surface) -> Plot:
    """Draw the losses of the law over size and tokens, with the runs and the best sizes."""
    x, y = _around(s.tokens, 0.4), _around(s.sizes, 0.4)
    tokens, sizes = np.meshgrid(x, y)
    z = s.at(sizes.ravel(), tokens.ravel()).reshape(CURVE, CURVE)
    rungs = zip(s.rungs, palette(len(s.rungs)), strict=True)
    of_runs = {i: colour for rung, colour in rungs for i in rung.runs}
    traces = [
        go.Contour(
            x=np.exp(x), y=np.exp(y), z=z, ncontours=16, showscale=False, line_width=1,
            contours={"coloring": "lines", "showlabels": True, "labelfont": {"size": 10}},
            colorscale=[[0, GREY], [1, GREY]], hoverinfo="skip",
        ),
        _marks(s.tokens, s.sizes, _names(s), [of_runs.get(i, GREY) for i in range(len(s.sizes))]),
    ]  # fmt: skip
    if not s.edge:
        c, f = np.linspace(*s.span, FRONT), s.frontier
        d, n = (np.exp([find(v)[0] for v in c]) for find in (f.tokens, f.sizes))
        traces.append(_line(d, n, TEN_COLOURS[0]))
    caption = "Thin lines: equal loss by the law. Dots: runs. A thick line: the best sizes."
    axes = _log(np.exp(x), "tokens"), _log(np.exp(y), "parameters")
    return _plot("contours", "loss over size and tokens", traces, caption, *axes, s)


def _residuals(law: Law) -> Plot:
    """Draw by how many percent each run lies above the law."""
    traces = [_marks(law.x, 100 * law.rest, _names(law), TEN_COLOURS[0])]
    caption = f"They lie {law.ensemble.noise:.2%} from the law (standard deviation)."
    y = {"title_text": "above the law, %", "zeroline": True}
    return _plot("residuals", "runs about the law", traces, caption, _log(law.x, law.axis), y, law)


def _gains(found: Sequence[Gain]) -> Plot:
    """Draw the compute that each change needs over that of the baseline."""
    traces: list[Any] = []
    for g, colour in zip(found, TEN_COLOURS[1:] * len(found), strict=False):
        traces += _band([n.flops for n in g.curve], [n.ratio for n in g.curve], colour, g.change)
    baseline = text(found[0].baseline, 40)
    x = _log([n.flops for g in found for n in g.curve], f"FLOPs of {baseline}")
    y = {"title_text": f"compute, of {baseline}'s", "type": "log"}
    caption = (
        f"The compute that a change needs for the loss that {baseline} has at its best, as a "
        "multiple, with the 95 % interval. Below the dotted line it saves compute."
    )
    one = _plot("gain", "Compute at equal loss", traces, caption, x, y)
    one.figure.add_hline(1, line={"color": GREY, "width": 1.2, "dash": "dot"})
    return one


def _plot(
    name: str, title: str, traces: list[Any], caption: str, x: Any, y: Any, law: Law | None = None
) -> Plot:
    """Return a figure, of one law or of all."""
    if law:
        name, title = f"{name}-{law.ladder.name}", f"{text(law.ladder.name)}: {title}"
    name = "".join(ch if ch.isalnum() else "-" for ch in name)
    how: dict[str, Any] = {"height": 420, "margin_t": 60, "legend": ABOVE}
    return plot(name, title, traces, caption, xaxis=x, yaxis=y, **how)


def _log(values: Any, title: str) -> dict[str, Any]:
    """Return a logarithmic axis that has a tick or two."""
    wide = math.log10(float(np.max(values)) / float(np.min(values))) > 2.5
    ticks = {"dtick": 1 if wide else "D2", "tickfont_size": 11, "exponentformat": "power"}
    return {"title_text": text(title), "type": "log", **ticks}


def _around(values: np.ndarray, more: float) -> np.ndarray:
    """Return places of a curve over logs of values, and a little further."""
    return np.linspace(math.log(values.min()) - more, math.log(values.max()) + more, CURVE)


def _names(law: Law) -> list[str]:
    return [p.name for p in law.points]


def _line(x: Any, y: Any, colour: str, group: str = "", dash: str = "solid") -> go.Scatter:
    line = {"color": colour, "width": 1.6, "dash": dash}
    how: dict[str, Any] = {"mode": "lines", "hoverinfo": "skip", "showlegend": False}
    return go.Scatter(x=packed(x), y=packed(y), legendgroup=group, line=line, **how)


def _marks(
    x: Any, y: Any, names: Iterable[str], colour: Any, group: str = "", **more: Any
) -> go.Scatter:
    """Return marks with their names, of a group of the legend."""
    how: dict[str, Any] = {"mode": "markers", "showlegend": False, "marker_size": 7} | more
    tips = {"text": list(map(text, names)), "hovertemplate": f"{HOVER}<extra></extra>"}
    of = {"name": text(group, 40), "legendgroup": group, "marker_color": colour}
    return go.Scatter(x=x, y=y, **of, **tips, **how)


def _star(x: Any, y: Any, name: str, colour: str, group: str) -> go.Scatter:
    """Return a star, with the interval of what is an estimate."""
    more: dict[str, Any] = {"marker_size": 13, "marker_symbol": "star"}
    for axis, e in (("x", x), ("y", y)):
        if isinstance(e, Estimate):
            ends = {"array": [e.high - e.value], "arrayminus": [e.value - e.low]}
            more[f"error_{axis}"] = {"symmetric": False, "color": colour, "width": 4, **ends}
    at_x, at_y = ([getattr(v, "value", v)] for v in (x, y))
    return _marks(at_x, at_y, [name], colour, group, **more)


def _band(x: Any, found: Sequence[Estimate], colour: str, name: str) -> list[Any]:
    """Return a line with its interval as a band, where that has an end."""
    whole = [(v, e) for v, e in zip(x, found, strict=True) if math.isfinite(e.low + e.high)]
    places, shown = [v for v, _ in whole], [e for _, e in whole]
    ends = [e.high for e in shown] + [e.low for e in shown[::-1]]
    band = _line(places + places[::-1], ends, colour, name)
    band.update(fill="toself", fillcolor=f"{colour}2e", line_width=0)
    more = {"mode": "lines", "showlegend": True, "line": {"color": colour, "width": 2.2}}
    values = np.array([e.value for e in shown])
    return [band, _marks(places, values, map(bracketed, shown), colour, name, **more)]
