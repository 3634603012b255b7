"""Make the tables of the page as HTML. Whatever comes from a run is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from llmexp.compare.figures import number, shown
from llmexp.compare.plotting import looks
from llmexp.compare.records import Comparison, Record, as_dict
from llmexp.compare.table import columns_of
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
    kind = "words" if len(text) > 40 else "value" if number(value) is None else "number"
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
