"""Numbers, sizes, times, errors and tables as text for a reader."""

from __future__ import annotations

import contextlib
import importlib
import math
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Note = tuple[str, str]  # of an answer: its name and the facts


def number(value: Any) -> float | None:
    """Return a number whose square is finite; None for all else, such as texts in a config."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e150:
        return None
    return float(value)


def shown(value: float, digits: int, counts: bool = True) -> str:
    """Return a number with so many significant digits; large ones whole, with separators.

    Whole numbers have no decimals, unless they are no `counts`: 2.0000 beside 2.5000.
    """
    if not math.isfinite(value):
        return str(value)
    huge = abs(value) >= 1e15
    # what rounds up to one digit more is whole, too
    whole = abs(float(f"{value:.{digits}g}")) >= 10 ** (digits - 1)
    whole = whole or (counts and value == int(value))
    if not huge and whole:
        return f"{value:,.0f}"
    short = huge or 0 < abs(value) < 1e-3
    return f"{value:.{digits}g}" if short else f"{value:#.{digits}g}"


def decimals_of(half: float) -> int:
    """Return the decimals that show two digits of a half width: 3 for 0.011, -1 for 150."""
    return 1 - math.floor(math.log10(half)) if half and math.isfinite(half) else 12


def with_interval(value: float | None, half: float | None, digits: int, counts: bool = True) -> str:
    """Return `2.564 ± 0.011`: two digits of the half width, and the value to as many decimals.

    `1,500` alone where the half width is less than can be seen in it; empty without a value.
    """
    if value is None:
        return ""
    if half is None or not math.isfinite(half) or not math.isfinite(value):
        return shown(value, digits, counts)
    # decimals that the value shows
    place = digits - 1 - math.floor(math.log10(abs(value))) if value else 12
    if half < 0.5 * 10.0**-place:
        return shown(value, digits, counts)
    decimals = min(decimals_of(half), place + 1)
    if decimals <= 0:
        return f"{round(value, decimals):,.0f} ± {round(half, decimals):,.0f}"
    return f"{value:,.{decimals}f} ± {half:.{decimals}f}"


def amount(size: float, half: float | None = None) -> str:
    """Return the size of a difference, without its sign: 0.027, or 0.0034 ± 0.0018.

    Headline, notes, table and page have it from here. An interval that is smaller than the rounding
    of the difference is none: 0.027 ± 0. Where both would be printed alike they have more digits.
    """
    size = abs(size) if abs(size) > 1e-12 else 0.0
    if half and half > 1e-9 * size:
        decimals = decimals_of(half)
        if size != half and round(size, decimals) == round(half, decimals):
            more = range(max(0, decimals + 1), decimals + 4)
            apart = (n for n in more if round(size, n) != round(half, n))
            if n := next(apart, 0):
                return f"{size:,.{n}f} ± {half:,.{n}f}"
        return with_interval(size, half, 6)
    text = f"{size:.2g}" if size < 100 else shown(size, 3)
    return text if half is None else f"{text} ± 0"


def loss_text(value: float) -> str:
    """Return a loss with four decimals; very small and large ones with an exponent."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.4e}"


def rounded(value: float) -> str:
    """Return a large number with three digits and a letter: 81.9k, 1.64M."""
    value = float(f"{value:.3g}")  # what rounds up to the next letter has it
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.12g}{letter}"
    return f"{value:.3g}"


def gib(size: float) -> str:
    """Return bytes as GiB, with three digits or whole, and no unit."""
    found = size / 2**30
    return f"{found:,.0f}" if found >= 999.5 else f"{found:.3g}"


def readable_size(size: float) -> str:
    """Return bytes with a unit: `512 B`, `1.5 KiB`, `20 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size) < 1024:
            # what rounds to 10.0 has no decimal
            digits = 0 if unit == "B" or round(size, 1) >= 10 else 1
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def size_text(size: float) -> str:
    """Return a number of bytes for a reader: `512 bytes`, `48.3 kB`, `12.1 MB`."""
    if size < 1000:
        return f"{size:.0f} bytes"
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    """Return `3.2s`, `45s`, `1m 03s`, `2h 05m`, `3d 04h`; `?` for what is no duration."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 9.95:  # above, one decimal would round to 10.0
        return f"{seconds:.1f}s"
    minutes, s = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{s}s"
    if minutes < 60:
        return f"{minutes}m {s:02d}s"
    hours, m = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours}h {m:02d}m"
    days, h = divmod(round(seconds / 3600), 24)
    return f"{days}d {h:02d}h"


def one_line(what: object, most: int = 300) -> str:
    """Return a text, or an error's class and text, as one line of at most so many characters.

    A repr has newlines as two characters each; they become spaces too.
    """
    text = f"{type(what).__name__}: {what}" if isinstance(what, BaseException) else str(what)
    line = " ".join(text.replace("\\n", " ").split())
    return line if len(line) <= most else line[: most - 3] + "..."


def first_of(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Return `a, b, c`, or `a, b, c and 2 more`; with "; " `between`, `a; b; c; and 2 more`."""
    rest = f"{between.strip(', ')} and {len(names) - most} more"
    return between.join(names[:most]) + rest * (len(names) > most)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return `a, b and c`, or `a, b, c and 4 more`."""
    if 1 < len(names) <= most:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return first_of(names, most)


def said(notes: Iterable[Note]) -> list[str]:
    """Return each note as a sentence; one without facts is not said."""
    return [f"{name}: {facts}." for name, facts in notes if facts]


def columns() -> int:
    """Return the width of the terminal; COLUMNS goes before, and 120 where there is none."""
    return max(20, shutil.get_terminal_size((120, 24)).columns)


def in_lines(text: str, width: int, indent: str = "") -> str:
    """Return text in lines of a width, without spaces at their ends; a longer word stays whole."""
    how: dict[str, Any] = {"subsequent_indent": indent, "break_on_hyphens": False}
    return textwrap.fill(text, width, break_long_words=False, **how)


def aligned(rows: Sequence[Sequence[str]], left: int, width: int | None = None) -> str:
    """Return aligned columns: the first `left` ones to the left, figures to the right.

    Where lines would be wider than `width`, the middle of the first column is left out.
    """
    from rich.cells import cell_len  # wide signs take two cells

    if width is not None:
        others = [max(map(cell_len, column)) for column in zip(*rows, strict=True)][1:]
        most = max(12, width - sum(w + 2 for w in others))
        rows = [(_without_middle(name, most), *rest) for name, *rest in rows]
    return "\n".join("  ".join(cells).rstrip() for cells in padded_cells(rows, range(left)))


def tabled(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], left: int = 1, absent: str = ""
) -> str:
    """Return rows as aligned columns: the title of each, and how its cell is made, as "{loss:.4f}".

    A cell of what a row lacks is `absent`; a column of them alone is left out.
    """
    cells = [
        [title, *(_cell(form, row, absent) for row in rows)] for title, form in columns.items()
    ]
    kept = [column for column in cells if set(column[1:]) - {absent}]
    return aligned([*zip(*kept, strict=True)], left)


def _cell(form: str, row: Mapping[str, Any], absent: str) -> str:
    try:
        return form.format_map(row)
    except (KeyError, TypeError):  # None has no format
        return absent


def framed(columns: Any) -> Any:
    """Return a data frame of pandas, else of polars. Raises ImportError without both."""
    for name, more in (("pandas", {}), ("polars", {"strict": False})):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name).DataFrame(columns, **more)
    raise ImportError("a data frame needs pandas or polars: pip install pandas")


def padded_cells(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[list[str]]:
    """Return the rows with equally wide cells in each column: `left` ones filled up behind."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        spaces = [" " * (w - cell_len(cell)) for w, cell in zip(widths, row, strict=True)]
        pairs = enumerate(zip(row, spaces, strict=True))
        lines.append([cell + space if i in left else space + cell for i, (cell, space) in pairs])
    return lines


def _without_middle(name: str, most: int) -> str:
    from rich.cells import cell_len

    if cell_len(name) <= most:
        return name
    end = name[3:]
    while cell_len(end) > most - cell_len(name[:2]) - 1:
        end = end[1:]
    return f"{name[:2]}…{end}"
