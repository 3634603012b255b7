"""Write the answer as an HTML page: loss over size and compute, contours, runs about the law."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.document import Row, Section, document
from llmexp.compare.plotting import ABOVE, GREY, TEN_COLOURS, Plot, packed, palette, plot, text
from llmexp.laws import words
from llmexp.laws.answer import Answer
from llmexp.laws.fitting import Surface
from llmexp.laws.gain import Gain
from llmexp.laws.isoflop import Parabolas
from llmexp.laws.law import Estimate, Law
from llmexp.laws.power import Power
from llmexp.laws.table import heads, table_rows
from llmexp.laws.words import big, bracketed, flops_text
from llmexp.settings.labels import plural

CURVE = 60  # places of a curve
FRONT = 25  # places of a frontier, each with an interval
HOVER = "<b>%{text}</b><br>%{xaxis.title.text} %{x:.3s}<br>%{yaxis.title.text} %{y:.5~g}"


def page(a: Answer) -> str:
    """Return the page with everything inside."""
    powers = [law for law in a.laws if isinstance(law, Power)]
    parts = [
        Section("gain", "Compute at equal loss", [_gains(a.gains)] if a.gains else []),
        Section("power", "The law", [_power(p) for p in powers]),
        Section("frontier", "The frontier", [_frontiers(a.surfaces)] if a.surfaces else []),
        Section("isoflop", "Loss over size", [_isoflops(s, a.parabolas[s]) for s in a.surfaces]),
        Section("contours", "Over size and tokens", [_contours(s) for s in a.surfaces]),
        Section("residuals", "Runs about the law", [_residuals(law) for law in a.laws]),
    ]
    for number, law in enumerate(a.laws):
        lines = table_rows(law)
        colours = ["transparent"] * len(lines)
        if isinstance(law, Surface) and len(law.rungs) <= len(lines):
            colours[: len(law.rungs)] = palette(len(law.rungs))
        named = [Row(c, line[0].text, line[1:]) for c, line in zip(colours, lines, strict=True)]
        title = law.ladder.name if len(a.laws) > 1 else "Figures"
        parts.append(Section(f"table-{number}", title, (), heads(law), named))
    runs = sum(len(law.losses) for law in a.laws)
    return document(
        [part for part in parts if part.plots or part.rows],
        title=f"Scaling laws of {plural(runs, 'run')}",
        about=" · ".join(law.ladder.name for law in a.laws), headline=words.headline(a),
        notes=words.notes(a), why=words.why(a), problems=a.problems,
    )  # fmt: skip


def _isoflops(s: Surface, beside: Parabolas | None) -> Plot:
    """Return loss over size of each rung: runs, the law, its best size, and the parabola."""
    traces: list[Any] = []
    curves = {p.flops: p.curve for p in beside.minima} if beside else {}
    for rung, best, colour in zip(s.rungs, s.optima, palette(len(s.rungs)), strict=True):
        n, budget = s.sizes[rung.runs], rung.what == "budget"
        name = flops_text(best.flops) if budget else big(float(n[0]))
        of = {"name": name, "legendgroup": name}
        runs = [s.ladder.points[i].name for i in rung.runs]
        traces.append(_dots(n, s.losses[rung.runs], runs, colour, **of, showlegend=True))
        if not budget:
            continue
        x = _around(n, 0.2)
        law = s.at(x, rung.compute - s.frontier.price.at(x))
        traces.append(_line(np.exp(x), law, colour, **of))
        if best.flops in curves:
            parabola = np.polyval(curves[best.flops], x)
            traces.append(_line(np.exp(x), parabola, colour, "dot", **of))
        if not s.edge:
            size, loss = best.parameters, best.loss.value
            bars = {"error_x": _bars(size, colour)}
            traces.append(_star(size.value, loss, "best size", colour, legendgroup=name, **bars))
    caption = (
        "Dots: runs, a colour for each budget. Lines: the law; a star is its best size, with the "
        "95 % interval. Dotted: the parabola of the budget."
    )
    axes = _log(s.sizes, "parameters"), _axis("val loss")
    return _plot("isoflop", "loss over size", traces, caption, *axes, s)


def _frontiers(surfaces: Sequence[Surface]) -> Plot:
    """Return the loss of the best size over compute, with the runs and the prediction."""
    traces: list[Any] = []
    caption = "Line and band: the loss of the best size, with the 95 % interval. Dots: runs."
    for s, colour in zip(surfaces, TEN_COLOURS * len(surfaces), strict=False):
        of, at, runs = {"legendgroup": s.ladder.name}, s.predicted, s.ladder.points
        pale = {"color": colour, "size": 5, "opacity": 0.45}
        traces.append(_dots(s.flops, s.losses, [p.name for p in runs], marker=pale, **of))
        if s.edge:
            continue
        c = np.linspace(s.span[0], max(s.span[1], math.log(at.flops)), FRONT)
        found = [Estimate.of(s.frontier.losses(v)) for v in c]
        traces += _band(np.exp(c), found, colour, s.ladder.name)
        if s.target is not None:
            bars, loss = {"error_y": _bars(at.loss, colour)}, at.loss.value
            traces.append(_star(at.flops, loss, "prediction", colour, **bars, **of))
            caption += "" if "Star" in caption else " Star: the prediction."
    compute = [v for s in surfaces for v in (*np.exp(s.span), s.predicted.flops)]
    axes = _log(compute, "FLOPs"), _axis("val loss", type="log", nticks=6)
    return _plot("frontier", "The frontier", traces, caption, *axes)


def _contours(s: Surface) -> Plot:
    """Return the losses of the law over size and tokens, with the runs and the best sizes."""
    x, y = _around(s.tokens, 0.4), _around(s.sizes, 0.4)
    tokens, sizes = np.meshgrid(x, y)
    z = s.at(sizes.ravel(), tokens.ravel()).reshape(CURVE, CURVE)
    colours = [GREY] * len(s.sizes)
    for rung, colour in zip(s.rungs, palette(len(s.rungs)), strict=True):
        for i in rung.runs:
            colours[i] = colour
    traces = [
        go.Contour(
            x=np.exp(x), y=np.exp(y), z=z, ncontours=16, showscale=False,
            contours={"coloring": "lines", "showlabels": True, "labelfont": {"size": 10}},
            line={"width": 1}, colorscale=[[0, GREY], [1, GREY]], hoverinfo="skip",
        ),
        _dots(s.tokens, s.sizes, [f"{p.name}, loss {p.loss:.4f}" for p in s.ladder.points],
              colours),
    ]  # fmt: skip
    caption = "Thin lines: equal loss by the law. Dots: runs."
    if not s.edge:
        d, n = ([f(c)[0] for c in np.linspace(*s.span, FRONT)]
                for f in (s.frontier.tokens, s.frontier.sizes))  # fmt: skip
        traces.append(_line(np.exp(d), np.exp(n), TEN_COLOURS[0]))
        caption += " Line: the best sizes."
    axes = _log(np.exp(x), "tokens"), _log(np.exp(y), "parameters")
    return _plot("contours", "loss over size and tokens", traces, caption, *axes, s)


def _residuals(law: Surface | Power) -> Plot:
    """Return by how many percent each run lies above the law."""
    if isinstance(law, Power):
        over, x, names = law.by, law.x, list(map(big, law.x))
    else:
        over, x, names = "FLOPs", law.flops, [p.name for p in law.ladder.points]
    traces = [_dots(x, 100 * law.rest, names, TEN_COLOURS[0])]
    caption = f"They lie {law.ensemble.noise:.2%} from the law (standard deviation)."
    axes = _log(x, text(over)), _axis("above the law, %", zeroline=True)
    return _plot("residuals", "runs about the law", traces, caption, *axes, law)


def _gains(found: Sequence[Gain]) -> Plot:
    """Return the compute that each change needs over that of the baseline."""
    traces: list[Any] = []
    for g, colour in zip(found, TEN_COLOURS[1:] * len(found), strict=False):
        traces += _band([n.flops for n in g.curve], [n.ratio for n in g.curve], colour, g.change)
    baseline = text(found[0].baseline, 40)
    x = _log([n.flops for g in found for n in g.curve], f"FLOPs of {baseline}")
    y = _axis(f"compute, of {baseline}'s", type="log", nticks=7)
    caption = (
        f"The compute that a change needs for the loss that {baseline} has at its best, as a "
        "multiple, with the 95 % interval. Below the dotted line it saves compute."
    )
    one = _plot("gain", "Compute at equal loss", traces, caption, x, y)
    one.figure.add_hline(1, line={"color": GREY, "width": 1.2, "dash": "dot"})
    return one


def _power(p: Power) -> Plot:
    """Return loss over the axis: runs, and the law with its interval, up to the prediction."""
    x = np.geomspace(p.x[0], max(p.x[-1], p.target or 0), FRONT)
    traces = _band(x, [p.loss_at(v) for v in x], TEN_COLOURS[0], p.ladder.name)
    traces.append(_dots(p.x, p.losses, map(big, p.x), TEN_COLOURS[0]))
    caption = "Dots: runs. Line and band: the law, with the 95 % interval."
    return _plot("power", "the law", traces, caption, _log(x, text(p.by)), _axis("val loss"), p)


def _plot(
    kind: str, title: str, traces: list[Any], caption: str, x: Any, y: Any, law: Law | None = None
) -> Plot:
    """Return a figure, of one law or of all."""
    layout = {"height": 420, "margin.t": 60, "legend": ABOVE, "xaxis": x, "yaxis": y}
    if law:
        kind += "-" + "".join(ch if ch.isalnum() else "-" for ch in law.ladder.name)
        title = f"{text(law.ladder.name)}: {title}"
    return plot(kind, title, traces, layout, caption)


def _log(values: Any, title: str) -> dict[str, Any]:
    """Return a logarithmic axis that has a tick or two."""
    wide = math.log10(float(np.max(values)) / float(np.min(values))) > 2.5
    tick = {"dtick": 1 if wide else "D2", "tickfont": {"size": 11}}
    return _axis(title, type="log", exponentformat="power", **tick)


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def _around(values: np.ndarray, more: float) -> np.ndarray:
    """Return places of a curve over logs of values, and a little further."""
    return np.linspace(math.log(values.min()) - more, math.log(values.max()) + more, CURVE)


def _dots(x: Any, y: Any, names: Iterable[str], colour: Any = None, **more: Any) -> Any:
    """Return marks with their names."""
    marks = {"mode": "markers", "marker": {"size": 7, "color": colour}, "showlegend": False}
    hover = {"text": list(map(text, names)), "hovertemplate": f"{HOVER}<extra></extra>"}
    return go.Scatter({"x": x, "y": y, **marks, **hover, **more})


def _star(x: float, y: float, name: str, colour: str, **more: Any) -> Any:
    marker = {"symbol": "star", "size": 13, "color": colour}
    return _dots([x], [y], [name], marker=marker, **more)


def _line(x: np.ndarray, y: np.ndarray, colour: str, dash: str = "solid", **more: Any) -> Any:
    return go.Scatter(
        x=packed(x), y=packed(y), mode="lines", showlegend=False, hoverinfo="skip",
        line={"color": colour, "width": 1.6, "dash": dash}, **more,
    )  # fmt: skip


def _bars(e: Estimate, colour: str) -> dict[str, Any]:
    return dict(type="data", symmetric=False, array=[e.high - e.value], color=colour,
                arrayminus=[e.value - e.low], thickness=1.4, width=4)  # fmt: skip


def _band(x: Any, found: Sequence[Estimate], colour: str, name: str) -> list[Any]:
    """Return a line with its interval as a band, where that has an end."""
    whole = [(v, e) for v, e in zip(x, found, strict=True) if math.isfinite(e.low + e.high)]
    places, shown = [v for v, _ in whole], [e for _, e in whole]
    ends = [e.high for e in shown] + [e.low for e in shown[::-1]]
    return [
        go.Scatter(
            x=places + places[::-1], y=ends, fill="toself", fillcolor=f"{colour}2e", mode="lines",
            line={"width": 0}, hoverinfo="skip", showlegend=False, legendgroup=name,
        ),
        go.Scatter(
            x=places, y=np.array([e.value for e in shown]), mode="lines", name=text(name, 40),
            legendgroup=name, line={"color": colour, "width": 2.2},
            text=list(map(bracketed, shown)), hovertemplate="%{x:.3g}: %{text}<extra></extra>",
        ),
    ]  # fmt: skip
