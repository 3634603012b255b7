"""Show on a terminal how far a loop over the points of a sweep has come."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def counted(doing: str, points: Sequence[T]) -> Iterable[T]:
    """Return the points; a bar on standard error counts them, none in a pipe."""
    if not sys.stderr.isatty():
        return points
    from rich.console import Console
    from rich.progress import track

    return track(points, f"{doing} points", console=Console(stderr=True), transient=True)
