"""Declare a figure of a row. This file imports the standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """A key of the rows: its meaning, unit, digits, and which way is better.

    `title` is the short name that a reader sees where it differs from the name, `plot` the title of
    its curve over training.
    """

    name: str
    meaning: str  # in brief
    title: str = ""
    unit: str = ""
    better: str = ""  # lower | higher, where one is
    digits: int = 4  # significant ones that are shown
    timing: bool = False  # it says something about the machine, and differs between equal runs
    plot: str = ""
    text: str = ""  # the pattern of one whose value is no number

    @property
    def label(self) -> str:
        """Return the short name."""
        return self.title or self.name

    @property
    def head(self) -> str:
        """Return the short name with the unit, for the head of a column."""
        return f"{self.label} ({self.unit})" if self.unit else self.label
