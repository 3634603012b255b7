"""Show a row of metrics.jsonl as a line of the console."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llmexp.config.values import Plain
from llmexp.metrics.keys import ROW_KEYS, is_accuracy, is_of_named_set, title_of
from llmexp.system.console import fitted_line
from llmexp.system.text import duration, loss_text


def _significant(value: float, digits: int) -> str:
    """Return `value` with `digits` significant digits, in plain notation while that stays short."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return f"{0:.{digits - 1}f}"
    # of the rounded value: 9.9996 is 10.00
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if -3 <= exponent < 6:
        return f"{value:.{max(digits - 1 - exponent, 0)}f}"
    return f"{value:.{digits - 1}e}"


def _epoch(value: float) -> str:
    return f"{value:.4f}" if 0 < value < 0.1 else f"{value:.2f}"


# The cells of a row in their order: the width of the value, and how it is shown; None: as the
# table of keys says.
CELLS: dict[str, tuple[int, Callable[[Any], str] | None]] = {
    "epoch": (6, _epoch),
    "step": (0, str),
    "lr": (0, "{:.3e}".format),
    "step_time": (7, None),
    "tokens_per_sec": (9, "{:,.0f}".format),
    "grad_norm": (8, None),
    "train/loss": (7, loss_text),
    "val/loss": (7, loss_text),
    "val/ppl": (7, None),
    "eta": (7, duration),
}
LEAST_NEEDED = ("epoch", "eta", "val/ppl", "step_time", "tokens_per_sec", "grad_norm", "lr")


def format_row(
    row: Plain, total_steps: int, total_epochs: float = 0, width: int | None = None
) -> str:
    """Return one line for a row of metrics.jsonl, without keys that are absent or None.

    The epoch of a run of one is left out, too. Widths are fixed, so that the lines of a log stand
    in columns; a value far out of the usual range breaks its column rather than lose digits. With
    `width` the less important cells give way until the line fits.
    """
    cells = {key: _cell(key, row[key]) for key in CELLS if row.get(key) is not None}
    cells |= {
        key: f"{title_of(key)} {loss_text(value):>7}"
        for key, value in row.items()
        if is_of_named_set(key) and key.endswith("/loss") and value != row.get("val/loss")
    }
    cells |= {k: f"{k.split('/')[1]} acc {v:6.4f}" for k, v in row.items() if is_accuracy(k)}
    if "eta" in cells:
        cells["eta"] = cells.pop("eta")  # the last one
    if total_epochs <= 1:
        cells.pop("epoch", None)
    if "step" in cells:
        cells["step"] = f"step {row['step']:>{len(str(total_steps))}}/{total_steps}"
    if row.get("skipped"):
        cells["skipped"] = "skipped"
    named = [key for key in cells if is_of_named_set(key) or is_accuracy(key)]
    return fitted_line(cells, " | ", (*named, *LEAST_NEEDED), width)


def _cell(key: str, value: Any) -> str:
    width, show = CELLS[key]
    known = ROW_KEYS[key]
    if show is not None:
        return f"{known.label} {show(value):>{width}}"
    return f"{known.label} {_significant(value, known.digits):>{width}} {known.unit}".rstrip()
