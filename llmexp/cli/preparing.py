"""The section `prepare` of `llmexp prepare`: which part of the work is done, and where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmexp.config.convert import convert_section
from llmexp.config.values import choice, knob, refuse

PART = "3/16"


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """The way that the data are prepared; no part of a run's own config."""

    part: str | None = knob(
        f"one part of the work, for job arrays: {PART} is the third of 16; null: all, with what "
        "parts have left",
        PART,
    )
    on: str = choice("where data=corpus is prepared", "local | ray")


def build_prepare(mapping: Mapping[str, Any]) -> Prepare:
    """Return the section `prepare`. Raises ConfigError."""
    found = convert_section(Prepare, mapping, "prepare.")
    part_of(found)
    if found.part is not None and found.on != "local":
        text = "Ray deals out the parts itself; leave out one of prepare.part and prepare.on"
        raise refuse("conflict", "prepare.part", found.part, text)
    return found


def part_of(settings: Prepare) -> tuple[int, int] | None:
    """Return (number, of how many). Raises ConfigError."""
    if settings.part is None:
        return None
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", settings.part)
    number, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= count:
        text = "a part and how many there are is needed, from 1/N to N/N"
        raise refuse("out_of_range", "prepare.part", settings.part, text, PART)
    return number, count
