"""The tables of the page as HTML: the runs, what sets each apart, and where it ran. What is no figure is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from llmexp.compare.figures import setting
from llmexp.compare.pagedata import ended, plain, runs
from llmexp.compare.records import Column, Comparison, Entry, Record
from llmexp.compare.table import shown

# Of run.json: what tells one machine and installation from another. `versions` holds one entry a package.
FACTS = (
    "device_name", "device", "world_size", "nnodes", "parallelism", "threads_per_rank", "precision", "loss_kernel",
    "commit", "data", "tokenizer",
)  # fmt: skip
STATES = ("queued", "running", "finished", "failed", "preempted", "cut", "infeasible")


def counted(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def _key(key: str) -> str:
    section, _, name = key.rpartition(".")
    return f"<small>{escape(section)}</small>{_breakable(name)}" if section else _breakable(key)


def _state(state: str) -> str:
    known = state if state in STATES else ""
    return f'<span class="state {known}">{escape(state)}</span>'


def name_cell(name: str, entry: int) -> str:
    """A name with the colour of its curves; a long one is broken at its commas first."""
    parts = "".join(f'<span class="part">{_breakable(part)}</span>' for part in re.findall(r"[^,]*,|[^,]+", name))
    return f'<span class="name"><span class="swatch" data-entry="{entry}"></span><span>{parts}</span></span>'


def _breakable(text: str) -> str:
    return escape(text).replace("_", "_<wbr>")


def _head(titles: Sequence[tuple[str, str]]) -> str:
    """Column titles that sort: (html, attributes)."""
    cells = "".join(f'<th scope="col" {more}><button type="button">{title}</button></th>' for title, more in titles)
    return f"<thead><tr>{cells}</tr></thead>\n"


def plain_table(heads: Sequence[str], rows: Iterable[str], label: str) -> str:
    cells = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return box(f"<table>\n<thead><tr>{cells}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody></table>", label)


def figure_cell(value: Any, digits: int = 3, percent: bool = False) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return '<td class="number"></td>'
    return f'<td class="number">{f"{100 * value:.1f} %" if percent else shown(value, digits)}</td>'


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def value_cell(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f'<td{" class=number" if number else ""} data-value="{escape(plain(value))}">{escape(setting(value))}</td>'


def _entry_cell(entry: Entry, column: Column, best: float | None) -> str:
    value = entry.figures.get(column.key)
    if value is None:
        return '<td class="number" data-value=""></td>'
    interval = entry.intervals.get(column.key)
    text = shown(value, column.digits)
    if interval is not None:
        text += f' <small title="95 % interval">± {(interval[1] - interval[0]) / 2:.2g}</small>'
    mark = " best" if value == best and ended(entry) else ""
    return f'<td class="number{mark}" data-value="{value!r}">{text}</td>'


def _best(comparison: Comparison, column: Column) -> float | None:
    # What has not come to its end is not the fastest for having done the least.
    found = [entry.figures[column.key] for entry in comparison.entries if column.key in entry.figures and ended(entry)]
    if column.better not in ("lower", "higher") or len(set(found)) < 2:
        return None
    return min(found) if column.better == "lower" else max(found)


def run_table(comparison: Comparison) -> str:
    entries = comparison.entries
    seeds = any(len(entry.runs) > 1 for entry in entries)

    def column_head(column: Column) -> tuple[str, str]:
        order = {"lower": "ascending", "higher": "descending"}.get(column.better, "none")
        order = order if column.key == comparison.metric else "none"
        return escape(column.title), f'class="number" aria-sort="{order}" data-better="{escape(column.better)}"'

    titles = [("Run", 'aria-sort="none"'), ("State", 'aria-sort="none"')]
    titles += [(_key(key), 'aria-sort="none"') for key in comparison.differing]
    titles += [column_head(column) for column in comparison.columns]
    titles += [("Seeds", 'class="number" aria-sort="none"')] if seeds else []
    best = {column.key: _best(comparison, column) for column in comparison.columns}
    rows = []
    for number, entry in enumerate(entries):
        note = f'<small class="note">{escape(entry.note)}</small>' if entry.note else ""
        cells = [f'<th scope="row" data-value="{escape(entry.name)}">{name_cell(entry.name, number)}{note}</th>']
        cells += [f"<td>{_state(entry.state)}</td>"]
        cells += [value_cell(entry.values[k]) if k in entry.values else "<td></td>" for k in comparison.differing]
        cells += [_entry_cell(entry, column, best[column.key]) for column in comparison.columns]
        cells += [f'<td class="number">{len(entry.runs)}</td>'] if seeds else []
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return box(f'<table class="runs">\n{_head(titles)}<tbody>\n{"".join(rows)}</tbody></table>', "Runs")


def box(table: str, label: str) -> str:
    """A table that scrolls inside its own box, which the keyboard can reach."""
    return f'<div class="box" role="region" tabindex="0" aria-label="{escape(label)}">\n{table}\n</div>\n'


def config_table(comparison: Comparison) -> str:
    records = list(runs(comparison))
    keys = list(dict.fromkeys(key for _, record in records for key in record.config))
    texts = {k: [plain(r.config[k]) if k in r.config else None for _, r in records] for k in keys}
    common = {key: values[0] for key, values in texts.items() if len(set(values)) == 1}
    rows = []
    for i, (number, record) in enumerate(records):
        found = [(key, texts[key][i]) for key in keys if key not in common]
        chips = " ".join(f"<code>{escape(k if v is None else f'{k}={v}')}</code>{_absent(v)}" for k, v in found)
        if chips:
            rows.append(
                f'<tr><th scope="row">{name_cell(record.name, number)}</th><td class="chips">{chips}</td></tr>\n'
            )
    lines = [
        f"<tr><td><code>{escape(k)}</code></td><td><code>{escape(str(v))}</code></td></tr>\n" for k, v in common.items()
    ]
    apart = plain_table(("Run", "What sets it apart"), rows, "Configuration of each run") if rows else ""
    table = plain_table(("Key", "Value"), lines, "Common configuration") if lines else ""
    what = (
        f"{counted(len(common), 'key')} with the same value in all runs"
        if len(records) > 1
        else counted(len(common), "key")
    )
    return apart + (f"<details><summary>{what}</summary>\n{table}</details>\n" if table else "")


def _absent(value: str | None) -> str:
    return "<small>absent</small>" if value is None else ""


def _facts(record: Record) -> dict[str, str]:
    found = {key: plain(record.facts[key]) for key in FACTS if record.facts.get(key) is not None}
    if record.status.get("host") is not None:
        found["host"] = plain(record.status["host"])
    return found | {key: plain(value) for key, value in as_dict(record.facts.get("versions")).items()}


def environment_table(comparison: Comparison) -> str:
    facts = [(record.name, _facts(record)) for _, record in runs(comparison)]
    rows = []
    for key in dict.fromkeys(key for _, found in facts for key in found):
        holders: dict[str | None, list[str]] = {}
        for name, found in facts:
            holders.setdefault(found.get(key), []).append(name)
        if len(holders) == 1:
            rows.append(f"<tr><th scope='row'>{escape(key)}</th><td>{escape(str(next(iter(holders))))}</td></tr>\n")
            continue
        values = "".join(
            f"<div>{escape(value or '')}{_absent(value)} <small>{escape(_some(names))}</small></div>"
            for value, names in holders.items()
        )
        rows.append(
            f"<tr><th scope='row'>{escape(key)} <span class='differs'>differs</span></th><td>{values}</td></tr>\n"
        )
    return plain_table(("Fact", "Value"), rows, "Environment of the runs") if rows else ""


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 4 else ""
    return f"({', '.join(names[:3] if more else names)}{more})"
