"""Write the comparison as an HTML page that asks the network for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from llmexp import features
from llmexp.compare import curves, plots
from llmexp.compare.document import PLOTLY_FILE, Cell, Row, Section, document, styles
from llmexp.compare.figures import UNITS
from llmexp.compare.records import TWIN, Record, Result
from llmexp.compare.table import columns_in_full, marks_of, shown_columns
from llmexp.config.labels import plural
from llmexp.system import fileio
from llmexp.system.text import number, shown
from llmexp.tracker.answer import SweepAnswer


def write_beside(comparison: Result, where: Path) -> Path:
    """Write compare.html into the folder, and the library that it names, once."""
    if not (where / PLOTLY_FILE).exists():
        fileio.write_whole(where / PLOTLY_FILE, str(get_plotlyjs()))
    fileio.write_whole(where / "compare.html", page(comparison, inline=False))
    return where / "compare.html"


def mirrored(c: Result) -> SweepAnswer:
    """Return the answer of a sweep as a tracker gets it, with a verdict for each run."""
    table = {key: values for key, values in columns_in_full(c).items() if key != "path"}
    notes = "\n".join([c.headline, "", *(f"- {note}" for note in c.notes)])
    return SweepAnswer(notes.strip(), table, page(c), marks_of(c))


def page(c: Result, inline: bool = True) -> str:
    """Return the page with everything inside, or, without `inline`, with the library beside it."""
    where = "each run at its own end"
    if c.align_at is not None:
        where = f"compared at {c.position} {UNITS[c.align]}"
    title = plural(len(c.runs), "run") + (f" of {'/'.join(c.sweep.parts[-2:])}" if c.sweep else "")
    about = f"{plural(len(c.settings), 'setting')} · ordered by {c.key} · {where}"
    said = {key: getattr(c, key) for key in ("headline", "notes", "why", "problems")}
    return document(sections(c), inline, title=title, about=about, **said)


def sections(c: Result) -> list[Section]:
    """Return the parts of the page; their figures are those of an answer in Python too."""
    return [
        Section("verdict", "The verdict", plots.verdict_plot(c)),
        _looks(c),
        Section("losses", "Losses", curves.losses(c)),
        Section(
            "settings",
            "Over the settings",
            plots.screen_plots(c) or [*plots.search_plot(c), *plots.over_keys(c), *plots.maps(c)],
        ),
        _settings(c),
        Section("other-curves", "Other curves", curves.quantities(c), folded=True),
        *(section(c) for section in features.offered("page", "section")),
    ]


def number_cells(*values: Any, digits: int = 3) -> list[Cell]:
    """Return a cell for each number, empty where one is not known."""
    return [Cell("" if number(v) is None else shown(v, digits), v) for v in values]


def runs(c: Result) -> Iterator[tuple[str, str, Record]]:
    """Yield the colour and the name of every run with the run."""
    for setting, (colour, _) in styles(c).items():
        for record in setting.runs:
            yield colour, setting.label_of(record), record


def _settings(c: Result) -> Section:
    """Return the table of settings: the metric, and the columns that tell them apart."""
    found = shown_columns(c)
    metric = [found.pop(c.key)] if c.key in found else []
    news = [k for k in found.values() if len(c.settings) == 1 or len({*k.cells}) > 1]
    kept = [*metric, *(k for k in news if all(k.cells != m.cells for m in metric))]
    rows = []
    for i, (s, (colour, _)) in enumerate(styles(c).items()):
        cells = [Cell(k.cells[i], k.values[i] if k.values else None) for k in kept]
        rows.append(Row(colour, s.label, cells, s.leads, s.note))
    return Section("table", "Runs", (), ["setting", *(k.title for k in kept)], rows)


def _looks(c: Result) -> Section:
    """Return the looks of a sweep that decided by itself: where seeds went, what they showed."""
    heads = "Look|Seeds each|Runs so far|Of the 5 %|Shown to be worse|Still open|What follows"
    rows = []
    for i, one in enumerate(c.looks, 1):
        trained = sum(r.seed in one.seeds and not r.config.get(TWIN) for r in c.runs)
        texts = (len(one.seeds), trained, f"{one.level:.2%}", ", ".join(one.worse))
        cells = [Cell(str(text)) for text in (*texts, ", ".join(one.going), one.why)]
        rows.append(Row("transparent", str(i), cells))
    text = (
        "Interim analyses decided which settings got further seeds. Each spends a part of "
        "the 5 % of error; a setting that is worse gets no more seeds."
    )
    return Section("looks", "Where seeds went", (), heads.split("|"), rows, text, folded=True)
