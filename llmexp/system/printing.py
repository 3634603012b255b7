"""Print an answer in one shape: a headline, tables of columns, notes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat, zip_longest
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from llmexp.system.child import printable
from llmexp.system.text import in_lines, padded_cells


@dataclass(frozen=True)
class Shown:
    """A column as every form of a table shows it: its title, and a text for each row."""

    title: str
    cells: list[str]
    values: list[Any] = field(default_factory=list)  # what they are sorted by, where it is not them

    @property
    def head(self) -> list[str]:
        return textwrap.wrap(self.title, 14, break_long_words=False)

    @property
    def width(self) -> int:
        return max(map(cell_len, [*self.head, *self.cells]), default=0) + 2

    @property
    def is_numbers(self) -> bool:
        """Tell whether its cells are figures, which end together."""
        return bool(self.title) and any(ch.isdigit() for cell in self.cells for ch in cell)


class Printer:
    """Print to a terminal or a file, at any width."""

    def __init__(self, to: TextIO, width: int | None = None) -> None:
        self.encoding = getattr(to, "encoding", None) or sys.stdout.encoding or "utf-8"
        self._console = Console(file=to, width=width, highlight=False, markup=False, emoji=False)
        self.width = self._console.width

    def say(self, lines: Iterable[str], style: str = "") -> None:
        """Print sentences, each from a line of its own on."""
        for line in lines:
            text = in_lines(printable(line, self.encoding), self.width)
            self._console.print(Text(text, style=style))

    def table(self, columns: Sequence[Shown], styles: Iterable[str] = repeat("")) -> None:
        """Print columns; a style of a row is that of its cells without a title."""
        heads = [*zip_longest(*(k.head[::-1] for k in columns), fillvalue="")][::-1]
        cells = [*heads, *zip(*(k.cells for k in columns), strict=True)]
        rows = padded_cells(cells, [i for i, k in enumerate(columns) if not k.is_numbers])
        for row, style in zip(rows, chain(["dim"] * len(heads), styles), strict=False):
            pairs = zip(row, columns, strict=True)
            line = Text("  ").join(
                Text(x, "" if k.title and style != "dim" else style) for x, k in pairs
            )
            line.rstrip()
            self._console.print(line, no_wrap=True, overflow="ellipsis")
