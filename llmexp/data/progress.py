"""Say how far a preparation is."""

from __future__ import annotations

import sys
import time

QUIET_S = 2.0  # shorter preparations print nothing


class Progress:
    """A line on stderr every two seconds of a preparation that takes longer. `what` is prepared, or
    with `write` false its tokens are counted only."""

    def __init__(self, what: str, write: bool) -> None:
        self.what, self.done = what, 0
        self.verb = "preparing" if write else "counting the tokens of"
        self.started = self.last = time.monotonic()
        self.printed = False

    def add(self, n_bytes: int) -> None:
        self.done += n_bytes
        now = time.monotonic()
        if now - self.last >= QUIET_S:
            self.last, self.printed = now, True
            self._line(
                f"{self.done / 1e6:,.0f} MB, {self.done / 1e6 / (now - self.started):.1f} MB/s"
            )

    def end(self) -> None:
        if self.printed:
            self._line(f"done in {time.monotonic() - self.started:.1f} s")

    def _line(self, text: str) -> None:
        print(f"{self.verb} {self.what}: {text}", file=sys.stderr, flush=True)
