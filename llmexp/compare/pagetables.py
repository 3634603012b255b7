"""The tables of the page as HTML. Whatever comes from a run is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from llmexp.compare.figures import figure, shown, with_interval
from llmexp.compare.plotting import looks
from llmexp.compare.records import Column, Comparison, Entry, Record
from llmexp.labels import short_keys
from llmexp.labels import shown as setting

# Of run.json: what tells one machine and installation from another. `versions` holds one entry a package.
FACTS = (
    "device_name", "device", "world_size", "nnodes", "parallelism", "threads_per_rank", "precision", "loss_kernel",
    "commit", "data", "tokenizer",
)  # fmt: skip
CLIP = ("Run", "Limit", "Steps clipped", "Steps", "Norm: median", "90 %", "99 %")
ELSEWHERE = (
    '<h3>At other limits</h3>\n<p class="muted">From the norms that each run has seen, to first order: under another '
    "limit it would have taken another path.</p>\n"
)
NOISE = (
    '<p class="muted">In sequences (McCandlish et al. 2018, the simple estimator): a batch far below it trains nearly '
    "as well per token as a small one, one far above it wastes tokens.</p>\n"
)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], about: str, kind: str = "") -> str:
    """A table that scrolls inside its own box, which the keyboard can reach; heads and cells are HTML."""
    lines = [f'<tr><th scope="row">{first}</th>{"".join(cells)}</tr>\n' for first, *cells in rows]
    head = "".join(f'<th scope="col">{title}</th>' for title in heads)
    box = f'<div class="box" role="region" tabindex="0" aria-label="{escape(about)}">\n<table class="{kind}">\n'
    return f"{box}<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody></table>\n</div>\n" if lines else ""


def cell(html: str, kind: str = "", value: Any = None) -> str:
    """`value` is what the column is sorted by."""
    data = "" if value is None else f' data-value="{escape(str(value))}"'
    return f'<td class="{kind}"{data}>{html}</td>'


def number_cell(value: Any, digits: int = 3, percent: bool = False) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return cell("", "number")
    return cell(f"{100 * value:.1f} %" if percent else shown(value, digits), "number", value)


def _setting(value: Any) -> str:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return cell(escape(setting(value)), "number" if numeric else "value", setting(value))


def runs(c: Comparison) -> Iterator[tuple[Entry, str, Record]]:
    """Every run with its entry, and its name beside the colour of its curves."""
    for entry, look in zip(c.entries, looks(c), strict=True):
        for record in entry.runs:
            words = entry.label if len(entry.runs) == 1 else record.name
            yield entry, f'<span class="swatch" style="background:{look.colour}"></span> {escape(words)}', record


def run_table(c: Comparison) -> str:
    """A row an entry, best first, the leading one with a star: its standing, its settings and its figures, as far as
    they are not alike in all."""
    metrics = [column for column in c.columns if column.key == c.metric]
    others = [column for column in c.columns if column.key != c.metric]
    short = short_keys(c.differing)
    columns = {
        **{escape(column.title): [_figure(e, column) for e in c.entries] for column in metrics},
        "Standing": [cell(escape(e.standing.mark)) for e in c.entries],
        "Difference": [_difference(e) for e in c.entries],
        **{f'<abbr title="{escape(key)}">{escape(short[key])}</abbr>': [
            _setting(e.values[key]) if key in e.values else cell("") for e in c.entries] for key in c.differing},
        **{escape(column.title): [_figure(e, column) for e in c.entries] for column in others},
        "Seeds": [number_cell(len(e.runs)) for e in c.entries],
        "State": [cell(escape(e.state), "ok" if e.state == "finished" else "warn") for e in c.entries],
    }  # fmt: skip
    metric = columns.get(escape(metrics[0].title)) if metrics else None
    several = len(c.entries) > 1
    alike = {head for head, cells in columns.items() if several and len(set(cells)) == 1 and cells is not metric}
    told = [head for head, cells in columns.items() if head not in alike and (cells is metric or cells != metric)]
    rows = []
    for i, (e, look) in enumerate(zip(c.entries, looks(c), strict=True)):
        star = ' <b class="star">★</b>' if look.lead else ""
        note = f'<small class="note">{escape(e.note)}</small>' if e.note else ""
        first = f'<span class="swatch" style="background:{look.colour}"></span> {escape(e.label)}{star}{note}'
        rows.append([first, *(columns[head][i] for head in told)])
    values = {head: re.sub("<[^>]*>", "", columns[head][0]) for head in columns if head in alike}
    same = ", ".join(f"{head} {value}" for head, value in values.items() if value)
    heads = [f'<button type="button">{head}</button>' for head in ["Setting", *told]]
    return table(heads, rows, "Runs", "runs") + (f'<p class="muted">Alike in all: {same}.</p>\n' if same else "")


def _difference(entry: Entry) -> str:
    stands = entry.standing
    if stands.difference is None:
        return cell("", "number")
    words = with_interval(abs(stands.difference), stands.half, 2)
    sign = "+" if stands.difference > 0 else "−" if stands.difference < 0 else ""
    return cell(f"{sign}{words} <small>{escape(stands.basis)}</small>", "number", stands.difference)


def _figure(entry: Entry, column: Column) -> str:
    return cell(figure(entry, column), "number", entry.figures.get(column.key))


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def clip_tables(c: Comparison) -> str:
    """How often each run was clipped, and how often other limits would have."""
    rows, others = [], []
    for _, words, record in runs(c):
        if not (clip := as_dict(record.status.get("clip"))):
            continue
        quantiles, found = as_dict(clip.get("quantiles")), clip.get("table")
        limit = record.config.get("clip.max_norm") if record.config.get("clip.kind", "norm") == "norm" else None
        cells = [_setting(limit), number_cell(clip.get("share"), percent=True), number_cell(clip.get("steps"))]
        rows.append([words, *cells, *(number_cell(quantiles.get(q)) for q in ("50", "90", "99"))])
        for row in map(as_dict, found if isinstance(found, list) else []):
            cells = [number_cell(row.get("limit"), 4), number_cell(row.get("share"), percent=True)]
            others.append([words, *cells, number_cell(row.get("coefficient"))])
    elsewhere = table(("Run", "Limit", "Steps clipped", "Mean coefficient"), others, "At other limits")
    return table(CLIP, rows, "Clipping of each run") + (ELSEWHERE + elsewhere if elsewhere else "")


def noise_table(c: Comparison) -> str:
    """The gradient noise scale of each run against its batch."""
    rows = []
    for _, words, record in runs(c):
        if noise := as_dict(record.status.get("noise")):
            cells = [number_cell(record.facts.get("real_batch_size"))]
            cells += [number_cell(noise.get(key)) for key in ("noise_scale", "low", "high", "measurements")]
            rows.append([words, *cells, cell(escape(str(noise.get("verdict") or "")), "words")])
    heads = ("Run", "Real batch", "Noise scale", "low", "high", "Measurements", "Verdict")
    return NOISE + table(heads, rows, "Noise scale of each run") if rows else ""


def config_table(c: Comparison) -> str:
    return _told_apart([(entry.label, record.config) for entry, _, record in runs(c)], "Configuration of the runs")


def environment_table(c: Comparison) -> str:
    found = []
    for entry, _, record in runs(c):
        facts = {key: record.facts.get(key) for key in FACTS} | {"host": record.status.get("host")}
        facts |= as_dict(record.facts.get("versions"))
        found.append((entry.label, {key: value for key, value in facts.items() if value is not None}))
    return _told_apart(found, "Environment of the runs")


def _told_apart(found: Sequence[tuple[str, Mapping[str, Any]]], about: str) -> str:
    """A row a key: its value, or its values and which runs have them; those that differ come first."""
    differing, alike = [], []
    for key in dict.fromkeys(key for _, facts in found for key in facts):
        holders: dict[str, list[str]] = {}
        for who, facts in found:
            holders.setdefault(setting(facts[key]) if key in facts else "absent", []).append(who)
        if len(holders) == 1:
            alike.append([escape(key), cell(escape(next(iter(holders))), "words")])
            continue
        values = [f"<div>{escape(v)} <small>({escape(_some(names))})</small></div>" for v, names in holders.items()]
        differing.append([f'{escape(key)} <b class="warn">differs</b>', cell("".join(values), "words")])
    return table(("Key", "Value"), [*differing, *alike], about)


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
