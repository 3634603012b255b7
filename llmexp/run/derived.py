"""Declare a derived number where it is computed: its meaning, its sources, its formula in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmexp.config.knobs import fields


@dataclass(frozen=True)
class Derived:
    """A number of a run: its meaning, the keys or numbers that it follows from, its formula.

    The formula is filled with the numbers of a run.
    """

    meaning: str
    sources: tuple[str, ...]
    formula: str = ""


def derived(meaning: str, sources: str = "", formula: str = "", **more: Any) -> Any:
    """Return a field for a number that follows from `sources`; `more` may have its default."""
    about = Derived(meaning, tuple(sources.split()), formula)
    return field(metadata={Derived: about}, **more)


def resolved_knob(key: str, sources: str = "", formula: str = "") -> Any:
    """Return a field for the value that a knob ends up with, once null and auto are resolved.

    Its meaning is that of the knob.
    """
    return derived(fields()[key].doc.partition(";")[0], sources or key, formula)
