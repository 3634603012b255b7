"""The figures of layers.jsonl as a heat map: layer by tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from llmexp.compare.plotting import Options, Plot, looks, menus, packed, plot, text
from llmexp.compare.records import Record, Result, Setting
from llmexp.runs.layers import by_layer
from llmexp.runs.rows import walk_rows
from llmexp.runs.rundir import LAYERS
from llmexp.settings.values import ConfigError

STEPS = 200  # of a run, at most
_POINTS = 200_000  # of all maps, about: with more, each has fewer steps
FIRST = "update_ratio"
SETTINGS = 8  # the first ones of the table
_CAPTION = (
    "Of each setting one run, of 8 settings and 200 measured steps at most. The colours span 98 % "
    "of the values of all; what is beyond has the colour of the end."
)


@dataclass(frozen=True)
class Measured:
    """The figures of a run: a value for each layer (rows) and measured step (columns)."""

    tokens: np.ndarray
    values: Mapping[str, np.ndarray]

    def thinned(self, most: int) -> Measured:
        count = len(self.tokens)
        at = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
        return Measured(self.tokens[at], {key: z[:, at] for key, z in self.values.items()})


def _read(record: Record) -> Measured | None:
    """Return the figures of a run, up to the first damage; None where it has none."""
    tokens, lines = list[float](), list[dict[str, list[float]]]()
    with contextlib.suppress(ConfigError, LookupError, TypeError):
        for row, _ in walk_rows(record.path / LAYERS):
            line = {k: v for k, v in by_layer(row).items() if isinstance(v, list)}
            at = float(row["tokens_seen"])
            tokens.append(at)
            lines.append(line)
    sizes = [len(v) for line in lines for v in line.values()]
    if not sizes:
        return None
    gap = [np.nan] * max(sizes)
    keys = dict.fromkeys(key for line in lines for key in line)
    values = {key: np.array([line.get(key, gap) for line in lines]).T for key in keys}
    return Measured(np.array(tokens), values)


def layer_plots(c: Result) -> list[Plot]:
    """Return a map of the settings that have such figures."""
    known: dict[Setting, Measured] = {}
    for setting in c.settings:
        found = next(filter(None, map(_read, setting.taking_part or setting.runs)), None)
        if found is not None and len(known) < SETTINGS:
            known[setting] = found
    return [_plot(c, known)] if known else []


def _plot(c: Result, measured: Mapping[Setting, Measured]) -> Plot:
    """Return a map with a menu of figures and one of settings."""
    cells = sum(len(z) for m in measured.values() for z in m.values.values())
    thin = {e: m.thinned(max(20, min(STEPS, _POINTS // cells))) for e, m in measured.items()}
    keys = sorted({key for m in thin.values() for key in m.values}, key=lambda k: (k != FIRST, k))
    figures: Options = []
    for key in keys:
        maps = [m.values.get(key, np.full((1, len(m.tokens)), np.nan)) for m in thin.values()]
        low, high = _span(maps)
        colours = {"coloraxis.cmin": low, "coloraxis.cmax": high}
        figures.append((key, [{"z": list(map(_grid, maps))}, colours]))
    look, layers = looks(c), max(len(z) for m in thin.values() for z in m.values.values())
    traces = [
        go.Heatmap(
            x=packed(m.tokens), z=z, name=look[e].title, visible=i == 0, coloraxis="coloraxis",
            hovertemplate="layer %{y}, %{x:,.0f} tokens: %{z:.4~g}",
        )
        for i, ((e, m), z) in enumerate(zip(thin.items(), figures[0][1][0]["z"], strict=True))
    ]  # fmt: skip
    shown: Options = [
        (text(e.label, 20), [{"visible": [i == j for j in range(len(thin))]}])
        for i, e in enumerate(thin)
    ]
    layout = {
        "height": 440, "updatemenus": menus((figures, 0), *[(shown, 0)] * (len(shown) > 1)),
        "coloraxis": dict(colorscale="Cividis", showscale=True, colorbar=dict(thickness=10)),
        "xaxis.title.text": "tokens", "xaxis.rangeslider": {"visible": True, "thickness": 0.12},
        "yaxis.title.text": "layer", "yaxis.dtick": max(1, layers // 8),
        "margin.t": 40, **figures[0][1][1],
    }  # fmt: skip
    return plot("layers", "Layer by layer", traces, layout, _CAPTION)


def _span(maps: list[np.ndarray]) -> list[float]:
    """Return between which values 98 % of all lie."""
    values = np.concatenate([z[np.isfinite(z)] for z in maps])
    return [float(end) for end in np.percentile(values, (1, 99))] if len(values) else [0.0, 1.0]


def _grid(z: np.ndarray) -> dict[str, str]:
    z = np.where(np.abs(z) < np.finfo(np.float32).max, z, np.nan)  # what is beyond is not drawn
    return packed(z) | {"shape": f"{len(z)}, {len(z[0])}"}
