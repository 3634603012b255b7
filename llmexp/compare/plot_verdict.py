"""Draw the verdict: how each setting, and each of its seeds, stands beside the best one."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import Any

from llmexp.compare.columns import difference
from llmexp.compare.plotting import ABOVE, GREY, Plot, plot, points, text
from llmexp.compare.records import LEADING, Result, Setting
from llmexp.settings.labels import plural

_MOST = 40  # settings that have a row of their own, the best ones
PALE = 0.55
# By mark: the symbol and its opacity, which tell marks apart in grey too, and the colour.
SYMBOLS = {
    **dict.fromkeys(LEADING, ("star", 1.0, "#4269d0")),
    "worse": ("circle", 1.0, "#d9485f"),
    "same": ("diamond", 1.0, "#2fa58e"),
    "undecided": ("circle-open", PALE, GREY),
}


def verdict_plot(c: Result) -> Plot | None:
    """Return the settings in order with their seeds and the intervals of their differences.

    None where no setting has several seeds, or losses do not compare.
    """
    judged = [e for e in c.settings if e.mark in SYMBOLS]
    rows = judged[:_MOST]
    lead = next((e for e in rows if e.leads), None)
    several = any(len(e.taking_part) > 1 for e in rows)
    if c.metric not in c.columns or lead is None or len(rows) < 2 or not several or not c.is_loss:
        return None
    names = [text(e.label, 32) for e in rows]
    if len(set(names)) < len(names):  # each has a row of its own
        names = [text(e.label) for e in rows]
    marks = {e.mark for e in rows}
    traces = [
        _seeds(c, lead, rows, names),
        *(_settings(mark, rows, names) for mark in SYMBOLS if mark in marks),
    ]
    layout = {
        "height": 90 + 34 * len(rows),
        "xaxis.title.text": f"{text(c.metric.title)}, difference to {text(lead.label, 24)}",
        "xaxis.zeroline": True, "xaxis.nticks": 7,
        "yaxis": dict(type="category", categoryorder="array", categoryarray=names[::-1],
                      automargin=True),
        "legend": ABOVE, "margin.t": 34,
        "hovermode": "closest",
    }  # fmt: skip
    left = len(judged) - len(rows)
    more = f" {plural(left, 'further setting')} below are in the table." if left else ""
    caption = (
        "A bar is the 95 % interval of the difference to the leading setting; all hold together. A "
        "small mark is a seed beside the same seed of the leading setting, or beside its mean. "
        f"Pale and hollow: undecided.{more}"
    )
    return plot("verdict", "The verdict", traces, layout, caption)


def _seeds(c: Result, lead: Setting, rows: Sequence[Setting], names: Sequence[str]) -> Any:
    """Return a small mark for each seed, beside the leading setting's figure of that seed."""
    ours = {r.seed: r.figures[c.key] for r in lead.taking_part if c.key in r.figures}
    mean = fsum(ours.values()) / max(1, len(ours))
    x, y, words, opacity = [], list[str](), list[str](), list[float]()
    for e, name in zip(rows, names, strict=True):
        for r in e.taking_part:
            if (value := r.figures.get(c.key)) is not None:
                x.append(value - (mean if e is lead else ours.get(r.seed, mean)))
                y.append(name)
                words.append(f"seed {text(r.seed)}: {c.digits(value)}")
                opacity.append(0.8 * SYMBOLS[e.mark][1])
    marker = dict(symbol="line-ns-open", size=9, color=GREY, opacity=opacity, line_width=1.5)
    return points(x, y, words, name="a seed", marker=marker)


def _settings(mark: str, rows: Sequence[Setting], names: Sequence[str]) -> Any:
    """Return the settings of one mark, with the intervals of their differences."""
    found = [(e, n) for e, n in zip(rows, names, strict=True) if e.mark == mark]
    symbol, opacity, colour = SYMBOLS[mark]
    halves, sizes = [e.half or 0.0 for e, _ in found], [e.size or 0.0 for e, _ in found]
    words = [f"<b>{n}</b>  {mark}<br>{text(difference(e))}" for e, n in found]
    marker = dict(symbol=symbol, size=15 if mark in LEADING else 11, color=colour)
    bars = dict(array=halves, color=colour, thickness=2.5, width=5, visible=any(halves))
    y = [n for _, n in found]
    return points(sizes, y, words, name=mark, opacity=opacity, marker=marker, error_x=bars)
