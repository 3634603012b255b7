"""The main picture of a comparison as PNG, without a display and without a browser."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.curves import AXES, cells, curve, lineage, scale
from llmexp.compare.records import Comparison, Entry
from llmexp.system import fileio

_LEGEND = 16  # entries in it at most, the best ones
_POINTS = 2000  # of a curve


def write_png(c: Comparison, path: Path) -> None:
    """Draw val and train loss over the axis of the comparison, and a heat map where exactly two
    keys were swept."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    panels = [key for key in ("val/loss", "train/loss") if any(key in r.columns for r in c.runs)]
    entries = [e for e in c.entries if e.values]
    known = any(c.metric in e.figures for e in entries)
    with_map = len(c.factors) == 2 and len(entries) > 3 and known
    across = max(1, len(panels) + with_map)
    figure = Figure(figsize=(5.4 * across, 5.2), dpi=110, layout="constrained")
    (axes,) = figure.subplots(1, across, squeeze=False)
    few = len(c.entries) <= 10
    colours = colormaps["tab10" if few else "viridis"]
    for axis, key in zip(axes, panels, strict=False):
        for i, entry in enumerate(c.entries):
            label = entry.label.replace("$", r"\$") if i < _LEGEND else None
            _draw(axis, c, entry, key, colours(i if few else i / len(c.entries)), label)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xlabel(AXES[c.align])
        axis.set_title(f"{key.replace('/', ' ')} (nats per token)", fontsize=10)
        axis.grid(alpha=0.25)
        if c.align_at is not None:
            axis.axvline(c.align_at, color="grey", linewidth=0.8, linestyle=":")
    if panels:
        handles, labels = axes[0].get_legend_handles_labels()
        place: Any = {"loc": "outside lower center", "ncols": min(2, len(labels)) or 1}
        figure.legend(handles, labels, fontsize=7, **place)
    if with_map:
        _map(figure, axes[len(panels)], c, entries)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    fileio.write_whole(path, out.getvalue())


def _draw(axis: Any, c: Comparison, entry: Entry, key: str, colour: Any, label: str | None) -> None:
    own, parents = {"label": label, "linewidth": 1}, {"linewidth": 0.7, "linestyle": ":"}
    for found, style in ((curve(entry, key), own), (lineage(entry, key), parents)):
        if found is not None and c.align in found.x:
            drawn = found.thinned(_POINTS)
            axis.plot(drawn.x[c.align], drawn.mean, color=colour, **style)


def _map(figure: Any, axis: Any, c: Comparison, entries: Sequence[Entry]) -> None:
    """Draw the metric over the two swept keys."""
    column = next(column for column in c.columns if column.key == c.metric)
    down, across = (scale(entries, key) for key in c.factors)
    values = np.full((len(down.levels), len(across.levels)), np.nan)
    for place, e in cells(entries, *c.factors).items():
        values[place] = e.figures.get(c.metric, np.nan)
    cmap = "viridis" if column.better == "higher" else "viridis_r"
    image = axis.imshow(values, aspect="auto", cmap=cmap)
    for i, j in np.argwhere(np.isfinite(values)) if values.size <= 60 else ():
        words = f"{values[i, j]:.{column.digits}g}"
        box = dict(facecolor="white", alpha=0.7, pad=1, linewidth=0)
        axis.text(j, i, words, ha="center", va="center", fontsize=8, bbox=box)
    axis.set_xticks(range(len(across.labels)), across.labels)
    axis.set_yticks(range(len(down.labels)), down.labels)
    axis.set_xlabel(c.factors[1])
    axis.set_ylabel(c.factors[0])
    axis.set_title(column.title, fontsize=10)
    figure.colorbar(image, ax=axis, shrink=0.8)
