"""Draw laws: loss over size and over compute, contours, runs about the law, what a change needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.plotting import FEW, GREY, Plot, packed, palette, plot, text
from llmexp.laws.fitting import Surface
from llmexp.laws.gain import Gain
from llmexp.laws.isoflop import Parabolas
from llmexp.laws.law import Estimate
from llmexp.laws.power import Power
from llmexp.laws.words import big, flops_text, plain, sized

CURVE = 60  # places of a curve
FRONT = 25  # places of a frontier, each with an interval
STAR = {"symbol": "star", "size": 13}
LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}


def isoflops(s: Surface, beside: Parabolas | None) -> Plot:
    """Return loss over size of each rung: runs, the law, its best size, and the parabola."""
    traces: list[Any] = []
    curves = {p.flops: p.curve for p in beside.minima} if beside else {}
    for rung, best, colour in zip(s.rungs, s.optima, palette(len(s.rungs)), strict=True):
        n = s.sizes[rung.runs]
        name = flops_text(best.flops) if rung.what == "budget" else big(float(n[0]))
        of = {"name": name, "legendgroup": name}
        said = [_hover(s.ladder.points[i].name, f"N {big(s.sizes[i])}", _loss(s.losses[i]))
                for i in rung.runs]  # fmt: skip
        traces.append(_dots(n, s.losses[rung.runs], said, {"color": colour}, **of, showlegend=True))
        if rung.what != "budget":
            continue
        x = _around(n, 0.2)
        law = s.at(x, rung.compute - s.frontier.price.at(x))
        traces.append(_line(np.exp(x), law, colour, **of))
        if (curve := curves.get(best.flops)) is not None:
            traces.append(_line(np.exp(x), np.polyval(curve, x), colour, "dot", **of))
        if not s.edge:
            at = [best.parameters.value], [best.loss.value]
            said = [_hover("best size", sized(best.parameters), f"loss {plain(best.loss)}")]
            star = STAR | {"color": colour}
            traces.append(_dots(*at, said, star, error_x=_bars(best.parameters, colour), **of))
    caption = (
        "Dots: runs, a colour for each budget. Lines: the law; a star is its best size, with the "
        "95 % interval. Dotted: the parabola of the budget."
    )
    layout = _layout(460, s.sizes, "parameters", "val loss")
    return _of(s, "isoflop", "loss over size", traces, layout, caption)


def frontiers(surfaces: Sequence[Surface]) -> Plot:
    """Return the loss of the best size over compute, with the runs and the prediction."""
    traces: list[Any] = []
    for s, colour in zip(surfaces, FEW * len(surfaces), strict=False):
        of, at = {"legendgroup": s.ladder.name}, s.predicted
        if not s.edge:
            c = np.linspace(s.span[0], max(s.span[1], math.log(at.flops)), FRONT)
            found = [Estimate.of(s.frontier.losses(v)) for v in c]
            traces += _band(np.exp(c), found, colour, s.ladder.name)
        said = [_hover(p.name, f"{flops_text(p.flops)} FLOPs", _loss(p.loss))
                for p in s.ladder.points]  # fmt: skip
        pale = {"color": colour, "size": 5, "opacity": 0.45}
        traces.append(_dots(s.flops, s.losses, said, pale, **of))
        if s.target is not None and not s.edge:
            said = [_hover("prediction", plain(at.loss), sized(at.parameters, "parameters"))]
            star, bars = STAR | {"color": colour}, _bars(at.loss, colour)
            traces.append(_dots([at.flops], [at.loss.value], said, star, error_y=bars, **of))
    compute = np.array([v for s in surfaces for v in (*np.exp(s.span), s.predicted.flops)])
    layout = _layout(400, compute, "FLOPs", "val loss", yaxis={"type": "log", "nticks": 6})
    caption = "Line and band: the loss of the best size, with the 95 % interval. Dots: runs."
    if any(s.target and not s.edge for s in surfaces):
        caption += " Star: the prediction."
    return plot("frontier", "The frontier", traces, layout, caption)


def contours(s: Surface) -> Plot:
    """Return the losses of the law over size and tokens, with the runs and the best sizes."""
    x, y = _around(s.tokens, 0.4), _around(s.sizes, 0.4)
    tokens, sizes = np.meshgrid(x, y)
    z = s.at(sizes.ravel(), tokens.ravel()).reshape(CURVE, CURVE)
    colours = [GREY] * len(s.sizes)
    for rung, colour in zip(s.rungs, palette(len(s.rungs)), strict=True):
        for i in rung.runs:
            colours[i] = colour
    said = [_hover(p.name, f"N {big(n)}, D {big(p.tokens)}", _loss(p.loss))
            for p, n in zip(s.ladder.points, s.sizes, strict=True)]  # fmt: skip
    traces = [
        go.Contour(
            x=np.exp(x), y=np.exp(y), z=z, ncontours=16, showscale=False,
            contours={"coloring": "lines", "showlabels": True, "labelfont": {"size": 10}},
            line={"width": 1}, colorscale=[[0, GREY], [1, GREY]], hoverinfo="skip",
        ),
        _dots(s.tokens, s.sizes, said, {"color": colours}),
    ]  # fmt: skip
    if not s.edge:
        best = [[f(c)[0] for c in np.linspace(*s.span, FRONT)]
                for f in (s.frontier.tokens, s.frontier.sizes)]  # fmt: skip
        d, n = np.exp(best)
        traces.append(_line(d, n, FEW[0]))
    layout = _layout(440, np.exp(x), "tokens", yaxis=_axis(np.exp(y), "parameters"))
    caption = "Thin lines: equal loss by the law. Dots: runs."
    caption += "" if s.edge else " Line: the best sizes."
    return _of(s, "contours", "loss over size and tokens", traces, layout, caption)


def residuals(law: Surface | Power) -> Plot:
    """Return by how many percent each run lies above the law."""
    over, x = ("FLOPs", law.flops) if isinstance(law, Surface) else (law.by, law.x)
    names = [p.name for p in law.ladder.points] if isinstance(law, Surface) else map(big, law.x)
    rest = 100 * law.rest
    said = [_hover(name, f"{r:+.2f} %") for name, r in zip(names, rest, strict=True)]
    traces = [_dots(x, rest, said, {"color": FEW[0]})]
    layout = _layout(320, x, over, "above the law, %", yaxis={"zeroline": True})
    caption = f"They lie {law.ensemble.noise:.2%} from the law (standard deviation)."
    return _of(law, "residuals", "runs about the law", traces, layout, caption)


def gains(found: Sequence[Gain]) -> Plot:
    """Return the compute that each change needs over that of the baseline."""
    traces: list[Any] = []
    for g, colour in zip(found, FEW[1:] * len(found), strict=False):
        x = np.array([n.flops for n in g.curve])
        traces += _band(x, [n.ratio for n in g.curve], colour, g.change)
    compute = np.array([n.flops for g in found for n in g.curve])
    baseline = text(found[0].baseline, 40)
    layout = _layout(380, compute, f"FLOPs of {baseline}", f"compute, of {baseline}'s",
                     yaxis={"type": "log", "nticks": 7})  # fmt: skip
    one = dict(type="line", xref="paper", x0=0, x1=1, y0=1, y1=1)
    layout["shapes"] = [one | {"line": {"color": GREY, "width": 1.2, "dash": "dot"}}]
    caption = (
        f"The compute that a change needs for the loss that {baseline} has at its best, as a "
        "multiple, with the 95 % interval. Below the dotted line it saves compute."
    )
    return plot("gain", "Compute at equal loss", traces, layout, caption)


def power_curve(p: Power) -> Plot:
    """Return loss over the axis: runs, the law with its interval, the prediction."""
    x = np.geomspace(p.x[0], max(p.x[-1], p.target or 0), FRONT)
    traces = _band(x, [p.loss_at(v) for v in x], FEW[0], p.ladder.name)
    said = [_hover(big(v), _loss(y)) for v, y in zip(p.x, p.losses, strict=True)]
    traces.append(_dots(p.x, p.losses, said, {"color": FEW[0]}))
    layout = _layout(400, x, text(p.by), "val loss") | {"showlegend": False}
    caption = "Dots: runs. Line and band: the law, with the 95 % interval."
    return _of(p, "power", "the law", traces, layout, caption)


def _of(law: Surface | Power, kind: str, title: str, traces: list[Any], *words: Any) -> Plot:
    """Return a figure of one law."""
    name = "".join(ch if ch.isalnum() else "-" for ch in law.ladder.name)
    return plot(f"{kind}-{name}", f"{text(law.ladder.name)}: {title}", traces, *words)


def _layout(
    height: int, x: np.ndarray, over: str, of: str = "", yaxis: dict[str, Any] | None = None
) -> dict[str, Any]:
    y = {"title": {"text": of}} | (yaxis or {})
    return {"height": height, "xaxis": _axis(x, over), "yaxis": y, "legend": LEGEND, "margin.t": 50}


def _axis(values: np.ndarray, title: str) -> dict[str, Any]:
    """Return a logarithmic axis that has a tick or two."""
    wide = math.log10(float(np.max(values)) / float(np.min(values))) > 2.5
    return {"type": "log", "title": {"text": title}, "exponentformat": "power",
            "dtick": 1 if wide else "D2", "tickfont": {"size": 11}}  # fmt: skip


def _around(values: np.ndarray, more: float) -> np.ndarray:
    """Return places of a curve over logs of values, and a little further."""
    return np.linspace(math.log(values.min()) - more, math.log(values.max()) + more, CURVE)


def _hover(name: str, *lines: str) -> str:
    return "<br>".join([f"<b>{text(name)}</b>", *lines])


def _loss(value: float) -> str:
    return f"loss {value:.4f}"


def _dots(x: Any, y: Any, said: Sequence[str], marker: dict[str, Any], **more: Any) -> Any:
    """Return marks, each with what the pointer shows."""
    return go.Scatter({
        "x": x, "y": y, "text": said, "mode": "markers", "marker": {"size": 7} | marker,
        "hovertemplate": "%{text}<extra></extra>", "showlegend": False,
    } | more)  # fmt: skip


def _line(x: np.ndarray, y: np.ndarray, colour: str, dash: str = "solid", **more: Any) -> Any:
    return go.Scatter(
        x=packed(x), y=packed(y), mode="lines", showlegend=False, hoverinfo="skip",
        line={"color": colour, "width": 1.6, "dash": dash}, **more,
    )  # fmt: skip


def _bars(e: Estimate, colour: str) -> dict[str, Any]:
    return dict(type="data", symmetric=False, array=[e.high - e.value], color=colour,
                arrayminus=[e.value - e.low], thickness=1.4, width=4)  # fmt: skip


def _band(x: np.ndarray, found: Sequence[Estimate], colour: str, name: str) -> list[Any]:
    """Return a line with its interval as a band, where that has an end."""
    value, low, high = np.array([(e.value, e.low, e.high) for e in found]).T
    whole = np.isfinite(low) & np.isfinite(high)
    x, value, low, high = x[whole], value[whole], low[whole], high[whole]
    said = [plain(e) for e, shown in zip(found, whole, strict=True) if shown]
    return [
        go.Scatter(
            x=np.concatenate([x, x[::-1]]), y=np.concatenate([high, low[::-1]]), fill="toself",
            mode="lines", line={"width": 0}, fillcolor=f"{colour}2e",
            hoverinfo="skip", showlegend=False, legendgroup=name,
        ),
        go.Scatter(
            x=x, y=value, mode="lines", name=text(name, 40), legendgroup=name,
            line={"color": colour, "width": 2.2}, text=said,
            hovertemplate="%{x:.3g}: %{text}<extra></extra>",
        ),
    ]  # fmt: skip
