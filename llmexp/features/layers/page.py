from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.document import Options, Plot, Section, menus, packed, plot, text
from llmexp.compare.records import Result
from llmexp.config.values import ConfigError
from llmexp.features.layers.reading import FILE, by_layer
from llmexp.folders.rows import walk_rows

STEPS = 200  # of a run, at most
Layers = tuple[np.ndarray, Mapping[str, np.ndarray]]  # tokens; by figure: values by layer and step


def _read(where: Path) -> Layers | None:
    """Return what layers.jsonl has up to the first damage; None where it has nothing."""
    rows = list[tuple[float, dict[str, Any]]]()
    with contextlib.suppress(ConfigError, LookupError, TypeError):
        for row, _ in walk_rows(where / FILE):
            line = {k: v for k, v in by_layer(row, np.nan).items() if isinstance(v, list)}
            rows.append((float(row["tokens_seen"]), line))
    keys = dict.fromkeys(key for _, line in rows for key in line)
    gap = [np.nan] * max((len(v) for _, line in rows for v in line.values()), default=0)
    values = {key: np.array([line.get(key, gap) for _, line in rows]).T for key in keys}
    return (np.array([at for at, _ in rows]), values) if keys else None


def section(c: Result) -> Section:
    """Return a map of layer by tokens, of a figure and a setting that menus choose."""
    return Section("layers", "Layers", _plots(c), folded=True)


def _plots(c: Result) -> list[Plot]:
    found = ((s, [r.path for r in s.taking_part or s.runs]) for s in c.settings)
    read = ((s, next(filter(None, map(_read, paths)), None)) for s, paths in found)
    known = [*itertools.islice(((text(s.label, 20), *own) for s, own in read if own), 8)]
    if not known:
        return []
    cells = sum(len(z) for _, _, of in known for z in of.values())
    most = max(20, min(STEPS, 200_000 // cells))  # of all maps about 200,000 values
    kept = [np.unique(np.linspace(0, len(x) - 1, min(len(x), most)).round().astype(int))
            for _, x, _ in known]  # fmt: skip
    keys = sorted({key for _, _, of in known for key in of}, key=lambda k: (k != "update_ratio", k))
    figures: Options = []
    for key in keys:
        zs = [of.get(key, np.full((1, len(x)), np.nan))[:, at]
              for (_, x, of), at in zip(known, kept, strict=True)]  # fmt: skip
        zs = [np.where(np.abs(z) < np.finfo(np.float32).max, z, np.nan) for z in zs]
        values = np.concatenate([z[np.isfinite(z)] for z in zs])
        low, high = np.percentile(values, (1, 99)).tolist() if len(values) else (0.0, 1.0)
        grids = [packed(z) | {"shape": f"{len(z)}, {len(z[0])}"} for z in zs]
        figures.append((key, [{"z": grids}, {"coloraxis.cmin": low, "coloraxis.cmax": high}]))
    traces = [
        go.Heatmap(
            x=packed(x[at]),
            z=z,
            name=name,
            visible=i == 0,
            coloraxis="coloraxis",
            hovertemplate="layer %{y}, %{x:,.0f} tokens: %{z:.4~g}",
        )
        for i, ((name, x, _), at, z) in enumerate(
            zip(known, kept, figures[0][1][0]["z"], strict=True)
        )
    ]
    shown: Options = [
        (name, [{"visible": [i == j for j in range(len(known))]}])
        for i, (name, _, _) in enumerate(known)
    ]
    layout = {
        "height": 440,
        "updatemenus": menus(figures, *[shown] * (len(shown) > 1)),
        "coloraxis": dict(colorscale="Cividis", showscale=True, colorbar=dict(thickness=10)),
        "xaxis.title.text": "tokens",
        "yaxis.title.text": "layer",
        "margin.t": 40,
        **figures[0][1][1],
    }
    caption = (
        f"Of each setting one run, of 8 settings and {STEPS} measured steps at most. The colours "
        "span 98 % of the values of all; what is beyond has the colour of the end."
    )
    return [plot("layers", "Layer by layer", traces, caption, **layout)]
