"""Make the tables of the page as HTML. Whatever comes from a run is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from llmexp.compare.figures import difference, figure, number, shown
from llmexp.compare.plotting import looks
from llmexp.compare.records import Column, Comparison, Entry, Record, as_dict
from llmexp.labels import short_keys
from llmexp.labels import shown as setting

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


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], about: str, kind: str = "") -> str:
    """Return a table that scrolls inside its own box, which the keyboard can reach; heads and cells
    are HTML. The first cell of a row is its head."""
    lines = [f'<tr><th scope="row">{first}</th>{"".join(cells)}</tr>\n' for first, *cells in rows]
    head = "".join(f'<th scope="col">{title}</th>' for title in heads)
    box = f'<div class="box" role="region" tabindex="0" aria-label="{escape(about)}">'
    return (
        f'{box}\n<table class="{kind}">\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        f"{''.join(lines)}</tbody></table>\n</div>\n"
    )


def cell(html: str, kind: str = "", value: Any = None) -> str:
    """Return a cell; `value` is what the column is sorted by."""
    data = "" if value is None else f' data-value="{escape(str(value))}"'
    return f'<td class="{kind}"{data}>{html}</td>'


def number_cell(value: Any, digits: int = 3) -> str:
    return cell("", "number") if number(value) is None else _number(shown(value, digits), value)


def _number(html: str, value: Any = None) -> str:
    return cell(html, "number", value)


def _setting(entry: Entry, key: str) -> str:
    return _value(entry.values[key]) if key in entry.values else cell("")


def _value(value: Any) -> str:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return cell(escape(setting(value)), "number" if numeric else "value", setting(value))


def _swatch(colour: str, words: str) -> str:
    return f'<span class="swatch" style="background:{colour}"></span> {escape(words)}'


def runs(c: Comparison) -> Iterator[tuple[str, Record]]:
    """Yield every run behind its name, which stands beside the colour of its curves."""
    for entry, look in looks(c).items():
        for record in entry.runs:
            yield _swatch(look.colour, entry.label_of(record)), record


def run_table(c: Comparison) -> str:
    """Return a row an entry, best first, the leading one with a star: its standing, settings and
    figures, as far as they are not alike in all."""

    def of(columns: Iterable[Column]) -> dict[str, list[str]]:
        return {escape(col.title): [_figure(e, col) for e in c.entries] for col in columns}

    short = short_keys(c.differing)
    metric = of(column for column in c.columns if column.key == c.metric)
    columns = {
        **metric,
        "Standing": [cell(escape(e.standing.mark)) for e in c.entries],
        "Difference": [_difference(e) for e in c.entries],
    }
    for key in c.differing:
        head = f'<abbr title="{escape(key)}">{escape(short[key])}</abbr>'
        columns[head] = [_setting(e, key) for e in c.entries]
    columns |= of(column for column in c.columns if column.key != c.metric)
    columns["Seeds"] = [number_cell(len(e.runs)) for e in c.entries]
    columns["State"] = [cell(escape(e.state), _kind(e.state)) for e in c.entries]
    kept = {}
    same = []
    for head, cells in columns.items():
        if head not in metric and len(cells) > 1 and len(set(cells)) == 1:
            same.append(f"{head} {re.sub('<[^>]*>', '', cells[0])}")
        elif head in metric or cells not in metric.values():
            kept[head] = cells
    rows = []
    for i, (e, look) in enumerate(looks(c).items()):
        star = ' <b class="star">★</b>' if look.lead else ""
        note = f'<small class="note">{escape(e.note)}</small>' if e.note else ""
        first = f"{_swatch(look.colour, e.label)}{star}{note}"
        rows.append([first, *(cells[i] for cells in kept.values())])
    heads = [f'<button type="button">{head}</button>' for head in ["Setting", *kept]]
    shared = ", ".join(words for words in same if not words.endswith(" "))
    alike = muted(f"Alike in all: {shared}.") if shared else ""
    return (table(heads, rows, "Runs", "runs") if rows else "") + alike


def _kind(state: str) -> str:
    return "ok" if state == "finished" else "warn"


def _difference(entry: Entry) -> str:
    basis = f" <small>{escape(entry.standing.basis)}</small>" if entry.standing.basis else ""
    return _number(f"{difference(entry)}{basis}", entry.standing.difference)


def _figure(entry: Entry, column: Column) -> str:
    return _number(figure(entry, column), entry.figures.get(column.key))


def _percent(value: Any) -> str:
    return _number(f"{100 * value:.1f} %", value) if number(value) is not None else _number("")


def clip_table(c: Comparison) -> str:
    """Show how often each run was clipped, and how often other limits would have clipped it."""
    rows = []
    for words, record in runs(c):
        if clip := as_dict(record.status.get("clip")):
            by_norm = record.config.get("clip.kind", "norm") == "norm"
            quantiles, limits = as_dict(clip.get("quantiles")), clip.get("table")
            cells = [_value(record.config.get("clip.max_norm") if by_norm else None)]
            cells.append(_percent(clip.get("share")))
            cells += [number_cell(quantiles.get(q)) for q in ("50", "90", "99")]
            cells += [_share_at(as_dict(at)) for at in (limits if isinstance(limits, list) else [])]
            rows.append([words, *cells])
    heads = ["Run", "Limit", "Steps clipped", "Norm: median", "90 %", "99 %"]
    heads += ["At another limit"] * (max(map(len, rows), default=0) - len(heads))
    return muted(CLIP) + table(heads, rows, "Clipping of each run") if rows else ""


def _share_at(row: dict[str, Any]) -> str:
    limit, share = number(row.get("limit")), number(row.get("share"))
    if limit is None or share is None:
        return _number("")
    return _number(f"{shown(limit, 4)}: {100 * share:.1f} %")


def noise_table(c: Comparison) -> str:
    """Show the gradient noise scale of each run beside its batch."""
    rows = []
    for words, record in runs(c):
        if noise := as_dict(record.status.get("noise")):
            figures = [noise.get(key) for key in ("noise_scale", "low", "high", "measurements")]
            cells = map(number_cell, [record.facts.get("real_batch_size"), *figures])
            verdict = cell(escape(str(noise.get("verdict") or "")), "words")
            rows.append([words, *cells, verdict])
    heads = ("Run", "Real batch", "Noise scale", "low", "high", "Measurements", "Verdict")
    return muted(NOISE) + table(heads, rows, "Noise scale of each run") if rows else ""
