"""The comparison as one HTML file that asks the network for nothing: it opens from a mail attachment."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

from llmexp.compare.pagedata import chart_data, clip_table, runs
from llmexp.compare.pagetables import (
    as_dict,
    config_table,
    counted,
    environment_table,
    figure_cell,
    name_cell,
    plain_table,
    run_table,
    value_cell,
)
from llmexp.compare.records import Comparison

BATCH = {
    "iso-batch": "the real batch is held (iso-batch)",
    "scaling": "the real batch is scaled",
    "same": "one real batch size",
    "mixed": "several real batch sizes",
}
UNITS = {"tokens": "tokens", "steps": "steps", "time": "s of training"}


def page(comparison: Comparison) -> str:
    """The whole page: answer, table, curves and what else there are data for, with styles, scripts and plotly inside.

    What comes from runs is escaped; besides, the page forbids every request and every script but its own two, by
    their SHA-256 (Content Security Policy level 3), so that a label could not do anything if it were not.
    """
    data = chart_data(comparison)
    drawn = any(key in data for key in ("curves", "heat", "parallel", "clip", "noise"))
    sections = [
        ("table", "Runs", run_table(comparison)),
        ("curves", "Curves", _curves(comparison, data)),
        ("heat", "Heat map", _heat(data)),
        (
            "parallel",
            "Parallel coordinates",
            _plot("parallel", "Swept values and the figure of each run", "wide", data),
        ),
        ("clip", "Gradient clipping", _clip(comparison, data)),
        ("noise", "Gradient noise scale", _noise(comparison, data)),
        ("config", "Configuration", config_table(comparison)),
        ("environment", "Environment", environment_table(comparison)),
        ("problems", "Problems", _list(comparison.problems)),
    ]
    sections = [(key, title, body) for key, title, body in sections if body]
    style, script = _asset("page.css"), _asset("page.js")
    plotly = _plotly() if drawn else ""
    policy = (
        f"default-src 'none'; script-src {_hash(script)} {_hash(plotly)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    packed = "".join(
        f'<script type="text/plain" id="{key}">{_packed(text)}</script>\n'
        for key, text in (("data", json.dumps(data, separators=(",", ":"), allow_nan=False)), ("plotly", plotly))
    )
    nav = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in sections)
    parts = "".join(
        f'<section aria-labelledby="{key}">\n<h2 id="{key}">{title}</h2>\n{body}</section>\n'
        for key, title, body in sections
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(_title(comparison))}</title>\n<style>\n{style}</style>\n</head>\n"
        f'<body data-entries="{len(comparison.entries)}">\n'
        f'<header>\n<h1>{escape(_title(comparison))}</h1>\n<p class="muted">{escape(_about(comparison))}</p>\n'
        f'<nav aria-label="Parts of this page"><ul>{nav}</ul></nav>\n</header>\n<main>\n'
        f"{_answer(comparison)}{parts}</main>\n{packed if drawn else ''}<script>{script}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (files("llmexp.compare") / name).read_text(encoding="utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    return str(get_plotlyjs())


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _packed(text: str) -> str:
    # mtime: the same comparison gives the same bytes.
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _title(comparison: Comparison) -> str:
    sweeps = {r.sweep for _, r in runs(comparison)}
    sweep = sweeps.pop() if len(sweeps) == 1 else None
    of = f" of {'/'.join(sweep.parts[-2:])}" if sweep else ""
    total = sum(len(entry.runs) for entry in comparison.entries)
    return f"{counted(total, 'run')}{of}"


def _about(comparison: Comparison) -> str:
    at = comparison.align_at
    where = "each run at its own end" if at is None else f"compared at {at:,.10g} {UNITS.get(comparison.align, '')}"
    batch = BATCH.get(comparison.batch, comparison.batch)
    total, entries = sum(len(entry.runs) for entry in comparison.entries), len(comparison.entries)
    folded = [f"{counted(entries, 'setting')}, seeds folded"] if entries != total else []
    words = [*folded, f"ordered by {comparison.metric}", where, *([batch] if batch else [])]
    return (text := " · ".join(words))[:1].upper() + text[1:]


def _answer(comparison: Comparison) -> str:
    if not comparison.sentences:
        return ""
    lines = "".join(f"<p>{escape(sentence)}</p>\n" for sentence in comparison.sentences)
    return f'<section class="answer" aria-labelledby="answer">\n<h2 id="answer">Answer</h2>\n{lines}</section>\n'


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>\n" for line in lines)
    return f"<ul>\n{items}</ul>\n" if items else ""


def _plot(key: str, label: str, more: str, data: dict[str, Any]) -> str:
    if key not in data:
        return ""
    return (
        f'<div class="{more}"><div class="plot" id="{key}-plot" role="img" aria-label="{escape(label)}"></div></div>\n'
    )


def _options(options: Iterable[tuple[Any, str]], chosen: Any = None) -> str:
    return "".join(
        f'<option value="{escape(str(value))}"{" selected" if value == chosen else ""}>{escape(title)}</option>'
        for value, title in options
    )


def _curves(comparison: Comparison, data: dict[str, Any]) -> str:
    if "curves" not in data:
        return ""
    quantities = list(data["quantities"].items())
    if {"train/loss", "val/loss"} <= set(data["quantities"]):
        # Of many runs the training losses are a fog, and slow to draw: there they are the second choice.
        quantities.insert(0, ("loss", "Loss, training and validation"))
        if len(comparison.entries) > 40:
            quantities.sort(key=lambda quantity: quantity[0] != "val/loss")
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-entry="{number}">{name_cell(entry.name, number)}</button>\n'
        for number, entry in enumerate(comparison.entries)
    )
    return (
        '<div class="controls">\n'
        f'<label>Show <select id="quantity">{_options(quantities)}</select></label>\n'
        f'<label>over <select id="axis">{_options(data["axes"].items(), comparison.align)}</select></label>\n'
        '<label><input type="checkbox" id="log"> logarithmic</label>\n'
        '<button type="button" class="plain" id="show-all">All runs</button>\n</div>\n'
        f'<div class="legend" role="group" aria-label="Runs shown">\n{buttons}</div>\n'
        f"{_plot('curves', 'Curves of the chosen quantity', '', data)}"
        '<p class="muted controls">Click a name to hide or show its curve; double click, or Shift and Enter, to see it '
        "alone.</p>\n"
    )


def _heat(data: dict[str, Any]) -> str:
    if "heat" not in data:
        return ""
    figures = data["heat"]["figures"]
    chosen = next((i for i, figure in enumerate(figures) if figure["key"] == data["heat"]["metric"]), 0)
    options = _options([(i, figure["title"]) for i, figure in enumerate(figures)], chosen)
    return (
        f'<div class="controls"><label>Show <select id="figure">{options}</select></label></div>\n'
        f"{_plot('heat', 'The chosen figure for each pair of swept values', '', data)}"
        '<p class="muted">The stronger the colour, the better, where one direction is better; the best cell is framed.'
        "</p>\n"
    )


def _clip(comparison: Comparison, data: dict[str, Any]) -> str:
    rows, lines = [], []
    for number, record in runs(comparison):
        clip = as_dict(record.status.get("clip"))
        if not clip:
            continue
        quantiles = as_dict(clip.get("quantiles"))
        limit = record.config.get("clip.max_norm") if record.config.get("clip.kind", "norm") == "norm" else None
        cells = [value_cell(limit), figure_cell(clip.get("share"), percent=True), figure_cell(clip.get("steps"))]
        cells += [figure_cell(quantiles.get(q)) for q in ("50", "90", "99")]
        rows.append(f'<tr><th scope="row">{name_cell(record.name, number)}</th>{"".join(cells)}</tr>\n')
        for row in clip_table(record):
            cells = [figure_cell(row.get("limit"), 4), figure_cell(row.get("share"), percent=True)]
            cells += [figure_cell(row.get("coefficient"))]
            lines.append(f'<tr><th scope="row">{name_cell(record.name, number)}</th>{"".join(cells)}</tr>\n')
    if not rows:
        return ""
    heads = ("Run", "Limit", "Steps clipped", "Steps", "Norm: median", "90 %", "99 %")
    elsewhere = (
        '<h3>At other limits</h3>\n<p class="muted">From the norms that each run has seen, to first order: under '
        "another limit it would have taken another path.</p>\n"
        f"{_plot('clip', 'Share of steps that a limit would clip', '', data)}<details><summary>The figures</summary>\n"
        f"{plain_table(('Run', 'Limit', 'Steps clipped', 'Mean coefficient'), lines, 'At other limits')}</details>\n"
    )
    return plain_table(heads, rows, "Clipping of each run") + (elsewhere if lines else "")


def _noise(comparison: Comparison, data: dict[str, Any]) -> str:
    rows = []
    for number, record in runs(comparison):
        noise = as_dict(record.status.get("noise"))
        if not noise:
            continue
        cells = [figure_cell(record.facts.get("real_batch_size"))]
        cells += [figure_cell(noise.get(key)) for key in ("noise_scale", "low", "high", "measurements")]
        cells += [f'<td class="chips">{escape(str(noise.get("verdict") or ""))}</td>']
        rows.append(f'<tr><th scope="row">{name_cell(record.name, number)}</th>{"".join(cells)}</tr>\n')
    heads = ("Run", "Real batch", "Noise scale", "low", "high", "Measurements", "Verdict")
    table = plain_table(heads, rows, "Noise scale of each run") if rows else ""
    plot = _plot("noise", "Noise scale over training, with its band, against the real batch size", "", data)
    about = (
        '<p class="muted">In sequences (McCandlish et al. 2018, the simple estimator): a batch far below it trains '
        "nearly as well per token as a small one, one far above it wastes tokens.</p>\n"
    )
    return f"{about}{plot}{table}" if plot or table else ""
