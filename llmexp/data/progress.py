"""Say how far a preparation is."""

from __future__ import annotations

import sys
import time
from typing import Any

from llmexp.system.text import duration

QUIET_S = 2.0  # shorter preparations print nothing
OFTEN_S, SELDOM_S = 0.2, 60.0  # between two states of a bar; the most between two lines


class ProgressBar:
    """A bar on a terminal, else lines on stderr, of a preparation that takes longer than QUIET_S.

    `what` is prepared. `total`: bytes to read, 0 where it is not known. The rate is in bytes of
    text; a packed file has fewer to read.
    """

    def __init__(self, what: str, total: int = 0) -> None:
        self._what, self._total = what, total
        self._text = self._read = 0  # bytes of text that were done, of the total that were read
        self._began: tuple[float, int] | None = None  # when, and how far, with the first text
        self._started = self._shown = time.monotonic()
        self._bar: Any = None
        self._printed = False

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
            wait = OFTEN_S if self._bar else wait
        if now - self._shown >= wait:
            self._shown = now
            self._show(now, read)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._total)
            self._bar.stop()
        if self._printed:
            taken = time.monotonic() - self._started
            self._line(f"{self._text / 1e6:,.0f} MB of text in {duration(taken)}")

    def _show(self, now: float, read: int) -> None:
        since, at = self._began or (now, read)
        parts = [f"{self._text / 1e6:,.0f} MB of text"]
        if now > since:
            parts.append(f"{self._text / 1e6 / (now - since):.1f} MB/s")
        if self._total:
            parts.append(f"{100 * min(read, self._total) // self._total} %")
        if now > since and at < read <= self._total:
            left = (self._total - read) * (now - since) / (read - at)
            parts.append(f"{duration(left)} left")
        first, self._printed = not self._printed, True
        if first and self._total and sys.stderr.isatty():
            self._bar = _bar(self._what, self._total)
        if self._bar is None:
            self._line(", ".join(parts))
        else:
            self._bar.update(self._bar.task_ids[0], completed=read, text="  ".join(parts[1:]))
            self._bar.refresh()

    def _line(self, text: str) -> None:
        print(f"preparing {self._what}: {text}", file=sys.stderr, flush=True)


def _bar(what: str, total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}", markup=False),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        expand=True,
    )
    bar.add_task(f"preparing {what}", total=total, text="")
    bar.start()
    bar.console.show_cursor(True)  # a killed command must not leave a terminal without its cursor
    return bar
