"""Draw a run: losses, learning rate and gradient norm over the tokens seen."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
import warnings
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from llmexp.metrics.keys import figures_in, is_of_named_set, is_of_weights, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAIN, LR, NORM = "#4C72B0", "#2F855A", "#805AD5"
VAL = ("#DD6B20", "#B83280", "#319795", "#975A16", "#718096")
SMOOTH_ABOVE_POINTS = 50

Series = tuple[np.ndarray, np.ndarray]  # tokens seen, values
_Columns = dict[str, tuple[array, array]]  # the same by key


def plot_losses(
    rows: Iterable[dict[str, Any]], title: str, before: Iterable[dict[str, Any]] = ()
) -> bytes:
    """Return a PNG with the losses of `rows` over `tokens_seen`, in nats per token.

    The rows are as in metrics.jsonl. `before` are those of a fork's parents, drawn paler.
    A lower panel shows `lr` and `grad_norm` where the rows have them. Values that are absent, None
    or not finite are left out; with no loss at all nothing is returned.
    """
    columns = _columns(rows)
    train_x, train_y = _series(columns, "train/loss")
    lr, norm = _series(columns, "lr"), _series(columns, "grad_norm")
    validation = _validation(columns)
    if not len(train_x) and not validation:
        return b""

    # Figure without pyplot: no global state, no choice of a window system.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    two_panels = len(lr[0]) > 0 or len(norm[0]) > 0
    figure = Figure(figsize=(8, 5.6 if two_panels else 4.2), dpi=150, layout="constrained")
    if two_panels:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.1])
        _draw_settings(bottom, lr, norm)
    else:
        top = bottom = figure.subplots()

    parents = _columns(before)
    for key, color in (("train/loss", TRAIN), ("val/loss", VAL[0])):
        if key in parents:
            label = f"{key.partition('/')[0]}, before the fork"
            top.plot(*_series(parents, key), color=color, linewidth=1.0, alpha=0.4, label=label)
    if len(train_x) > SMOOTH_ABOVE_POINTS:
        window = max(5, len(train_x) // 40) | 1
        top.plot(train_x, train_y, color=TRAIN, linewidth=0.6, alpha=0.45)
        label = f"train (mean of {window} rows)"
        smoothed = running_mean(train_y, window // 2)
        top.plot(train_x, smoothed, color=TRAIN, linewidth=1.6, label=label)
    elif len(train_x):
        marker = "." if len(train_x) <= 20 else None
        top.plot(train_x, train_y, color=TRAIN, linewidth=1.2, marker=marker, label="train")
    for (name, (x, y)), color in zip(validation.items(), itertools.cycle(VAL), strict=False):
        size = 4.5 if len(x) <= 60 else 2.5
        label = f"{name} (last {y[-1]:.4f})"
        top.plot(x, y, color=color, marker="o", markersize=size, linewidth=1.0, label=label)
    # a $ in a name is no formula
    top.set_title(textwrap.fill(title, 95), fontsize=10, loc="left", parse_math=False)
    top.set_ylabel("loss (nats per token)")
    top.legend(frameon=False, fontsize=9)
    _clean(top)
    bottom.set_xlabel("tokens seen")
    bottom.xaxis.set_major_formatter(EngFormatter(sep=" "))

    png = io.BytesIO()
    with warnings.catch_warnings():  # a title in any script is fine
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(png, format="png")
    return png.getvalue()


def _draw_settings(axes: Axes, lr: Series, norm: Series) -> None:
    if len(lr[0]):
        axes.plot(*lr, color=LR, linewidth=1.3)
        axes.set_ylabel("lr", color=LR)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        axes.set_ylim(bottom=0)
        _clean(axes)
    if len(norm[0]):
        right = axes.twinx() if len(lr[0]) else axes
        right.plot(*norm, color=NORM, linewidth=0.7, alpha=0.8)
        right.set_ylabel("grad_norm", color=NORM)
        if norm[1].min() > 0 and norm[1].max() > 10 * norm[1].min():
            right.set_yscale("log")
        else:
            right.ticklabel_format(axis="y", useOffset=False)
        right.spines["top"].set_visible(False)


def _clean(axes: Axes) -> None:
    axes.grid(True, linewidth=0.4, alpha=0.5)
    axes.spines["top"].set_visible(False)
    axes.spines["right"].set_visible(False)


def _columns(rows: Iterable[dict[str, Any]]) -> _Columns:
    """Return `tokens_seen` and the values of each key that is drawn.

    Rows take part that have both as finite numbers. They are read once, and may be many.
    """
    found: _Columns = {}
    for row in rows:
        tokens = row.get("tokens_seen")
        if not _is_finite(tokens):
            continue
        for key, value in row.items():
            drawn = key in ("train/loss", "val/loss", "lr", "grad_norm") or is_of_named_set(key)
            if drawn and _is_finite(value):
                both = found.setdefault(key, (array("d"), array("d")))
                both[0].append(tokens)
                both[1].append(value)
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _series(columns: _Columns, key: str) -> Series:
    """Return `tokens_seen` and the values of a key, in the order of tokens."""
    tokens, values = (np.asarray(column) for column in columns.get(key, ((), ())))
    order = np.lexsort((values, tokens))
    return tokens[order], values[order]


def _validation(columns: _Columns) -> dict[str, Series]:
    """Return the validation losses by name.

    They are of each named set, or of the only one; and of the average of the weights.
    """
    shown = [key for key in figures_in([columns]) if is_of_named_set(key) and key.endswith("/loss")]
    if len([key for key in shown if not is_of_weights(key)]) < 2:
        shown = ["val/loss", *filter(is_of_weights, shown)]
    names = [title_of(key) if is_of_named_set(key) else "validation" for key in shown]
    found = {name: _series(columns, key) for name, key in zip(names, shown, strict=True)}
    return {name: series for name, series in found.items() if len(series[0])}


def running_mean(values: np.ndarray, reach: int) -> np.ndarray:
    """Return the mean of each value and `reach` values on both sides of it, along the last axis.

    Fewer values count near the ends.
    """
    total = np.cumsum(np.insert(values, 0, 0.0, axis=-1), axis=-1)
    rows = values.shape[-1]
    index = np.arange(rows)
    # The same number on both sides, or a steep start would be pulled down.
    reaches = np.minimum(np.minimum(index, rows - 1 - index), reach)
    sums = total[..., index + reaches + 1] - total[..., index - reaches]
    return np.asarray(sums / (2 * reaches + 1))
