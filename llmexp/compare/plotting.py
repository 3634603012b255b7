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
from plotly.colors import sample_colorscale

from llmexp.compare.records import Column, Comparison, Entry

# All are legible on white and on black: distinct ones for a few entries, the rank from best to
# worst for many.
FEW = [
    "#4269d0",
    "#e3891b",
    "#d9485f",
    "#2fa58e",
    "#8a5cd6",
    "#3c9d45",
    "#c463a8",
    "#7f8ba0",
    "#9c6b4e",
    "#2b9cc4",
]
MANY = ["#5a55d6", "#2b8cc4", "#2a9d8f", "#7d9a2a", "#c98a1e", "#d9603b"]
GREY = "#8a93a3"
LEADING = ("best", "lowest", "highest")


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
    """A figure with its controls, and what is otherwise on a narrow screen."""

    name: str
    title: str
    traces: Sequence[go.Scatter | go.Heatmap]
    layout: Mapping[str, Any]
    small: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Choice] = field(default_factory=dict)
    caption: str = ""

    def as_json(self) -> str:
        margins = {"template": "none", "margin": dict(l=8, r=12, t=8, b=8)}
        figure = go.Figure(list(self.traces), margins).update_layout(dict(self.layout))
        whole = figure.layout.to_plotly_json()
        height = figure.layout.height
        figure.layout.height = None  # the page sets it, so that the width stays that of the window
        wide = {"font.size": 12, "dragmode": "zoom", "height": height}
        small = {"font.size": 11, "dragmode": False, "height": height, **self.small}
        wide |= {key: whole[key] for key in self.small}
        choices = {name: [update for _, update in c.options] for name, c in self.choices.items()}
        rest = json.dumps({"wide": wide, "small": small, "choices": choices})
        return f'{{"figure":{figure.to_json()},{rest[1:]}'


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
    colours = zip(c.entries, palette(len(c.entries)), strict=True)
    return {e: Look(colour, e.standing.mark in LEADING, text(e.label, 40)) for e, colour in colours}


def palette(count: int) -> list[str]:
    if count <= len(FEW):
        return FEW[:count]
    places = [i / (count - 1) for i in range(count)]
    shades = sample_colorscale(MANY, places, colortype="tuple")
    return ["#" + "".join(f"{round(255 * part):02x}" for part in shade) for shade in shades]


def templates() -> dict[str, Any]:
    """Return the look of every figure in a light and in a dark window."""
    return {
        "light": _template("#1c2330", "#5d6778", "#e2e5ea", "#ffffff", ["#f4f7fd", "#86aef2"]),
        "dark": _template("#e4e8ef", "#9aa5b6", "#2d3440", "#12151b", ["#171d28", "#2f5aa8"]),
    }


def _template(ink: str, muted: str, line: str, paper: str, heat: list[str]) -> dict[str, Any]:
    clear, font = "rgba(0,0,0,0)", "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
    axis = {
        "gridcolor": line, "linecolor": line, "zeroline": False, "automargin": True, "ticks": "",
        "title": {"font": {"color": muted, "size": 12}, "standoff": 8},
    }  # fmt: skip
    layout = {
        "font": {"family": font, "color": ink}, "paper_bgcolor": clear, "plot_bgcolor": clear,
        "xaxis": {**axis, "spikecolor": muted, "spikethickness": 1, "spikedash": "dot"},
        "yaxis": axis, "hovermode": "closest",
        "hoverlabel": {"bgcolor": paper, "bordercolor": muted, "font": {"color": ink, "size": 11},
                       "align": "left", "namelength": -1},
        "modebar": {"bgcolor": clear, "color": muted, "activecolor": ink},
        "coloraxis": {"colorscale": [[0, heat[0]], [1, heat[1]]], "showscale": False},
        "shapedefaults": {"line": {"color": muted, "width": 1}},
        "annotationdefaults": {"showarrow": False, "bgcolor": paper, "borderpad": 1,
                               "font": {"size": 11}},
    }  # fmt: skip
    return {"layout": layout, "data": {"heatmap": [{"textfont": {"color": ink}}]}}


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
