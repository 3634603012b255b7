"""Draw what the settings came to: the verdict, over swept keys, of a search, a screen.

Each function returns the plots that the comparison has data for.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.document import (
    ABOVE,
    GREY,
    TEN_COLOURS,
    Plot,
    palette,
    plot,
    points,
    styles,
    text,
)
from llmexp.compare.records import (
    APART,
    LEADING,
    Result,
    Setting,
    Verdict,
    difference,
    figure_text,
    half_width,
)
from llmexp.config.labels import plural, short_label, short_value
from llmexp.folders.rundir import by_number
from llmexp.system.text import number

_RATES = ("lr", "learning_rate", "weight_decay", "eps")
# By mark: the symbol, which tells marks apart in grey too, and the colour.
_SYMBOLS = {
    **dict.fromkeys(LEADING, ("star", "#4269d0")),
    "worse": ("circle", "#d9485f"),
    "same": ("diamond", "#2fa58e"),
    "undecided": ("circle-open", f"{GREY}8c"),
}


def verdict_plot(c: Result) -> list[Plot]:
    """Draw the settings in order, with their seeds and the intervals of their differences.

    Nothing is drawn where no setting has several seeds, or losses do not compare.
    """
    judged = [s for s in c.settings if s.mark in _SYMBOLS and s.seeds]
    rows, lead = judged[:40], next((s for s in judged if s.leads), None)
    if not c.judged or lead is None or len(rows) < 2 or all(len(s.seeds) < 2 for s in rows):
        return []
    names = {s: text(s.label) for s in rows}
    seeds = [(s, seed, y) for s in rows for seed, y in s.seeds.items()]
    beside = [y - (lead.mean if s is lead else lead.seeds.get(seed, lead.mean))
              for s, seed, y in seeds]  # fmt: skip
    symbols, colours = zip(*(_SYMBOLS[s.mark] for s in rows), strict=True)
    traces = [
        points(
            beside,
            [names[s] for s, _, _ in seeds],
            [f"seed {text(seed)}: {c.digits(y)}" for _, seed, y in seeds],
            marker=dict(symbol="line-ns-open", size=9, color=GREY),
        ),
        points(
            [s.size or 0.0 for s in rows],
            [*names.values()],
            [f"<b>{names[s]}</b>  {s.mark}<br>{text(difference(s))}" for s in rows],
            marker=dict(symbol=symbols, size=12, color=colours),
            error_x=dict(array=[s.half or 0.0 for s in rows], color=GREY, width=5),
        ),
    ]
    left = len(judged) - len(rows)
    caption = (
        "A bar is the 95 % interval of the difference to the leading setting, a star; all hold "
        "together. A small mark is a seed beside the same seed of the leading setting, or beside "
        "its mean. Pale and hollow: undecided; a diamond: same; a full circle: worse."
        + f" {plural(left, 'further setting')} below are in the table."
        * bool(left)
    )
    title = f"{text(c.metric.title)}, difference to {text(lead.label, 24)}"
    y = dict(type="category", categoryarray=[*names.values()][::-1], automargin=True)
    return [
        plot("verdict", "The verdict", traces, caption, height=90 + 34 * len(rows), yaxis=y,
             xaxis=dict(title_text=title, zeroline=True, nticks=7), showlegend=False)
    ]  # fmt: skip


class Scale(NamedTuple):
    """The values of a key along an axis: numbers where they stand, anything else in its order."""

    kind: str  # linear | log | category
    levels: list[Any]
    labels: list[str]

    def ticks(self, where: Sequence[Any]) -> dict[str, Any]:
        return dict(tickvals=where, ticktext=[text(label, 16) for label in self.labels])


def scale(settings: Sequence[Setting], key: str) -> Scale:
    """Return the axis of a key: logarithmic for rates, and where its steps are alike as factors."""
    distinct = {repr(s.values.get(key)): s.values.get(key) for s in settings}.values()
    levels = sorted(distinct, key=lambda v: (number(v) is None, number(v) or 0.0, short_value(v)))
    labels = [short_value(v) for v in levels]
    if len({*labels}) < len(labels):
        labels = list(map(repr, levels))
    if any(number(v) is None for v in levels):
        return Scale("category", levels, labels)
    values = np.array(levels, dtype=float)
    log = key.rpartition(".")[2] in _RATES or key.endswith("_lr")
    if len(values) > 1 and values[-1] >= 4 * values[0] > 0:
        factors, sums = np.diff(np.log(values)), np.diff(values)
        log |= bool(np.std(factors) / np.mean(factors) <= np.std(sums) / np.mean(sums))
    return Scale("log" if log and len(values) and values[0] > 0 else "linear", levels, labels)


def _family(c: Result) -> list[Setting]:
    """Return the settings of the same task and length that have a value of every swept key."""
    alike = [s for s in c.settings if s.mark not in APART and all(k in s.values for k in c.factors)]
    return alike if c.metric in c.columns else []


def over_keys(c: Result) -> list[Plot]:
    """Draw the figure that orders the table over each swept number, with intervals over seeds."""
    family = [s for s in _family(c) if not s.out and s.verdict is not Verdict.TASK]
    known = [s for s in family if c.key in s.figures]
    absent, title, plots = len(family) - len(known), c.metric.title, list[Plot]()
    for key in c.factors:
        along = scale(known, key)
        if along.kind == "category" or len(along.levels) < 2:
            continue
        groups = defaultdict(list)
        for s in sorted(known, key=lambda s: float(s.values[key])):
            groups[short_label({k: s.values[k] for k in c.factors if k != key})].append(s)
        few, traces = len(groups) <= 10, []
        for (name, of), own in zip(groups.items(), palette(len(groups)), strict=True):
            colour, halves = own if few else GREY, [half_width(s, c.metric) for s in of]
            symbols = ["star" if s.leads else "circle" for s in of]
            tips = [
                f"<b>{text(s.label)}</b><br>{text(title)} {figure_text(s, c.metric)}" for s in of
            ]
            traces.append(
                points(
                    [s.values[key] for s in of],
                    [s.figures[c.key] for s in of],
                    tips,
                    name=text(name, 40),
                    mode="lines+markers",
                    showlegend=few and len(groups) > 1,
                    line=dict(color=colour, width=1.6 if few else 0.7),
                    marker=dict(color=colour, size=9, symbol=symbols),
                    error_y=dict(array=halves, width=4, color=colour, visible=any(halves)),
                )
            )
        most = max(len(s.taking_part) for s in known)
        seeds = ("One seed each, so there are no", "Two seeds are too few for")[min(1, most - 1)]
        caption = (
            f"{seeds} intervals." if most < 3 else "The bars are 95 % intervals over the seeds."
        )
        if absent:
            why = f"whose runs do not all reach {c.target}" if c.target else f"without {title}"
            caption += f" Left out: {plural(absent, 'setting')} {why}."
        x = dict(title_text=text(key), type=along.kind)
        x |= along.ticks(along.levels) if len(along.levels) <= 12 else {}
        name = f"{title[:1].upper()}{title[1:]} over {key}"
        plots.append(
            plot(f"over {key}", name, traces, caption, xaxis=x, yaxis_title_text=text(title),
                 margin_t=30, legend=ABOVE)
        )  # fmt: skip
    return plots


def maps(c: Result) -> list[Plot]:
    """Draw a map for each pair of swept keys, six at most, of which a third of the cells are known.

    A random search has none.
    """
    family, plots = [s for s in _family(c) if c.key in s.figures], list[Plot]()
    for pair in itertools.combinations(c.factors, 2):
        scales = {key: scale(family, key) for key in pair}
        (down, rows), (across, columns) = sorted(scales.items(), key=lambda of: len(of[1].levels))
        known: dict[tuple[str, str], Setting] = {}
        for s in family:  # the best one of a cell comes first
            known.setdefault((repr(s.values[down]), repr(s.values[across])), s)
        if 3 * len(known) < len(rows.levels) * len(columns.levels) or not known:
            continue
        grid = [[known.get((repr(i), repr(j))) for j in columns.levels] for i in rows.levels]

        def cells(of: Any, grid: Any = grid) -> list[list[Any]]:
            return [[of(s) if s else None for s in row] for row in grid]

        trace = go.Heatmap(
            z=cells(lambda s: s.figures[c.key]),
            text=cells(lambda s: "★ " * s.leads + figure_text(s, c.metric)),
            customdata=cells(lambda s: text(s.label)),
            texttemplate="%{text}",
            hovertemplate="<b>%{customdata}</b><br>%{text}<extra></extra>",
            hoverongaps=False,
            coloraxis="coloraxis",
            xgap=3,
            ygap=3,
        )
        axes = {
            axis: dict(title_text=text(c.names[key]), showgrid=False)
            | along.ticks([*range(len(along.levels))])
            for axis, key, along in (("xaxis", across, columns), ("yaxis", down, rows))
        }
        caption = f"{c.metric.title}: the stronger the colour, the better."
        caption += " Each cell shows the best of its settings." * (len(c.factors) > 2)
        title, height = f"{across} and {down}", 130 + 46 * min(len(rows.levels), 12)
        lower = c.metric.better == "lower"
        plots.append(
            plot(f"map {title}", title, [trace], caption, height=height, **axes,
                 coloraxis_reversescale=lower)
        )  # fmt: skip
    return plots[:6]


def search_plot(c: Result) -> list[Plot]:
    """Draw the runs of a search in order: the trials, and then those with fresh seeds."""
    known = ((r, s, colour) for s, (colour, _) in styles(c).items() for r in s.runs)
    runs = [one for one in known if c.key in one[0].figures and c.metric in c.columns]
    runs.sort(key=lambda one: (not one[0].trial, by_number(one[0].path)))
    if not (trials := sum(r.trial for r, *_ in runs)):
        return []
    values = [r.figures[c.key] for r, *_ in runs]
    tips = [f"{text(s.label_of(r))}<br>{c.digits(r.figures[c.key])}" for r, s, _ in runs]
    symbols = ["circle-open" if r.trial else "circle" for r, *_ in runs]
    marker = dict(color=[colour for *_, colour in runs], size=8, symbol=symbols)
    caption = "Hollow: trials; the lowest is low by chance, too. Full: fresh seeds, compared."
    traces = [points([*range(1, len(runs) + 1)], values, tips, marker=marker)]
    x = "trial" + ", then fresh seeds" * (len(runs) > trials)
    titles = dict(xaxis_title_text=x, yaxis_title_text=text(c.metric.title))
    return [plot("search", "The search", traces, caption, **titles)]


def screen_plots(c: Result) -> list[Plot]:
    """Draw the effects of a screen by size."""
    if not (s := c.screen):
        return []
    knobs = list(s.knobs.items())[::-1]
    labels = [
        text(f"{c.names[key]}: {' against '.join(map(short_value, s.levels[key][::-1]))}", 40)
        for key, _ in knobs
    ]
    bars = go.Bar(
        y=labels,
        x=[one.effect for _, one in knobs],
        orientation="h",
        error_x=dict(array=[one.half for _, one in knobs], color=GREY),
        marker_color=[TEN_COLOURS[0] if one.found else GREY for _, one in knobs],
        hovertemplate="%{y}<br>%{x:.3g}<extra></extra>",
    )
    caption = "Bars in colour differ from noise; the whiskers are 95 % intervals."
    return [plot("effects", f"Effects on {c.key}", [bars], caption, height=120 + 34 * len(knobs))]
