"""Write a page with figures that asks the network for nothing, from a template."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import jinja2
from plotly.offline import get_plotlyjs

from llmexp.compare.plotting import Plot, templates
from llmexp.system.text import number

PLOTLY_FILE = "plotly.min.js"


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
