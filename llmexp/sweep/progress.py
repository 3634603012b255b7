"""Shows on a terminal how far a loop over the points of a sweep has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

AFTER_S, EVERY_S = 1.0, 0.2
T = TypeVar("T")


def counted(doing: str, points: Sequence[T]) -> Iterator[T]:
    """Yield the points, with a line on standard error that counts them once that takes a second;
    none in a pipe."""
    began = shown = time.monotonic()
    terminal = sys.stderr.isatty()
    told = False
    try:
        for number, point in enumerate(points):
            now = time.monotonic()
            if terminal and now - began > AFTER_S and now - shown > EVERY_S:
                shown, told = now, True
                sys.stderr.write(f"\r{doing} point {number + 1:,} of {len(points):,} ")
                sys.stderr.flush()
            yield point
    finally:
        if told:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
