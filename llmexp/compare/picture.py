"""The main picture of a comparison as PNG, without a display and without a browser; heat maps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp import fileio
from llmexp.compare.curves import cells, scale
from llmexp.compare.figures import COLUMNS, positions
from llmexp.compare.records import Comparison, Entry

_AXES = {"tokens": "tokens", "steps": "steps", "time": "seconds of training"}
_LEGEND = 16  # entries in it at most, the best ones
_POINTS = 2000  # of a curve


def write_png(comparison: Comparison, path: Path) -> None:
    """Draw val and train loss over the axis of the comparison, and a heat map where exactly two
    keys were swept."""
    from matplotlib import colormaps
    from matplotlib.ticker import EngFormatter

    c = comparison
    panels = [key for key in ("val/loss", "train/loss") if any(key in r.columns for r in c.runs)]
    entries = [e for e in c.entries if e.values]
    with_map = (
        len(c.factors) == 2 and len(entries) > 3 and any(c.metric in e.figures for e in entries)
    )
    figure, (axes,) = canvas(1, max(1, len(panels) + with_map), 5.4, 5.2, 110)
    few = len(c.entries) <= 10
    colours = colormaps["tab10" if few else "viridis"]
    for axis, key in zip(axes, panels, strict=False):
        for i, entry in enumerate(c.entries):
            label = entry.name.replace("$", r"\$") if i < _LEGEND else None
            _draw(axis, c, entry, key, colours(i if few else i / len(c.entries)), label)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xlabel(_AXES[c.align])
        axis.set_title(f"{key.replace('/', ' ')} (nats per token)", fontsize=10)
        axis.grid(alpha=0.25)
        if c.align_at is not None:
            axis.axvline(c.align_at, color="grey", linewidth=0.8, linestyle=":")
    if panels:
        handles, labels = axes[0].get_legend_handles_labels()
        place = {"loc": "outside lower center", "ncols": min(2, len(labels)) or 1}
        figure.legend(handles, labels, fontsize=7, **place)
    if with_map:
        _map(figure, axes[len(panels)], c, entries)
    save(figure, path)


def canvas(down: int, across: int, width: float, height: float, dpi: int) -> tuple[Any, Any]:
    """Return a figure and its axes, [down, across], each of that size in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * across, height * down), dpi=dpi, layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False)


def save(figure: Any, path: Path) -> None:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    fileio.write_whole(path, out.getvalue())


def heat(
    axis: Any, values: np.ndarray, down: Sequence[str], across: Sequence[str], form: str, **how: Any
) -> Any:
    """Draw [down, across] values as colours, with their figures in `form` where there is room."""
    image = axis.imshow(values, aspect="auto", **how)
    axis.set_xticks(range(len(across)), across)
    axis.set_yticks(range(len(down)), down)
    for i, j in np.argwhere(np.isfinite(values)) if values.size <= 60 else ():
        red, green, blue, _ = image.cmap(image.norm(values[i, j]))
        dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
        words, colour = format(values[i, j], form), "white" if dark else "black"
        axis.text(j, i, words, ha="center", va="center", fontsize=8, color=colour)
    return image


def _draw(axis: Any, c: Comparison, entry: Entry, key: str, colour: Any, label: str | None) -> None:
    val = key == "val/loss"
    for run in entry.runs:
        x, y = positions(run, c.align), run.columns.get(key)
        if y is None or len(x) != len(y):
            continue
        known = np.flatnonzero(np.isfinite(y))
        known = known[:: max(1, len(known) // _POINTS)]
        stroke = {"linewidth": 1.4 if val else 0.8, "markersize": 3}
        marker = "o" if len(known) <= 40 and val else None
        axis.plot(x[known], y[known], color=colour, marker=marker, label=label, **stroke)
        label = None


def _map(figure: Any, axis: Any, c: Comparison, entries: Sequence[Entry]) -> None:
    """Draw the metric over the two swept keys."""
    column = next(column for column in (*c.columns, *COLUMNS) if column.key == c.metric)
    down, across = (scale(entries, key) for key in c.factors)
    values = np.full((len(down.levels), len(across.levels)), np.nan)
    for place, e in cells(entries, *c.factors).items():
        values[place] = e.figures.get(c.metric, np.nan)
    cmap = "viridis" if column.better == "higher" else "viridis_r"
    image = heat(axis, values, down.labels, across.labels, f".{column.digits}g", cmap=cmap)
    axis.set_xlabel(c.factors[1])
    axis.set_ylabel(c.factors[0])
    axis.set_title(column.title, fontsize=10)
    figure.colorbar(image, ax=axis, shrink=0.8)
