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

from llmexp.compare.plotting import (
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
from llmexp.compare.screening import spelled
from llmexp.config.labels import plural, short_label, short_value
from llmexp.folders.rundir import by_number
from llmexp.system.text import number

_RATES = ("lr", "learning_rate", "weight_decay", "eps")
# By mark: the symbol and its opacity, which tell marks apart in grey too, and the colour.
_SYMBOLS = {
    **dict.fromkeys(LEADING, ("star", 1.0, "#4269d0")),
    "worse": ("circle", 1.0, "#d9485f"),
    "same": ("diamond", 1.0, "#2fa58e"),
    "undecided": ("circle-open", 0.55, GREY),
}


def verdict_plot(c: Result) -> list[Plot]:
    """Draw the settings in order, with their seeds and the intervals of their differences.

    Nothing is drawn where no setting has several seeds, or losses do not compare.
    """
    judged = [s for s in c.settings if s.mark in _SYMBOLS and s.seeds]
    rows, lead = judged[:40], next((s for s in judged if s.leads), None)
    if not c.judged or lead is None or len(rows) < 2 or all(len(s.seeds) < 2 for s in rows):
        return []
    names = [text(s.label) for s in rows]
    x, y, words = list[float](), list[str](), list[str]()
    for s, name in zip(rows, names, strict=True):
        for seed, value in s.seeds.items():
            x.append(value - (lead.mean if s is lead else lead.seeds.get(seed, lead.mean)))
            y.append(name)
            words.append(f"seed {text(seed)}: {c.digits(value)}")
    symbols, opacity, colours = zip(*(_SYMBOLS[s.mark] for s in rows), strict=True)
    halves = [s.half or 0.0 for s in rows]
    tips = [
        f"<b>{n}</b>  {s.mark}<br>{text(difference(s))}" for s, n in zip(rows, names, strict=True)
    ]
    traces = [
        points(x, y, words, marker=dict(symbol="line-ns-open", size=9, color=GREY, line_width=1.5)),
        points(
            [s.size or 0.0 for s in rows],
            names,
            tips,
            marker=dict(symbol=symbols, size=12, color=colours, opacity=opacity),
            error_x=dict(array=halves, color=GREY, thickness=2, width=5, visible=any(halves)),
        ),
    ]
    layout = {
        "height": 90 + 34 * len(rows),
        "xaxis.title.text": f"{text(c.metric.title)}, difference to {text(lead.label, 24)}",
        "xaxis.zeroline": True,
        "xaxis.nticks": 7,
        "showlegend": False,
        "yaxis": dict(type="category", categoryarray=names[::-1], automargin=True),
    }
    left = len(judged) - len(rows)
    caption = (
        "A bar is the 95 % interval of the difference to the leading setting, a star; all hold "
        "together. A small mark is a seed beside the same seed of the leading setting, or beside "
        "its mean. Pale and hollow: undecided; a diamond: same; a full circle: worse."
        + f" {plural(left, 'further setting')} below are in the table."
        * bool(left)
    )
    return [plot("verdict", "The verdict", traces, layout, caption)]


class Scale(NamedTuple):
    """The values of a key along an axis: numbers where they stand, anything else in its order."""

    kind: str  # linear | log | category
    levels: list[Any]
    labels: list[str]


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
    return [s for s in c.settings if s.mark not in APART and all(k in s.values for k in c.factors)]


def over_keys(c: Result) -> list[Plot]:
    """Draw the figure that orders the table over each swept number, with intervals over seeds."""
    family = [s for s in _family(c) if not s.out and s.verdict is not Verdict.TASK]
    known = [s for s in family if c.key in s.figures] if c.metric in c.columns else []
    absent, title, plots = len(family) - len(known), c.metric.title, list[Plot]()
    for key in c.factors:
        along = scale(known, key)
        if along.kind == "category" or len(along.levels) < 2:
            continue
        groups: dict[str, list[Setting]] = defaultdict(list)
        for s in sorted(known, key=lambda s: float(s.values[key])):
            groups[short_label({k: s.values[k] for k in c.factors if k != key})].append(s)
        few, traces = len(groups) <= 10, []
        for (name, of), own in zip(groups.items(), palette(len(groups)), strict=True):
            colour, halves = own if few else GREY, [half_width(s, c.metric) for s in of]
            symbols = ["star" if s.leads else "circle" for s in of]
            traces.append(
                points(
                    [s.values[key] for s in of],
                    [s.figures[c.key] for s in of],
                    [
                        f"<b>{text(s.label)}</b><br>{text(title)} {figure_text(s, c.metric)}"
                        for s in of
                    ],
                    name=text(name, 40),
                    mode="lines+markers",
                    showlegend=few and len(groups) > 1,
                    line={"color": colour, "width": 1.6 if few else 0.7},
                    marker={"color": colour, "size": 9, "symbol": symbols},
                    error_y=dict(array=halves, width=4, color=colour, visible=any(halves)),
                )
            )
        layout = {
            "height": 340,
            "xaxis.title.text": text(key),
            "xaxis.type": along.kind,
            "yaxis.title.text": text(title),
            "margin.t": 30,
            "legend": ABOVE,
        }
        if len(along.levels) <= 12:
            ticks = [text(label, 16) for label in along.labels]
            layout |= {"xaxis.tickvals": along.levels, "xaxis.ticktext": ticks}
        most = max(len(s.taking_part) for s in known)
        seeds = ("One seed each, so there are no", "Two seeds are too few for")[min(1, most - 1)]
        caption = (
            f"{seeds} intervals." if most < 3 else "The bars are 95 % intervals over the seeds."
        )
        if absent:
            why = f"whose runs do not all reach {c.target}" if c.target else f"without {title}"
            caption += f" Left out: {plural(absent, 'setting')} {why}."
        name = f"{title[:1].upper()}{title[1:]} over {key}"
        plots.append(plot(f"over {key}", name, traces, layout, caption))
    return plots


def maps(c: Result) -> list[Plot]:
    """Draw a map for each pair of swept keys, six at most, of which a third of the cells are known.

    A random search has none.
    """
    family, plots = [s for s in _family(c) if c.key in s.figures], list[Plot]()
    for pair in itertools.combinations(c.factors, 2) if c.metric in c.columns else ():
        scales = {key: scale(family, key) for key in pair}
        (down, rows), (across, columns) = sorted(scales.items(), key=lambda of: len(of[1].levels))
        known: dict[tuple[str, str], Setting] = {}
        for s in family:  # the best one of a cell comes first
            known.setdefault((repr(s.values[down]), repr(s.values[across])), s)
        if 3 * len(known) < len(rows.levels) * len(columns.levels) or not known:
            continue
        grid = [[known.get((repr(i), repr(j))) for j in columns.levels] for i in rows.levels]
        cells = [["★ " * s.leads + figure_text(s, c.metric) if s else "" for s in r] for r in grid]
        trace = go.Heatmap(
            z=[[s.figures[c.key] if s else None for s in row] for row in grid],
            text=cells,
            customdata=[[text(s.label) if s else None for s in row] for row in grid],
            texttemplate="%{text}",
            hovertemplate="<b>%{customdata}</b><br>%{text}<extra></extra>",
            hoverongaps=False,
            coloraxis="coloraxis",
            xgap=3,
            ygap=3,
        )
        layout: dict[str, Any] = {
            "height": 130 + 46 * min(len(rows.levels), 12),
            "coloraxis.reversescale": c.metric.better == "lower",
        }
        for axis, key, along in (("xaxis", across, columns), ("yaxis", down, rows)):
            ticks = dict(
                tickvals=list(range(len(along.levels))),
                ticktext=[text(label, 16) for label in along.labels],
            )
            layout[axis] = dict(title={"text": text(c.names[key])}, showgrid=False, **ticks)
        caption = f"{c.metric.title}: the stronger the colour, the better."
        caption += " Each cell shows the best of its settings." * (len(c.factors) > 2)
        title = f"{across} and {down}"
        plots.append(plot(f"map {title}", title, [trace], layout, caption))
    return plots[:6]


def search_plot(c: Result) -> list[Plot]:
    """Draw the runs of a search in order: the trials, and then those with fresh seeds."""
    runs = [(s, colour, r) for s, (colour, _) in styles(c).items() for r in s.runs]
    runs = [one for one in runs if c.key in one[2].figures and c.metric in c.columns]
    runs.sort(key=lambda one: (not one[2].trial, by_number(one[2].path)))
    trials = sum(r.trial for _, _, r in runs)
    if not trials:
        return []
    values = [r.figures[c.key] for _, _, r in runs]
    tips = [f"{text(s.label_of(r))}<br>{c.digits(r.figures[c.key])}" for s, _, r in runs]
    marker = dict(
        color=[colour for _, colour, _ in runs],
        size=8,
        symbol=["circle-open" if r.trial else "circle" for _, _, r in runs],
    )
    layout = {
        "height": 340,
        "yaxis.title.text": text(c.metric.title),
        "xaxis.title.text": "trial" + ", then fresh seeds" * (len(runs) > trials),
    }
    caption = "Hollow: trials; the lowest is low by chance, too. Full: fresh seeds, compared."
    traces = [points([*range(1, len(runs) + 1)], values, tips, marker=marker)]
    return [plot("search", "The search", traces, layout, caption)]


def screen_plots(c: Result) -> list[Plot]:
    """Draw the effects of a screen by size, and all contrasts against what noise would make."""
    from scipy.special import ndtri

    if not (s := c.screen):
        return []
    knobs, plots = list(s.knobs.items())[::-1], list[Plot]()
    labels = [
        text(f"{c.names[key]}: {' against '.join(map(short_value, s.levels[key][::-1]))}", 40)
        for key, _ in knobs
    ]
    bars = go.Bar(
        y=labels,
        x=[one.effect for _, one in knobs],
        orientation="h",
        error_x=dict(array=[one.half for _, one in knobs], color=GREY),
        marker={"color": [TEN_COLOURS[0] if one.found else GREY for _, one in knobs]},
        hovertemplate="%{y}<br>%{x:.3g}<extra></extra>",
    )
    layout: dict[str, Any] = {"height": 120 + 34 * len(knobs), "yaxis.automargin": True}
    caption = "Bars in colour differ from noise; the whiskers are 95 % intervals."
    plots.append(plot("effects", f"Effects on {c.key}", [bars], layout, caption))
    every = sorted([*s.knobs.values(), *s.others], key=lambda one: abs(one.effect))
    is_knob = [one in s.knobs.values() for one in every]
    dots = points(
        ndtri(0.5 + 0.5 * (np.arange(len(every)) + 0.5) / len(every)).tolist(),
        [abs(one.effect) for one in every],
        [text(spelled(one.names, c.names)) or "higher" for one in every],
        marker={
            "size": 9,
            "symbol": ["circle" if knob else "circle-open" for knob in is_knob],
            "color": [TEN_COLOURS[0] if one.found else GREY for one in every],
        },
    )
    layout = {
        "height": 340,
        "xaxis.title.text": "half-normal quantile",
        "yaxis.title.text": "size of the contrast",
    }
    caption = "Noise lies on a line through the origin, effects above it. Open: pairs."
    return [*plots, plot("half-normal", "All contrasts", [dots], layout, caption)]
