"""The findings of a verification: a list of checks, each with its figure and its limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmexp.system.text import columns, in_lines


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
    where = [note] * bool(note) + [f"first: {name}" for name in differing[:1]]
    shown = f"{len(differing)} of {of} differ"
    return Check(what, not differing and of > 0, shown, "none", "; ".join(where))


def print_wrapped(text: str, indent: str = "") -> None:
    """Print, as wide as the terminal is. Paths and names stay whole, to be copied."""
    print(in_lines(text, min(110, columns()), indent), flush=True)
