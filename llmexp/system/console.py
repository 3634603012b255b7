"""Show a run: lines to the terminal and to train.log, and a live bar where there is a terminal."""

from __future__ import annotations

import math
import os
import re
import shutil
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

from llmexp.system.text import Note, duration, loss_text

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESH_INTERVAL_S = 0.2
# Escape sequences (CSI, OSC, two-character ones), then every control character but tab and newline.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ "
    r"-/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


class Console:
    """Print lines above a progress bar, and append them to a log.

    Nothing here raises: a dead terminal or a full disk must not stop a run.

    `log_path` is appended to (UTF-8); None keeps no log. `total_steps` are optimizer steps. The bar
    appears with the first `progress` call, which callers make only where it is `live`. A log
    that cannot be opened or written is reported once, where lines are printed;
    `failure` holds that error.
    """

    def __init__(self, log_path: Path | None, total_steps: int, stream: TextIO | None) -> None:
        self.failure: OSError | None = None
        self._reported = False
        self._total_steps = total_steps
        self._stream = stream
        self.live = _is_live_terminal(self._stream)  # which has a width
        self._bar: Progress | None = None
        self._last_refresh = -math.inf
        self._lock = threading.RLock()  # other threads print lines, too
        self._log_path = log_path
        self._log: BinaryIO | None = None
        if log_path is not None:
            try:
                # Unbuffered: what could not be written must not come back as an error at a later
                # line.
                self._log = open(log_path, "ab", buffering=0)  # noqa: SIM115
            except OSError as error:
                self.failure = error

    def line(self, text: str, short: str | None = None) -> None:
        """Print `text` above the bar, and append it to the log without escape codes.

        On a terminal `short` is printed in its place.
        """
        text = _CONTROL.sub("", text)
        printed = _CONTROL.sub("", short) if short is not None and self.live else text
        with self._lock:
            left = memoryview(f"{text}\n".encode("utf-8", "replace"))
            try:
                while left and self._log is not None:
                    left = left[self._log.write(left) :]
            except OSError as error:
                self.failure = self.failure or error
            if self.failure is not None and not self._reported:
                self._reported = True
                lost = (
                    f"WARNING: {self._log_path} cannot be written ({self.failure.strerror}); "
                    "the run continues"
                )
                self._guard(lambda: self._print(lost))
            self._guard(lambda: self._print(printed))

    def progress(
        self, step: int, loss: float | None, tokens_per_sec: float | None, eta_s: float | None
    ) -> None:
        """Move the bar of a `live` terminal to `step`.

        It is drawn at most every 0.2 s, and only here: no thread of its own.
        """
        now = time.monotonic()
        if now - self._last_refresh < REFRESH_INTERVAL_S and step < self._total_steps:
            return
        cells = {"step": f"step {step}/{self._total_steps}"}
        if loss is not None:
            cells["loss"] = f"loss {loss_text(loss)}"
        if tokens_per_sec is not None:
            cells["rate"] = f"{tokens_per_sec:,.0f} tokens/s"
        if eta_s is not None:
            cells["eta"] = f"eta {duration(eta_s)}"
        with self._lock:
            self._last_refresh = now
            self._guard(lambda: self._draw(step, cells))

    def close(self) -> None:
        """Take the bar away and close the log; `line` still prints to the terminal afterwards."""
        with self._lock:
            self._guard(self._remove_bar)
            if self._log is not None:
                self._log.close()
                self._log = None

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if self._bar is None:
            self._stream.write(text + "\n")
            self._stream.flush()
        else:
            self._bar.console.print(
                text, markup=False, highlight=False, emoji=False, soft_wrap=True
            )

    def _draw(self, step: int, cells: dict[str, str]) -> None:
        bar = self._bar or self._make_bar()
        # A narrow terminal loses figures, never its line: the bar keeps at least ten columns.
        text = fitted_line(cells, "  ", ("rate", "eta", "loss"), bar.console.width - 12)
        bar.update(bar.task_ids[0], completed=step, text=text)
        if self._bar is None:
            bar.start()
            # a killed run must not leave a terminal without its cursor
            bar.console.show_cursor(True)
            self._bar = bar
        else:
            bar.refresh()

    def _make_bar(self) -> Progress:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        bar = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
            console=RichConsole(file=self._stream),
            auto_refresh=False,
            transient=True,
            expand=True,
            # A proxy in the place of sys.stdout could raise in other people's print calls.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bar.add_task("", total=max(self._total_steps, 1), text="")
        return bar

    def _remove_bar(self) -> None:
        bar, self._bar = self._bar, None
        self.live = False
        if bar is not None:
            bar.stop()

    def _guard(self, write: Callable[[], None]) -> None:
        """Run `write`; when the terminal is gone, do without it from now on."""
        try:
            write()
        # closed pipe, hung-up terminal, full disk; ValueError: closed stream
        except (OSError, ValueError):
            dead, self._stream, self._bar, self.live = self._stream, None, None, False
            _silence(dead)


def banner(sections: list[Note], width: int | None = None) -> str:
    """Return aligned `label  text` lines, the text wrapped to `width` columns.

    The default is the width of the terminal, else 100. Words longer than a line (paths) stay whole,
    so that they can be copied, and so do lines of tables: those with two spaces between words.
    """
    width = width or shutil.get_terminal_size((100, 24)).columns
    label_width = max((len(label) for label, _ in sections), default=0)
    indent = " " * (label_width + 2)
    lines: list[str] = []
    for label, text in sections:
        head = f"{label:<{label_width}}  "
        for paragraph in text.splitlines() or [""]:
            wrapped = textwrap.wrap(
                paragraph,
                max(width, len(indent) + 20),
                initial_indent=head,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            in_columns = "  " in paragraph.strip()
            lines += [head + paragraph] if in_columns else wrapped or [head]
            head = indent
    return "\n".join(line.rstrip() for line in lines)


def fitted_line(
    cells: dict[str, str], between: str, least_needed: Iterable[str], width: float | None
) -> str:
    """Join cells to a line; the least needed ones give way until it fits."""
    for key in least_needed:
        if width is None or len(between.join(cells.values())) <= width:
            break
        cells.pop(key, None)
    return between.join(cells.values())


def _is_live_terminal(stream: TextIO | None) -> bool:
    if os.environ.get("TERM", "") in ("", "dumb"):
        return False
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # a closed stream
        return False


def _silence(stream: TextIO | None) -> None:
    """Point a dead stream at the null device.

    Otherwise the interpreter flushes what is left in its buffer at exit, fails, and exits with code
    120.
    """
    if stream is None:
        return
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    # not a stream with a descriptor: nothing is flushed at exit either
    except (OSError, ValueError):
        pass
