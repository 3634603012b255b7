"""Columns of the table: of figures of the rows, and a figure as the text of its cell."""

from __future__ import annotations

from llmexp import features
from llmexp.compare.records import Column, Record, Setting, is_loss
from llmexp.metrics.keys import ROW_KEYS, is_score
from llmexp.system.text import amount, with_interval


def figure_text(setting: Setting, column: Column) -> str:
    """Return a figure as text, a loss with the half width of its interval.

    Empty where it is not known.
    """
    half = half_width(setting, column)
    return with_interval(setting.figures.get(column.key), half, column.digits, column.counts)


def alone(setting: Setting, column: Column) -> str:
    """Return a figure as its cell has it, without the interval."""
    return figure_text(setting, column).partition(" ± ")[0]


def difference(setting: Setting) -> str:
    """Return the difference to the leading setting, with its interval where seeds give one."""
    if (apart := setting.size) is None:
        return ""
    return "-+"[apart >= 0] + amount(apart, setting.half)


def half_width(setting: Setting, column: Column) -> float | None:
    """Return the half width of a loss's interval over seeds, or of a score's over items.

    None where there is none, as of rates and times.
    """
    key = column.key
    known = is_loss(key) or is_score(key) or key.startswith("target/")
    low, high = setting.intervals.get(key if known else "", (0.0, 0.0))
    return (high - low) / 2 or None


def column_of(key: str, when: str = "") -> Column:
    """Return the column of a figure of the rows."""
    known = ROW_KEYS[key]
    return Column(f"{when}{key}", f"{when}{known.head}", known.better, known.digits)


def of_features(record: Record) -> dict[str, float | None]:
    """Return the figures that features find in the folder of a run."""
    return features.merged("compare", "figures", record)
