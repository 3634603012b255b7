"""Write the comparison as an HTML page that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path

from plotly.offline import get_plotlyjs

from llmexp import fileio
from llmexp.compare import pagetables
from llmexp.compare.plot_settings import maps, over_keys
from llmexp.compare.plot_training import losses, others
from llmexp.compare.plotting import Choice, Plot, templates
from llmexp.compare.records import Comparison
from llmexp.labels import plural

LIBRARY = "plotly.min.js"
UNITS = {"tokens": "tokens", "steps": "steps", "time": "s of training"}
MISSING = (
    f"This figure needs the file {LIBRARY} beside the page. "
    "A page in one file, to be sent around: llmexp compare FOLDER --html page.html"
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
        ("table", "Runs", pagetables.run_table(comparison), False),
        ("other-curves", "Other curves", drawn.get("others", ""), True),
        ("clip", "Gradient clipping", pagetables.clip_table(comparison), True),
        ("noise", "Gradient noise scale", pagetables.noise_table(comparison), True),
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
