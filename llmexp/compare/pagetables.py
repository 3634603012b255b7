"""Make the tables of the page as HTML. Whatever comes from a run is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from llmexp.compare.figures import difference, figure, number, shown
from llmexp.compare.plotting import looks
from llmexp.compare.records import Column, Comparison, Entry, Record
from llmexp.labels import short_keys
from llmexp.labels import shown as setting

CLIP = (
    '<p class="muted">At other limits, by the norms that each run has seen: under another limit it '
    "would have taken "
    "another path.</p>\n"
)
NOISE = (
    '<p class="muted">In sequences (McCandlish et al. 2018, the simple estimator): a batch far '
    "below it trains nearly "
    "as well per token as a small one, one far above it wastes tokens.</p>\n"
)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], about: str, kind: str = "") -> str:
    """Return a table that scrolls inside its own box, which the keyboard can reach; heads and cells
    are HTML."""
    lines = [f'<tr><th scope="row">{first}</th>{"".join(cells)}</tr>\n' for first, *cells in rows]
    head = "".join(f'<th scope="col">{title}</th>' for title in heads)
    box = (
        f'<div class="box" role="region" tabindex="0" aria-label="{escape(about)}">\n<table '
        f'class="{kind}">\n'
    )
    return (
        f"{box}<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody></table>\n</div>\n"
        if lines
        else ""
    )


def cell(html: str, kind: str = "", value: Any = None) -> str:
    """Return a cell; `value` is what the column is sorted by."""
    data = "" if value is None else f' data-value="{escape(str(value))}"'
    return f'<td class="{kind}"{data}>{html}</td>'


def number_cell(value: Any, digits: int = 3, percent: bool = False) -> str:
    if number(value) is None:
        return cell("", "number")
    return cell(f"{100 * value:.1f} %" if percent else shown(value, digits), "number", value)


def _setting(value: Any) -> str:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return cell(escape(setting(value)), "number" if numeric else "value", setting(value))


def runs(c: Comparison) -> Iterator[tuple[str, Record]]:
    """Yield every run behind its name, which stands beside the colour of its curves."""
    for entry, look in zip(c.entries, looks(c), strict=True):
        for record in entry.runs:
            words = entry.label if len(entry.runs) == 1 else record.name
            yield (
                f'<span class="swatch" style="background:{look.colour}"></span> {escape(words)}',
                record,
            )


def run_table(c: Comparison) -> str:
    """Return a row an entry, best first, the leading one with a star: its standing, settings and
    figures, as far as they are not alike in all."""
    metrics = [column for column in c.columns if column.key == c.metric]
    others = [column for column in c.columns if column.key != c.metric]
    short = short_keys(c.differing)
    columns = {
        **{escape(column.title): [_figure(e, column) for e in c.entries] for column in metrics},
        "Standing": [cell(escape(e.standing.mark)) for e in c.entries],
        "Difference": [_difference(e) for e in c.entries],
        **{f'<abbr title="{escape(key)}">{escape(short[key])}</abbr>': [
            _setting(e.values[key]) if key in e.values else cell("") for e in c.entries] for key in c.differing},  # noqa: E501
        **{escape(column.title): [_figure(e, column) for e in c.entries] for column in others},
        "Seeds": [number_cell(len(e.runs)) for e in c.entries],
        "State": [cell(escape(e.state),
        "ok" if e.state == "finished" else "warn") for e in c.entries],
    }  # fmt: skip
    metric = columns.get(escape(metrics[0].title)) if metrics else None
    several = len(c.entries) > 1
    alike = {
        head
        for head, cells in columns.items()
        if several and len(set(cells)) == 1 and cells is not metric
    }
    told = [
        head
        for head, cells in columns.items()
        if head not in alike and (cells is metric or cells != metric)
    ]
    rows = []
    for i, (e, look) in enumerate(zip(c.entries, looks(c), strict=True)):
        star = ' <b class="star">★</b>' if look.lead else ""
        note = f'<small class="note">{escape(e.note)}</small>' if e.note else ""
        first = (
            f'<span class="swatch" style="background:{look.colour}"></span> '
            f"{escape(e.label)}{star}{note}"
        )
        rows.append([first, *(columns[head][i] for head in told)])
    values = {head: re.sub("<[^>]*>", "", columns[head][0]) for head in columns if head in alike}
    same = ", ".join(f"{head} {value}" for head, value in values.items() if value)
    heads = [f'<button type="button">{head}</button>' for head in ["Setting", *told]]
    return table(heads, rows, "Runs", "runs") + (
        f'<p class="muted">Alike in all: {same}.</p>\n' if same else ""
    )


def _difference(entry: Entry) -> str:
    basis = f" <small>{escape(entry.standing.basis)}</small>" if entry.standing.basis else ""
    return cell(f"{difference(entry)}{basis}", "number", entry.standing.difference)


def _figure(entry: Entry, column: Column) -> str:
    return cell(figure(entry, column), "number", entry.figures.get(column.key))


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def clip_table(c: Comparison) -> str:
    """Show how often each run was clipped, and how often other limits would have clipped it."""
    rows = []
    for words, record in runs(c):
        if not (clip := as_dict(record.status.get("clip"))):
            continue
        quantiles, limits = as_dict(clip.get("quantiles")), clip.get("table")
        limit = (
            record.config.get("clip.max_norm")
            if record.config.get("clip.kind", "norm") == "norm"
            else None
        )
        cells = [_setting(limit), number_cell(clip.get("share"), percent=True)]
        cells += [number_cell(quantiles.get(q)) for q in ("50", "90", "99")]
        cells += [
            _share_at(row) for row in map(as_dict, limits if isinstance(limits, list) else [])
        ]
        rows.append([words, *cells])
    heads = ["Run", "Limit", "Steps clipped", "Norm: median", "90 %", "99 %"]
    most = max((len(row) for row in rows), default=0)
    heads += ["At another limit"] * (most - len(heads))
    return CLIP + table(heads, rows, "Clipping of each run") if rows else ""


def _share_at(row: dict[str, Any]) -> str:
    limit, share = number(row.get("limit")), number(row.get("share"))
    return cell(
        "" if limit is None or share is None else f"{shown(limit, 4)}: {100 * share:.1f} %",
        "number",
    )


def noise_table(c: Comparison) -> str:
    """Show the gradient noise scale of each run beside its batch."""
    rows = []
    for words, record in runs(c):
        if noise := as_dict(record.status.get("noise")):
            cells = [number_cell(record.facts.get("real_batch_size"))]
            cells += [
                number_cell(noise.get(key))
                for key in ("noise_scale", "low", "high", "measurements")
            ]
            rows.append([words, *cells, cell(escape(str(noise.get("verdict") or "")), "words")])
    heads = ("Run", "Real batch", "Noise scale", "low", "high", "Measurements", "Verdict")
    return NOISE + table(heads, rows, "Noise scale of each run") if rows else ""
