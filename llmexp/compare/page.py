"""Write the comparison as an HTML page that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from llmexp.compare.figures import shown
from llmexp.compare.plot_settings import maps, over_keys
from llmexp.compare.plot_training import losses, others
from llmexp.compare.plotting import Choice, Plot, looks, templates
from llmexp.compare.records import Comparison, Record, as_dict, number
from llmexp.compare.table import columns_of
from llmexp.settings.labels import plural
from llmexp.settings.labels import shown as setting
from llmexp.system import fileio

LIBRARY = "plotly.min.js"
UNITS = {"tokens": "tokens", "steps": "steps", "time": "s of training"}
MISSING = (
    f"This figure needs the file {LIBRARY} beside the page. "
    "A page in one file, to be sent around: llmexp compare FOLDER --out page.html"
)


def write_beside(comparison: Comparison, where: Path) -> Path:
    """Write compare.html into the folder, and the library that it names, once."""
    if not (where / LIBRARY).exists():
        fileio.write_whole(where / LIBRARY, str(get_plotlyjs()))
    fileio.write_whole(where / "compare.html", page(comparison, inline=False))
    return where / "compare.html"


def page(comparison: Comparison, inline: bool = True) -> str:
    """Return the page with everything inside; without `inline` it names the library's file, which
    must lie beside it.

    What comes from runs is escaped; besides, the page forbids every request and every script but
    its own, by their SHA-256 (Content Security Policy level 3), so that a label could not do
    anything if it were not.
    """
    settings = [*over_keys(comparison), *maps(comparison)]
    plots = [plot for plot in (losses(comparison), *settings, others(comparison)) if plot]
    drawn = {plot.name: _figure(plot) for plot in plots}
    over = "".join(drawn[plot.name] for plot in settings)
    problems = "".join(f"<li>{escape(line)}</li>\n" for line in comparison.problems)
    sections = (
        ("losses", "Losses", drawn.get("losses", ""), False),
        ("settings", "Over the settings", over and f'<div class="grid">{over}</div>', False),
        ("table", "Runs", run_table(comparison), False),
        ("other-curves", "Other curves", drawn.get("others", ""), True),
        ("clip", "Gradient clipping", clip_table(comparison), True),
        ("noise", "Gradient noise scale", noise_table(comparison), True),
        ("problems", "Problems", problems and f"<ul>{problems}</ul>\n", False),
    )
    title = escape(_title(comparison))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(inline)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f'<header>\n<h1>{title}</h1>\n<p class="muted">{escape(_about(comparison))}</p>\n'
        f"</header>\n<main>\n{_answer(comparison)}{''.join(map(_section, sections))}</main>\n"
        f"{_scripts(plots, inline)}</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (files("llmexp.compare") / name).read_text(encoding="utf-8")


def _policy(inline: bool) -> str:
    scripts = [_asset("page.js"), *([str(get_plotlyjs())] if inline else [])]
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'"
        for s in scripts
    ]
    beside = [] if inline else ["'self'", "file:"]  # a file beside it, opened from a disk or served
    allowed = " ".join([*hashes, *beside])
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: "
        "blob:; base-uri 'none'; form-action 'none'"
    )


def _scripts(plots: Iterable[Plot], inline: bool) -> str:
    figures = ",".join(f"{json.dumps(plot.name)}:{plot.as_json()}" for plot in plots)
    data = f'{{"templates":{json.dumps(templates())},"figures":{{{figures}}}}}'
    data = data.replace("<", "\\u003c")
    library = f">{get_plotlyjs()}" if inline else f' src="{LIBRARY}">'
    return (
        f'<script type="application/json" id="data">{data}</script>\n<script{library}</script>\n'
        f"<script>{_asset('page.js')}</script>\n"
    )


def _title(c: Comparison) -> str:
    sweeps = {record.sweep for record in c.runs}
    sweep = sweeps.pop() if len(sweeps) == 1 else None
    return plural(len(c.runs), "run") + (f" of {'/'.join(sweep.parts[-2:])}" if sweep else "")


def _about(c: Comparison) -> str:
    where = "each run at its own end"
    if c.align_at is not None:
        where = f"compared at {c.align_at:,.10g} {UNITS[c.align]}"
    folded = len(c.entries) != len(c.runs)
    settings = f"{plural(len(c.entries), 'setting')}, seeds folded · " if folded else ""
    ordered = f"{settings}ordered by {c.metric} · {where}"
    return ordered[0].upper() + ordered[1:]


def _answer(c: Comparison) -> str:
    """Return the words of the comparison: the result, what must be known beside it, and folded what
    both rest on."""
    if not c.sentences:
        return ""
    beside, below = ("".join(f"<p>{escape(t)}</p>\n" for t in lines) for lines in (c.notes, c.why))
    folded = f"<details>\n<summary>Why</summary>\n{below}</details>\n" if below else ""
    headline = f'<p class="headline">{escape(c.headline)}</p>\n'
    return f'<section class="answer">\n{headline}{beside}{folded}</section>\n'


def _section(part: tuple[str, str, str, bool]) -> str:
    key, title, body, folded = part
    if not body:
        return ""
    if not folded:
        return f'<section id="{key}">\n<h2>{title}</h2>\n{body}</section>\n'
    head = f"<summary><h2>{title}</h2></summary>"
    return f'<details class="part" id="{key}">\n{head}\n{body}</details>\n'


def _figure(plot: Plot) -> str:
    controls = "".join(_control(name, choice) for name, choice in plot.choices.items())
    title = escape(plot.title)
    return (
        f'<figure data-plot="{escape(plot.name)}">\n<h3>{title}</h3>\n<div '
        f'class="controls">{controls}</div>\n'
        f'<div class="plot" role="img" aria-label="{title}"><p>{MISSING}</p></div>\n'
        f"<figcaption>{escape(plot.caption)}</figcaption>\n</figure>\n"
    )


def _control(name: str, choice: Choice) -> str:
    title, words = escape(choice.title), [escape(word) for word, _ in choice.options]
    if choice.slider:
        spoken = f'<output data-words="{escape(json.dumps(words))}">{words[choice.chosen]}</output>'
        slider = (
            f'<input type="range" name="{name}" max="{len(words) - 1}" '
            f'value="{choice.chosen}" autocomplete="off">'
        )
        return f"<label>{title} {slider}{spoken}</label>\n"
    options = "".join(
        f'<option value="{i}"{" selected" if i == choice.chosen else ""}>{word}</option>'
        for i, word in enumerate(words)
    )
    return f'<label>{title} <select name="{name}" autocomplete="off">{options}</select></label>\n'


CLIP = (
    "At other limits, by the norms that each run has seen: under another limit it would have taken "
    "another path."
)
NOISE = (
    "In sequences (McCandlish et al. 2018, the simple estimator): a batch far below it trains "
    "nearly as well per token as a small one, one far above it wastes tokens."
)


def muted(html: str) -> str:
    return f'<p class="muted">{html}</p>\n'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], about: str, kind: str = "") -> str:
    """Return a table that scrolls inside its own box, which the keyboard can reach; heads and cells
    are HTML. The first cell of a row is its head."""
    lines = [f'<tr><th scope="row">{first}</th>{"".join(cells)}</tr>\n' for first, *cells in rows]
    head = "".join(f'<th scope="col">{title}</th>' for title in heads)
    box = f'<div class="box" role="region" tabindex="0" aria-label="{about}">'
    return (
        f'{box}\n<table class="{kind}">\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        f"{''.join(lines)}</tbody></table>\n</div>\n"
    )


def cell(text: str, value: Any = None) -> str:
    """Return a cell; `value` is what the column is sorted by."""
    kind = "number"
    if len(text) > 40:
        kind = "words"
    elif number(value) is None:  # a short word never breaks
        kind = "word" if len(text) <= 16 else "value"
    data = "" if value is None else f' data-value="{escape(str(value))}"'
    return f'<td class="{kind}"{data}>{escape(text)}</td>'


def figures(*values: Any) -> list[str]:
    """Return a cell for each number, empty where one is not known."""
    return [cell("" if number(v) is None else shown(v, 3), v) for v in values]


def share(value: Any, before: str = "") -> str:
    return cell("" if number(value) is None else f"{before}{value:.1%}", value)


def swatch(colour: str, words: str) -> str:
    return f'<span class="swatch" style="background:{colour}"></span> {escape(words)}'


def runs(c: Comparison) -> Iterator[tuple[str, Record]]:
    """Yield every run behind its name, which stands beside the colour of its curves."""
    for entry, look in looks(c).items():
        for record in entry.runs:
            yield swatch(look.colour, entry.label_of(record)), record


def run_table(c: Comparison) -> str:
    """Return a row an entry, best first, the leading one with a star: its standing, settings and
    figures, as far as they are not alike in all."""
    if not c.entries:
        return ""
    found = columns_of(c)
    metric = [found.pop(c.metric)] if c.metric in found else []
    kept, same = list(metric), []
    for column in found.values():
        if len(c.entries) > 1 and len(set(column.cells)) == 1:
            same += [f"{column.title} {column.cells[0]}"] * bool(column.cells[0])
        elif all(column.cells != m.cells for m in metric):
            kept.append(column)
    rows = []
    for i, (e, look) in enumerate(looks(c).items()):
        star = ' <b class="star">★</b>' if look.lead else ""
        note = f'<small class="note">{escape(e.note)}</small>' if e.note else ""
        cells = [cell(k.cells[i], k.values[i] if k.values else None) for k in kept]
        rows.append([f"{swatch(look.colour, e.label)}{star}{note}", *cells])
    titles = ["setting", *(column.title for column in kept)]
    heads = [f'<button type="button">{escape(title)}</button>' for title in titles]
    alike = muted(f"Alike in all: {escape(', '.join(same))}.") if same else ""
    return table(heads, rows, "Runs", "runs") + alike


def clip_table(c: Comparison) -> str:
    """Show how often each run was clipped, and how often other limits would have clipped it."""
    rows = []
    for words, record in runs(c):
        if clip := as_dict(record.status.get("clip")):
            by_norm = record.config.get("clip.kind", "norm") == "norm"
            quantiles, limits = as_dict(clip.get("quantiles")), clip.get("table")
            limit = setting(record.config.get("clip.max_norm") if by_norm else None)
            cells = [cell(limit), share(clip.get("share"))]
            cells += figures(*(quantiles.get(q) for q in ("50", "90", "99")))
            for at in map(as_dict, limits if isinstance(limits, list) else []):
                cells.append(share(at.get("share"), f"{setting(at.get('limit'))}: "))
            rows.append([words, *cells])
    heads = ["Run", "Limit", "Steps clipped", "Norm: median", "90 %", "99 %"]
    heads += ["At another limit"] * (max(map(len, rows), default=0) - len(heads))
    return muted(CLIP) + table(heads, rows, "Clipping of each run") if rows else ""


def noise_table(c: Comparison) -> str:
    """Show the gradient noise scale of each run beside its batch."""
    rows = []
    for words, record in runs(c):
        if noise := as_dict(record.status.get("noise")):
            known = [noise.get(key) for key in ("noise_scale", "low", "high", "measurements")]
            cells = figures(record.facts.get("real_batch_size"), *known)
            rows.append([words, *cells, cell(str(noise.get("verdict") or ""))])
    heads = ("Run", "Real batch", "Noise scale", "low", "high", "Measurements", "Verdict")
    return muted(NOISE) + table(heads, rows, "Noise scale of each run") if rows else ""
