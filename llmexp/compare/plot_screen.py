"""The figures of a screen: its effects by size, and all contrasts against what noise would make."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.plotting import FEW, GREY, Plot, plot, text
from llmexp.compare.records import Result
from llmexp.compare.screening import Screen
from llmexp.settings.labels import short_value


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
        marker={"color": [FEW[0] if k.found else GREY for _, k in knobs]},
        hovertemplate="%{y}<br>%{x:.3g}<extra></extra>",
    )  # fmt: skip
    layout = {"height": 120 + 34 * len(knobs), "yaxis.automargin": True}
    caption = "Bars in colour are told from noise; the whiskers are 95 % intervals."
    return plot("effects", f"Effects on {c.key}", [trace], layout, caption)


def _half_normal(c: Result, screen: Screen) -> Plot:
    from scipy.special import ndtri

    names = c.names
    points = [(abs(k.effect), names[key], k.found) for key, k in screen.knobs.items()]
    for k in screen.others:
        pairs = " = ".join(" x ".join(names[x] for x in p.split(" x ")) for p in k.names)
        points.append((abs(k.effect), pairs or "higher", False))
    points.sort(key=lambda point: point[0])
    places = ndtri(0.5 + 0.5 * (np.arange(len(points)) + 0.5) / len(points))
    knobs = set(names.values())
    symbols = ["circle" if name in knobs else "circle-open" for _, name, _ in points]
    marker = {"size": 9, "symbol": symbols, "color": [FEW[0] if f else GREY for *_, f in points]}
    trace = go.Scatter(
        x=places.tolist(), y=[size for size, _, _ in points], mode="markers+text", marker=marker,
        text=[text(name, 30) if name in knobs else "" for _, name, _ in points],
        textposition="top center", cliponaxis=False,
        customdata=[text(name) for _, name, _ in points],
        hovertemplate="%{customdata}<br>%{y:.3g}<extra></extra>",
    )  # fmt: skip
    layout = {
        "height": 340, "xaxis.title.text": "half-normal quantile", "xaxis.range": [-0.25, 2.6],
        "yaxis.title.text": "size of the contrast",
    }  # fmt: skip
    caption = "Noise alone lies on a line through the origin, what matters above it. Open: pairs."
    return plot("half-normal", "All contrasts", [trace], layout, caption)
