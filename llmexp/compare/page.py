"""Write the comparison as an HTML page that asks the network for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from llmexp import features
from llmexp.compare.clipping import looked_at, percent
from llmexp.compare.document import PLOTLY_FILE, Cell, Row, document
from llmexp.compare.plot_layers import layer_plots
from llmexp.compare.plot_search import screen_plots, search_plots
from llmexp.compare.plot_settings import maps, over_keys
from llmexp.compare.plot_training import losses, other_quantities
from llmexp.compare.plot_verdict import verdict_plot
from llmexp.compare.plotting import Plot, looks
from llmexp.compare.records import TWIN, Record, Result
from llmexp.compare.table import columns_in_full, shown_columns
from llmexp.compare.target import UNITS_IN_WORDS
from llmexp.settings.labels import plural
from llmexp.system import fileio
from llmexp.system.text import number, shown
from llmexp.tracker.answer import SweepAnswer
from llmexp.tracker.wandb import MARKS


def write_beside(comparison: Result, where: Path) -> Path:
    """Write compare.html into the folder, and the library that it names, once."""
    if not (where / PLOTLY_FILE).exists():
        fileio.write_whole(where / PLOTLY_FILE, str(get_plotlyjs()))
    fileio.write_whole(where / "compare.html", page(comparison, inline=False))
    return where / "compare.html"


def mirrored(c: Result) -> SweepAnswer:
    """Return the answer of a sweep as a tracker gets it, with a verdict for each run."""
    full, settings = columns_in_full(c), c.settings
    standing = ("name", "mark", "difference", "half", "basis")
    table = {k: full.pop(k) for k in standing} | {"seeds": [len(s.runs) for s in settings]}
    table |= {"state": full.pop("state"), **{k: v for k, v in full.items() if k != "path"}}
    marks = {}
    for s in settings:
        for run in s.runs:
            figures = (None, None) if run.out else (s.size, s.half)
            values = (run.out or s.mark or None, *figures)
            marks[run.path] = dict(zip(MARKS, values, strict=True))
    notes = "\n".join([c.headline, "", *(f"- {note}" for note in c.notes)])
    return SweepAnswer(notes.strip(), table, page(c), marks)


@dataclass(frozen=True)
class Table:
    """A table of a feature, folded, under the others."""

    id: str
    title: str
    caption: str
    heads: list[str]
    rows: list[Row]
    note: str


def page(comparison: Result, inline: bool = True) -> str:
    """Return the page with everything inside, or, without `inline`, with the library beside it."""
    c, parts = comparison, sections(comparison)
    tables = [found for of in features.offered("page", "table") if (found := of(c)).rows]
    return document(
        "llmexp.compare", list(itertools.chain(*parts.values())), inline,
        title=_title(c), about=_about(c), headline=c.headline, notes=c.notes, why=c.why,
        problems=c.problems, looks=look_rows(c), clip=clip_rows(c), tables=tables,
        **parts, **run_rows(c),
    )  # fmt: skip


def sections(c: Result) -> dict[str, list[Plot]]:
    """Return all figures of the page, which are those of an answer in Python too, by section."""
    found: dict[str, Sequence[Plot | None]] = {
        "verdict": [verdict_plot(c)], "losses": [losses(c)],
        "settings": screen_plots(c) or [*search_plots(c), *over_keys(c), *maps(c)],
        "others": [other_quantities(c)], "layers": layer_plots(c),
    }  # fmt: skip
    return {name: [plot for plot in plots if plot] for name, plots in found.items()}


def _title(c: Result) -> str:
    of = f" of {'/'.join(c.sweep.parts[-2:])}" if c.sweep else ""
    return f"{plural(len(c.runs), 'run')}{of}"


def _about(c: Result) -> str:
    where = "each run at its own end"
    if c.align_at is not None:
        where = f"compared at {c.position} {UNITS_IN_WORDS[c.align]}"
    folded = len(c.settings) != len(c.runs)
    settings = f"{plural(len(c.settings), 'setting')}, seeds folded · " if folded else ""
    ordered = f"{settings}ordered by {c.key} · {where}"
    return ordered[0].upper() + ordered[1:]


def number_cells(*values: Any, digits: int = 3) -> list[Cell]:
    """Return a cell for each number, empty where one is not known."""
    return [Cell("" if number(v) is None else shown(v, digits), v) for v in values]


def share(value: Any, before: str = "") -> Cell:
    """Return the cell of a share in percent, empty where it is not known."""
    return Cell("" if number(value) is None else f"{before}{percent(value)}", value)


def runs(c: Result) -> Iterator[tuple[str, str, Record]]:
    """Yield the colour and the name of every run with the run."""
    for setting, look in looks(c).items():
        for record in setting.runs:
            yield look.colour, setting.label_of(record), record


def run_rows(c: Result) -> dict[str, list[Any]]:
    """Return the table of settings: titles, rows with the best first, and what is alike in all."""
    found = shown_columns(c)
    metric = [found.pop(c.key)] if c.key in found else []
    kept, same = list(metric), []
    for column in found.values():
        if len(c.settings) > 1 and len(set(column.cells)) == 1:
            same += [f"{column.title} {column.cells[0]}"] * bool(column.cells[0])
        elif all(column.cells != m.cells for m in metric):
            kept.append(column)
    rows = []
    for i, (e, look) in enumerate(looks(c).items()):
        cells = [Cell(k.cells[i], k.values[i] if k.values else None) for k in kept]
        rows.append(Row(look.colour, e.label, cells, look.lead, e.note))
    return {"heads": ["setting", *(k.title for k in kept)], "rows": rows, "alike": same}


def look_rows(c: Result) -> list[Row]:
    """Return the looks of a sweep that decided by itself: where seeds went, what they showed."""
    rows = []
    for i, one in enumerate(c.looks, 1):
        count = len(one.seeds)
        trained = sum(r.seed in one.seeds and not r.config.get(TWIN) for r in c.runs)
        cells = [
            Cell(str(count), count), Cell(str(trained), trained),
            Cell(f"{one.level:.2%}", one.level), Cell(", ".join(one.worse)),
            Cell(", ".join(one.going)), Cell(one.why),
        ]  # fmt: skip
        rows.append(Row("transparent", str(i), cells))
    return rows


def clip_rows(c: Result) -> list[Row]:
    """Return how often each run was clipped, and how often other limits would have clipped it."""
    rows = []
    for colour, name, record in runs(c):
        for i, (what, limit, found) in enumerate(looked_at(record)):
            quantiles = found.get("quantiles", {})
            cells = [Cell(what), Cell(limit), share(found.get("share"))]
            cells += number_cells(*(quantiles.get(q) for q in ("50", "90", "99")))
            for at in found.get("table", []):
                cells.append(share(at.get("share"), f"{number_cells(at.get('limit'))[0].text}: "))
            rows.append(Row("transparent" if i else colour, "" if i else name, cells))
    return rows
