"""Write a page with figures that asks the network for nothing, from a template.

Figures share names, menus, and colours in both schemes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

import jinja2
import numpy as np
import plotly.graph_objects as go
import plotly.io
from plotly.colors import sample_colorscale
from plotly.offline import get_plotlyjs

from llmexp.compare.records import Result, Setting
from llmexp.system.text import number

PLOTLY_FILE = "plotly.min.js"

# All are legible on white and on black: distinct ones for a few settings, the rank from best to
# worst for many.
TEN_COLOURS = [
    "#4269d0", "#e3891b", "#d9485f", "#2fa58e", "#8a5cd6", "#3c9d45", "#c463a8", "#7f8ba0",
    "#9c6b4e", "#2b9cc4",
]  # fmt: skip
_MANY = ["#5a55d6", "#2b8cc4", "#2a9d8f", "#7d9a2a", "#c98a1e", "#d9603b"]
GREY = "#8a93a3"
ABOVE = dict(orientation="h", x=0, y=1.02, yanchor="bottom")  # of a legend
# Plotly's template, ink and paper of page.css, weak and strong colour of a map.
SCHEMES = {
    "light": ("plotly_white", "#1c2330", "#ffffff", "#f4f7fd", "#86aef2"),
    "dark": ("plotly_dark", "#e4e8ef", "#12151b", "#171d28", "#2f5aa8"),
}


# Of a menu: a label, and what `Plotly.update` gets: of the traces, of the layout, which traces.
Options = list[tuple[str, list[Any]]]


@dataclass(frozen=True)
class Plot:
    """A figure of the page, with the words above and below it."""

    name: str
    title: str
    figure: go.Figure
    caption: str = ""


def plot(name: str, title: str, traces: Sequence[Any], caption: str = "", **layout: Any) -> Plot:
    """Return a figure with narrow margins; the page gives it its colours."""
    first = {"template": "none", "margin": dict(l=8, r=12, t=8, b=8), "height": 340}
    return Plot(name, title, go.Figure(traces, first).update_layout(layout), caption)


def points(x: Any, y: Any, words: Sequence[str] | None, **more: Any) -> go.Scatter:
    """Return marks, each with its own words for the pointer."""
    how = {"mode": "markers", "text": words} | more
    hover = "%{text}<extra></extra>" if words else None
    return go.Scatter(x=x, y=y, hovertemplate=hover, **how)


def menus(*choices: Options) -> list[dict[str, Any]]:
    """Return menus in a row above a figure; the first option of each is chosen."""
    found, left = [], 0
    for options in choices:
        buttons = [dict(label=text(name), method="update", args=args) for name, args in options]
        place = dict(x=0, xanchor="left", y=1, yanchor="bottom", pad=dict(l=left, b=8))
        found.append(dict(buttons=buttons, active=0, showactive=True, **place))
        left += 36 + 7 * max(len(name) for name, _ in options)  # about as wide as it is drawn
    return found


def styles(c: Result) -> dict[Setting, tuple[str, str]]:
    """Return each setting with its colour and name in every figure; the leading one has a star."""
    found = {}
    for s, colour in zip(c.settings, palette(len(c.settings)), strict=True):
        name = text(s.label, 40)
        found[s] = colour, f"<b>★ {name}</b>" if s.leads else name
    return found


def palette(count: int) -> list[str]:
    if count <= len(TEN_COLOURS):
        return TEN_COLOURS[:count]
    shades = sample_colorscale(_MANY, np.linspace(0, 1, count).tolist(), colortype="tuple")
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
            modebar_bgcolor="rgba(0,0,0,0)", updatemenudefaults_font_color=ink,
            xaxis_title_standoff=8, yaxis_title_standoff=8,
        )  # fmt: skip
        data = {"heatmap": [{"textfont": {"color": ink}}]}
        found[scheme] = {"layout": layout.to_plotly_json(), "data": data}
    return found


def text(value: Any, most: int = 200) -> str:
    """Escape what Plotly would read as markup, and cut what is too long in its middle.

    It is text and nothing else.
    """
    words = str(value)
    if len(words) > most:
        words = f"{words[: most // 2]}…{words[1 - most // 2 :]}"
    return escape(words, quote=False)


def packed(values: np.ndarray) -> dict[str, str]:
    """Return numbers in Plotly's form; as float32 they are exact to far less than a pixel."""
    data = np.asarray(values).astype("<f4").tobytes()
    return {"dtype": "f4", "bdata": base64.b64encode(data).decode()}


class Cell(NamedTuple):
    """The text of a cell, and the value that its column is sorted by."""

    text: str
    value: Any = None

    @property
    def kind(self) -> str:
        """Return the class that lays the cell out: a short word never breaks."""
        if len(self.text) > 40:
            return "words"
        if number(self.value) is not None:
            return "number"
        return "word" if len(self.text) <= 16 else "value"


class Row(NamedTuple):
    """A row of a table: its name beside the colour of its curves, and its cells."""

    colour: str
    name: str
    cells: list[Cell]
    star: bool = False
    note: str = ""


class Section(NamedTuple):
    """A part of a page: figures, and a table with a text above it."""

    id: str
    title: str
    plots: Sequence[Plot] = ()
    heads: Sequence[str] = ()
    rows: Sequence[Row] = ()
    text: str = ""
    folded: bool = False


def document(parts: Sequence[Section], inline: bool = True, **answer: Any) -> str:
    """Return a page of parts: its title, what it is about, headline, notes, why and problems.

    Everything is inside; without `inline` the library is a file beside the page. The template
    escapes what comes from runs. Besides, the page forbids every request and every script but its
    own, by their SHA-256 (Content Security Policy level 3), so that a label could not do anything
    if it were not escaped.
    """
    parts = [part for part in parts if part.plots or part.rows]
    plots = [plot for part in parts for plot in part.plots]
    drawn = ",".join(f"{json.dumps(plot.name)}:{plot.figure.to_json()}" for plot in plots)
    data = f'{{"templates":{json.dumps(templates())},"figures":{{{drawn}}}}}'
    library, script = str(get_plotlyjs()) if inline else "", asset("page.js")
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'"
        for s in (script, library)
        if s
    ]
    allowed = " ".join(hashes if library else [*hashes, "'self'", "file:"])  # the library beside it
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: "
        "blob:; base-uri 'none'; form-action 'none'"
    )
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(asset("page.html")).render(
        parts=parts, **answer, style=asset("page.css"),
        data=data.replace("<", "\\u003c"), policy=policy, script=script,
        library=library, library_file=PLOTLY_FILE,
    )  # fmt: skip


def asset(name: str) -> str:
    return (files("llmexp.compare") / name).read_text(encoding="utf-8")
