"""The findings of a verification: a list of checks, each with its figure and its limit."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One sentence that held or did not.

    `found` and `limit` are what was measured and what is allowed.
    """

    what: str
    passed: bool | None  # None: could not be looked at here, for the reason in `note`
    found: float | int | str | None = None
    limit: float | int | str | None = None
    note: str = ""


def at_most(what: str, found: float, limit: float, note: str = "") -> Check:
    """Return `found` must not be above `limit`; what is not finite is."""
    return Check(what, math.isfinite(found) and found <= limit, found, limit, note)


def none_differ(what: str, differing: Sequence[str], of: int, note: str = "") -> Check:
    """Check that nothing differs, of so many that were compared bit by bit.

    Comparing nothing is no proof.
    """
    shown = f"{len(differing)} of {of} differ"
    where = f"first: {differing[0]}" if differing else ""
    return Check(
        what, not differing and of > 0, shown, "none", "; ".join(filter(None, (note, where)))
    )


def print_wrapped(text: str, indent: str = "") -> None:
    """Print, as wide as the terminal is. Paths and name stay whole, to be copied."""
    lines = textwrap.wrap(
        text, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    print("\n".join(lines), flush=True)


def width() -> int:
    return min(110, max(40, shutil.get_terminal_size((110, 20)).columns))
