"""Draw laws: loss over size and over compute, contours, runs about the law, what a change needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from llmexp.compare.plotting import FEW, GREY, MANY, Plot, packed, plot, text
from llmexp.laws.figures import big, flops_text, plain, sized
from llmexp.laws.fitting import Surface
from llmexp.laws.gain import Gain
from llmexp.laws.isoflop import Parabolas
from llmexp.laws.law import Estimate
from llmexp.laws.power import Power
from llmexp.laws.surface import log_losses

CURVE = 60  # places of a curve
FRONT = 25  # places of a frontier, each with an interval
STAR = {"symbol": "star", "size": 13}
LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}


def budget_colours(s: Surface) -> list[str]:
    """Return a colour for each rung, in order."""
    places = np.linspace(0, 1, len(s.rungs)).tolist() if len(s.rungs) > 1 else [0.0]
    return ["#" + "".join(f"{round(255 * part):02x}" for part in shade) for shade in
            sample_colorscale(MANY, places, colortype="tuple")]  # fmt: skip


def _axis(values: np.ndarray, title: str) -> dict[str, Any]:
    """Return a logarithmic axis that has a tick or two."""
    wide = math.log10(float(np.max(values)) / float(np.min(values))) > 2.5
    return {"type": "log", "title": {"text": title}, "exponentformat": "power",
            "dtick": 1 if wide else "D2", "tickfont": {"size": 11}}  # fmt: skip


def _hover(name: str, *lines: str) -> str:
    return "<br>".join([f"<b>{text(name)}</b>", *lines])


def isoflops(s: Surface, beside: Parabolas | None) -> Plot:
    """Return loss over size of each rung: runs, the law, its best size, and the parabola."""
    traces: list[Any] = []
    curves = {p.flops: p for p in beside.minima} if beside else {}
    for rung, best, colour in zip(s.rungs, s.optima, budget_colours(s), strict=True):
        name = (
            flops_text(best.flops) if rung.what == "budget" else big(float(s.sizes[rung.runs[0]]))
        )
        n, loss = s.sizes[rung.runs], s.losses[rung.runs]
        points = [s.ladder.points[i] for i in rung.runs]
        words = [_hover(p.name, f"N {big(x)}", f"loss {p.loss:.4f}")
                 for p, x in zip(points, n, strict=True)]  # fmt: skip
        dots = {"name": name, "legendgroup": name, "showlegend": True}
        traces.append(_dots(n, loss, words, {"color": colour}, **dots))
        if rung.what != "budget":
            continue
        x = np.linspace(math.log(n.min()) - 0.2, math.log(n.max()) + 0.2, CURVE)
        law = np.exp(log_losses(s.ensemble.law, s.axes.at(x, rung.compute - s.price.at(x)))[0])
        traces.append(_line(np.exp(x), law, colour, name))
        if (p := curves.get(best.flops)) is not None:
            traces.append(_line(np.exp(x), np.polyval(p.curve, x), colour, name, "dot"))
        if not s.edge:
            said = _hover("best size", sized(best.parameters), f"loss {plain(best.loss)}")
            bars = {"error_x": _bars(best.parameters, colour), "legendgroup": name}
            at = [best.parameters.value], [best.loss.value]
            traces.append(_dots(*at, [said], STAR | {"color": colour}, **bars))
    layout = {
        "height": 460, "xaxis": _axis(s.sizes, "parameters"), "yaxis.title.text": "val loss",
        "legend": LEGEND, "margin.t": 60,
    }  # fmt: skip
    caption = (
        "Dots: runs, a colour for each budget. Lines: the law; a star is its best size, with the "
        "95 % interval. Dotted: the parabola of the budget."
    )
    title = f"{text(s.ladder.name)}: loss over size"
    return plot(f"isoflop-{_id(s)}", title, traces, layout, caption)


def _dots(x: Any, y: Any, words: Sequence[str], marker: dict[str, Any], **more: Any) -> Any:
    """Return marks, each with what the pointer shows."""
    return go.Scatter({
        "x": x, "y": y, "text": words, "mode": "markers", "marker": {"size": 7} | marker,
        "hovertemplate": "%{text}<extra></extra>", "showlegend": False,
    } | more)  # fmt: skip


def _line(x: np.ndarray, y: np.ndarray, colour: str, group: str, dash: str = "solid") -> Any:
    return go.Scatter(
        x=packed(x), y=packed(y), mode="lines", legendgroup=group, showlegend=False,
        hoverinfo="skip", line={"color": colour, "width": 1.6, "dash": dash},
    )  # fmt: skip


def _bars(e: Estimate, colour: str) -> dict[str, Any]:
    return dict(type="data", symmetric=False, array=[e.high - e.value], color=colour,
                arrayminus=[e.value - e.low], thickness=1.4, width=4)  # fmt: skip


def _id(law: Any) -> str:
    return "".join(ch if ch.isalnum() else "-" for ch in law.ladder.name)


def _band(x: np.ndarray, found: Sequence[Estimate], colour: str, name: str) -> list[Any]:
    """Return a line with its interval as a band."""
    low, high = (np.array([getattr(e, end) for e in found]) for end in ("low", "high"))
    whole = np.isfinite(low) & np.isfinite(high)
    x, low, high = x[whole], low[whole], high[whole]
    value = np.array([e.value for e in found])[whole]
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return [
        go.Scatter(
            x=np.concatenate([x, x[::-1]]), y=np.concatenate([high, low[::-1]]), fill="toself",
            mode="lines", line={"width": 0}, fillcolor=f"rgba({red},{green},{blue},0.18)",
            hoverinfo="skip", showlegend=False, legendgroup=name,
        ),
        go.Scatter(
            x=x, y=value, mode="lines", name=text(name, 40), legendgroup=name,
            line={"color": colour, "width": 2.2},
            text=[plain(e) for e in found], hovertemplate="%{x:.3g}: %{text}<extra></extra>",
        ),
    ]  # fmt: skip


def frontiers(surfaces: Sequence[Surface]) -> Plot:
    """Return the loss of the best size over compute, with the runs and the prediction."""
    traces: list[Any] = []
    for s, colour in zip(surfaces, FEW * len(surfaces), strict=False):
        first, last = s.span
        c = np.linspace(first, max(last, math.log(s.predicted.flops)), FRONT)
        if not s.edge:
            found = [Estimate.of(s.best.losses(v), s.draws.losses(v)) for v in c]
            traces += _band(np.exp(c), found, colour, s.ladder.name)
        words = [_hover(p.name, f"{flops_text(p.flops)} FLOPs", f"loss {p.loss:.4f}")
                 for p in s.ladder.points]  # fmt: skip
        pale = {"color": colour, "size": 5, "opacity": 0.45}
        traces.append(_dots(s.flops, s.losses, words, pale, legendgroup=s.ladder.name))
        if s.target is not None and not s.edge:
            at = s.predicted
            said = _hover("prediction", plain(at.loss), sized(at.parameters, "parameters"))
            bars = {"error_y": _bars(at.loss, colour), "legendgroup": s.ladder.name}
            star = STAR | {"color": colour}
            traces.append(_dots([at.flops], [at.loss.value], [said], star, **bars))
    span = np.array([v for s in surfaces for v in (*np.exp(s.span), s.predicted.flops)])
    layout = {
        "height": 400, "xaxis": _axis(span, "FLOPs"), "yaxis": {"type": "log", "title": {
            "text": "val loss"}, "nticks": 6}, "legend": LEGEND, "margin.t": 40,
    }  # fmt: skip
    caption = "Line and band: the loss of the best size, with the 95 % interval. Dots: runs."
    if any(s.target and not s.edge for s in surfaces):
        caption += " Star: the prediction."
    return plot("frontier", "The frontier", traces, layout, caption)


def contours(s: Surface) -> Plot:
    """Return the losses of the law over size and tokens, with the runs and the best sizes."""
    x = np.linspace(math.log(s.tokens.min()) - 0.4, math.log(s.tokens.max()) + 0.4, CURVE)
    y = np.linspace(math.log(s.sizes.min()) - 0.4, math.log(s.sizes.max()) + 0.4, CURVE)
    tokens, sizes = np.meshgrid(x, y)
    z = np.exp(log_losses(s.ensemble.law, s.axes.at(sizes.ravel(), tokens.ravel()))[0])
    words = [_hover(p.name, f"N {big(n)}, D {big(p.tokens)}", f"loss {p.loss:.4f}")
             for p, n in zip(s.ladder.points, s.sizes, strict=True)]  # fmt: skip
    colours = dict(zip(range(len(s.rungs)), budget_colours(s), strict=True))
    of_run = {int(i): colours[k] for k, rung in enumerate(s.rungs) for i in rung.runs}
    traces = [
        go.Contour(
            x=np.exp(x), y=np.exp(y), z=z.reshape(CURVE, CURVE), ncontours=16, showscale=False,
            contours={"coloring": "lines", "showlabels": True, "labelfont": {"size": 10}},
            line={"width": 1}, colorscale=[[0, GREY], [1, GREY]], hoverinfo="skip",
        ),
        _dots(s.tokens, s.sizes, words,
              {"color": [of_run.get(i, GREY) for i in range(len(s.sizes))]}),
    ]  # fmt: skip
    if not s.edge:
        c = np.linspace(*s.span, FRONT)
        front = [(float(s.best.tokens(v)[0]), float(s.best.sizes(v)[0])) for v in c]
        d, n = np.exp(np.array(front)).T
        traces.append(_line(d, n, FEW[0], "best"))
    layout = {
        "height": 440, "xaxis": _axis(np.exp(x), "tokens"), "yaxis": _axis(np.exp(y), "parameters"),
        "showlegend": False,
    }  # fmt: skip
    caption = "Thin lines: equal loss by the law. Dots: runs."
    caption += "" if s.edge else " Line: the best sizes."
    title = f"{text(s.ladder.name)}: loss over size and tokens"
    return plot(f"contours-{_id(s)}", title, traces, layout, caption)


def residuals(law: Surface | Power) -> Plot:
    """Return by how many percent each run lies above the law."""
    over, x = ("FLOPs", law.flops) if isinstance(law, Surface) else (law.by, law.x)
    names = [p.name for p in law.ladder.points] if isinstance(law, Surface) else [big(v) for v in x]
    rest = 100 * law.rest
    words = [_hover(n, f"{r:+.2f} %") for n, r in zip(names, rest, strict=True)]
    traces = [_dots(x, rest, words, {"color": FEW[0]})]
    layout = {
        "height": 320, "xaxis": _axis(x, over), "yaxis.title.text": "above the law, %",
        "yaxis.zeroline": True,
    }  # fmt: skip
    caption = f"They lie {law.ensemble.noise:.2%} from the law (standard deviation)."
    title = f"{text(law.ladder.name)}: runs about the law"
    return plot(f"residuals-{_id(law)}", title, traces, layout, caption)


def gains(found: Sequence[Gain]) -> Plot:
    """Return the compute that each change needs over that of the baseline."""
    traces: list[Any] = []
    for g, colour in zip(found, FEW[1:] * len(found), strict=False):
        x = np.array([n.flops for n in g.curve])
        traces += _band(x, [n.ratio for n in g.curve], colour, g.change)
    span = np.array([n.flops for g in found for n in g.curve])
    baseline = text(found[0].baseline, 40)
    layout = {
        "height": 380, "xaxis": _axis(span, f"FLOPs of {baseline}"), "legend": LEGEND,
        "yaxis": {"type": "log", "title": {"text": f"compute, of {baseline}'s"}, "nticks": 7},
        "shapes": [dict(type="line", xref="paper", x0=0, x1=1, y0=1, y1=1,
                        line={"color": GREY, "width": 1.2, "dash": "dot"})],
        "margin.t": 40,
    }  # fmt: skip
    caption = (
        f"The compute that a change needs for the loss that {baseline} has at its best, as a "
        "multiple, with the 95 % interval. Below the dotted line it saves compute."
    )
    return plot("gain", "Compute at equal loss", traces, layout, caption)


def power_curve(p: Power) -> Plot:
    """Return loss over the axis: runs, the law with its interval, the prediction."""
    last = max(float(p.x.max()), p.target or 0.0)
    x = np.geomspace(float(p.x.min()), last, FRONT)
    traces = _band(x, [p.loss_at(v) for v in x], FEW[0], p.ladder.name)
    words = [_hover(big(v), f"loss {y:.4f}") for v, y in zip(p.x, p.losses, strict=True)]
    traces.append(_dots(p.x, p.losses, words, {"color": FEW[0]}))
    layout = {"height": 400, "xaxis": _axis(x, text(p.by)), "yaxis.title.text": "val loss",
              "showlegend": False}  # fmt: skip
    caption = "Dots: runs. Line and band: the law, with the 95 % interval."
    return plot(f"power-{_id(p)}", f"{text(p.ladder.name)}: the law", traces, layout, caption)
