"""Hold what the figures of the page share: names, colours in both schemes, the form that the page's
script reads."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io
from plotly.colors import sample_colorscale

from llmexp.compare.records import Column, Comparison, Entry

# All are legible on white and on black: distinct ones for a few entries, the rank from best to
# worst for many.
FEW = [
    "#4269d0", "#e3891b", "#d9485f", "#2fa58e", "#8a5cd6", "#3c9d45", "#c463a8", "#7f8ba0",
    "#9c6b4e", "#2b9cc4",
]  # fmt: skip
MANY = ["#5a55d6", "#2b8cc4", "#2a9d8f", "#7d9a2a", "#c98a1e", "#d9603b"]
GREY = "#8a93a3"
LEADING = ("best", "lowest", "highest")
# Plotly's template, ink and paper of page.css, weak and strong colour of a map.
SCHEMES = {
    "light": ("plotly_white", "#1c2330", "#ffffff", "#f4f7fd", "#86aef2"),
    "dark": ("plotly_dark", "#e4e8ef", "#12151b", "#171d28", "#2f5aa8"),
}


@dataclass(frozen=True)
class Choice:
    """A control of a figure; each option is what `Plotly.update` gets: of the traces, of the
    layout, which traces."""

    title: str
    options: Sequence[tuple[str, list[Any]]]
    chosen: int = 0
    slider: bool = False


@dataclass(frozen=True)
class Plot:
    """A figure with its controls."""

    name: str
    title: str
    traces: Sequence[go.Scatter | go.Heatmap]
    layout: Mapping[str, Any]
    choices: Mapping[str, Choice] = field(default_factory=dict)
    caption: str = ""

    def as_json(self) -> str:
        first = {"template": "none", "margin": dict(l=8, r=12, t=8, b=8)}
        figure = go.Figure(list(self.traces), first).update_layout(dict(self.layout))
        choices = {name: [update for _, update in c.options] for name, c in self.choices.items()}
        return f'{{"figure":{figure.to_json()},"choices":{json.dumps(choices)}}}'


@dataclass(frozen=True)
class Look:
    """The colour and the name of an entry in every figure; the leading one is bolder, and a
    star."""

    colour: str
    lead: bool
    title: str

    def line(self, bold: float, usual: float, **more: Any) -> dict[str, Any]:
        return {"color": self.colour, "width": bold if self.lead else usual, **more}

    def point(self, bold: int, usual: int) -> dict[str, Any]:
        symbol = "star" if self.lead else "circle"
        return {"color": self.colour, "size": bold if self.lead else usual, "symbol": symbol}


def looks(c: Comparison) -> dict[Entry, Look]:
    found = {}
    for e, colour in zip(c.entries, palette(len(c.entries)), strict=True):
        lead = e.standing.mark in LEADING
        found[e] = Look(
            colour, lead, f"<b>★ {text(e.label, 40)}</b>" if lead else text(e.label, 40)
        )
    return found


def palette(count: int) -> list[str]:
    if count <= len(FEW):
        return FEW[:count]
    shades = sample_colorscale(MANY, np.linspace(0, 1, count).tolist(), colortype="tuple")
    return ["#" + "".join(f"{round(255 * part):02x}" for part in shade) for shade in shades]


def templates() -> dict[str, Any]:
    """Return the look of every figure in a light and in a dark window."""
    found = {}
    for scheme, (name, ink, paper, weak, strong) in SCHEMES.items():
        layout = go.Layout(plotly.io.templates[name].layout)
        layout.update(
            font_color=ink, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
            hovermode="closest", hoverlabel=dict(bgcolor=paper, font_size=11, namelength=-1),
            coloraxis=dict(colorscale=[[0, weak], [1, strong]], showscale=False),
            modebar_bgcolor="rgba(0,0,0,0)", xaxis_title_standoff=8, yaxis_title_standoff=8,
        )  # fmt: skip
        data = {"heatmap": [{"textfont": {"color": ink}}]}
        found[scheme] = {"layout": layout.to_plotly_json(), "data": data}
    return found


def text(value: Any, most: int = 200) -> str:
    """Escape what Plotly would read as markup, and cut what is too long in its middle: it is text
    and nothing else."""
    words = str(value)
    if len(words) > most:
        words = f"{words[: most // 2]}…{words[1 - most // 2 :]}"
    return escape(words, quote=False)


def packed(values: np.ndarray) -> dict[str, str]:
    """Return numbers in Plotly's form; as float32 they are exact to far less than a pixel."""
    data = np.asarray(values).astype("<f4").tobytes()
    return {"dtype": "f4", "bdata": base64.b64encode(data).decode()}


def metric(c: Comparison) -> Column | None:
    return next((column for column in c.columns if column.key == c.metric), None)
