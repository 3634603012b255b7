"""Overrides of a command line: their keys as they are written, and what Hydra reads in them."""

from __future__ import annotations

from collections.abc import Iterable

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override


def key_of(override: str) -> str:
    """Return the key of an override, also of one that adds or removes it."""
    return override.lstrip("+~").partition("=")[0]


def parsed(overrides: Iterable[str]) -> list[Override]:
    """Return the overrides as Hydra reads them. Raises HydraException."""
    found: list[Override] = OverridesParser.create().parse_overrides(list(overrides))
    return found
