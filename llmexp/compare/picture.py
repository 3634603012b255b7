"""The main picture of a comparison as PNG, without a display and without a browser."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from llmexp import fileio
from llmexp.compare.figures import COLUMNS, positions
from llmexp.compare.records import Comparison, Entry

_AXES = {"tokens": "tokens", "steps": "steps", "time": "seconds of training"}
_LEGEND = 16  # entries in it at most, the best ones
_POINTS = 2000  # of a curve


def write_png(comparison: Comparison, path: Path) -> None:
    """Val and train loss over the axis of the comparison, and a heat map where exactly two keys
    were swept."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    panels = [
        key
        for key in ("val/loss", "train/loss")
        if any(key in r.columns for e in comparison.entries for r in e.runs)
    ]
    grid = _grid(comparison)
    count = max(1, len(panels) + (grid is not None))
    figure = Figure(figsize=(5.4 * count, 5.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, squeeze=False)[0]
    few = len(comparison.entries) <= 10
    colours = colormaps["tab10" if few else "viridis"]
    for axis, key in zip(axes, panels, strict=False):
        for i, entry in enumerate(comparison.entries):
            colour = colours(i if few else i / len(comparison.entries))
            _draw(axis, comparison, entry, key, colour, entry.name if i < _LEGEND else None)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xlabel(_AXES[comparison.align])
        axis.set_title(f"{key.replace('/', ' ')} (nats per token)", fontsize=10)
        axis.grid(alpha=0.25)
        if comparison.align_at is not None:
            axis.axvline(comparison.align_at, color="grey", linewidth=0.8, linestyle=":")
    if panels:
        handles, labels = axes[0].get_legend_handles_labels()
        labels = [label.replace("$", r"\$") for label in labels]
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(2, len(labels)) or 1, fontsize=7
        )
    if grid is not None:
        _heat(figure, axes[len(panels)], comparison, *grid)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    fileio.write_whole(path, out.getvalue())


def _draw(axis: Any, c: Comparison, entry: Entry, key: str, colour: Any, label: str | None) -> None:
    for run in entry.runs:
        x, y = positions(run, c.align), run.columns.get(key)
        if y is None or len(x) != len(y):
            continue
        known = np.flatnonzero(np.isfinite(y))
        known = known[:: max(1, len(known) // _POINTS)]
        marker = "o" if len(known) <= 40 and key == "val/loss" else None
        thin = 1.4 if key == "val/loss" else 0.8
        axis.plot(
            x[known],
            y[known],
            color=colour,
            linewidth=thin,
            marker=marker,
            markersize=3,
            label=label,
        )
        label = None


def _grid(c: Comparison) -> tuple[list[Any], list[Any], np.ndarray] | None:
    """Return the metric over the two swept keys."""
    entries = [e for e in c.entries if e.values]
    if len(c.factors) != 2 or len(entries) < 4:
        return None
    rows, columns = (sorted({_order(e.values[k]) for e in entries}) for k in c.factors)
    values = np.full((len(rows), len(columns)), np.nan)
    for e in entries:
        at = (
            rows.index(_order(e.values[c.factors[0]])),
            columns.index(_order(e.values[c.factors[1]])),
        )
        if np.isnan(values[at]):  # the best one first, and it stays
            values[at] = e.figures.get(c.metric, np.nan)
    return (rows, columns, values) if np.isfinite(values).any() else None


def _order(value: Any) -> tuple[bool, float, str]:
    """Return numbers by size, then texts."""
    numeric = isinstance(value, (int, float))
    return (not numeric, float(value) if numeric else 0.0, str(value))


def _heat(
    figure: Any, axis: Any, c: Comparison, rows: list[Any], columns: list[Any], values: np.ndarray
) -> None:
    column = next(column for column in (*c.columns, *COLUMNS) if column.key == c.metric)
    image = axis.imshow(
        values, aspect="auto", cmap="viridis" if column.better == "higher" else "viridis_r"
    )
    axis.set_xticks(range(len(columns)), [v[2] for v in columns])
    axis.set_yticks(range(len(rows)), [v[2] for v in rows])
    axis.set_xlabel(c.factors[1])
    axis.set_ylabel(c.factors[0])
    axis.set_title(column.title, fontsize=10)
    if values.size <= 60:
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for i, j in np.argwhere(np.isfinite(values)):
            dark = (values[i, j] < middle) == (column.better == "higher")
            text = f"{values[i, j]:.{column.digits}g}"
            axis.text(
                j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "black"
            )
    figure.colorbar(image, ax=axis, shrink=0.8)
