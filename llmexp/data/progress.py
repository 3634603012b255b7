"""Say how far a preparation is."""

from __future__ import annotations

import sys
import time

from llmexp.system.text import columns, duration, size_text

QUIET_S = 2.0  # shorter preparations print nothing
OFTEN_S, SELDOM_S = 0.2, 60.0  # between two states on a terminal; the most between two lines


class ProgressBar:
    """Lines on stderr, on a terminal one that changes, of what takes longer than QUIET_S.

    `what` is prepared. `total`: bytes to read, 0 where it is not known. The rate is in bytes of
    text; a packed file has fewer to read.
    """

    def __init__(self, what: str, total: int = 0) -> None:
        self._what, self._total = what, total
        self._text = self._read = 0  # bytes of text that were done, of the total that were read
        self._began: tuple[float, int] | None = None  # when, and how far, with the first text
        self._started = self._shown = time.monotonic()
        self._live, self._printed = sys.stderr.isatty(), False

    def add(self, n_bytes: int, read: int | None = None) -> None:
        """Note that so many bytes of text are done.

        `read`: bytes of the total that were read; None: they are the text itself.
        """
        self._text += n_bytes
        # what has read a file to its end and closed it is nowhere
        self._read = read = max(self._read, self._text if read is None else read)
        now = time.monotonic()
        if self._began is None and n_bytes:
            self._began = now, max(0, read - n_bytes)
        wait = QUIET_S
        if self._printed:  # in a file that a job writes for days a line every minute is enough
            wait = max(QUIET_S, min((now - self._started) / 10, SELDOM_S))
            wait = OFTEN_S if self._live else wait
        if now - self._shown < wait:
            return
        self._shown, self._printed = now, True
        since, at = self._began or (now, read)
        parts = [f"{size_text(self._text)} of text"]
        if now > since:
            parts.append(f"{size_text(self._text / (now - since))}/s")
        if self._total:
            parts.append(f"{100 * min(read, self._total) // self._total} %")
        if now > since and at < read <= self._total:
            left = (self._total - read) * (now - since) / (read - at)
            parts.append(f"{duration(left)} left")
        self._print(", ".join(parts), "" if self._live else "\n")

    def end(self) -> None:
        if self._printed:
            taken = time.monotonic() - self._started
            self._print(f"{size_text(self._text)} of text in {duration(taken)}", "\n")

    def _print(self, text: str, end: str) -> None:
        line = f"preparing {self._what}: {text}"
        if self._live:  # over the line before, as far as the terminal is wide
            line = f"\r{line[: columns() - 1]}\x1b[K"
        print(line, end=end, file=sys.stderr, flush=True)
