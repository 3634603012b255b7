"""A sweep on the terminal: a live table while it runs, lines elsewhere, a table at the end."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from llmexp.compare import budgets
from llmexp.compose.command_line import kept_back, recordable
from llmexp.compose.overrides import key_of
from llmexp.config.commands import command
from llmexp.config.labels import parse_value, short_keys, short_label, short_value
from llmexp.folders.folder import RunFolder
from llmexp.folders.ledger import Ledger, LedgerEntry, steps_of
from llmexp.run.budget import BUDGETS
from llmexp.sweep.local import by_plan
from llmexp.sweep.section import Sweep
from llmexp.system.child import say
from llmexp.system.redact import redacted
from llmexp.system.text import aligned, duration, in_lines, one_line

REFRESH_S = 0.5
ONE_RUN = "no key has several values, so this sweep is one run; train.seed=1,2 would make two"
_UNFINISHED = ("failed", "infeasible", "preempted")
_ORDER = ("running", "failed", "preempted", "queued", "finished", "infeasible")  # in the live table


class Display:
    """The live table and the lines that are printed while the points run."""

    def __init__(self, ledger: Ledger, lines: bool = True) -> None:
        """`lines`: print each change of a point's state."""
        self._ledger, self._lines = ledger, lines
        self.slots = 1  # points that run at the same time, for the time that is left
        self._live: Any = None
        self._at = 0.0

    def __enter__(self) -> Display:
        self._state = {entry.folder: entry.state for entry in self._ledger.points}
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True, redirect_stdout=False)
            self._live.start()
            # a killed sweep must not leave a terminal without its cursor
            self._live.console.show_cursor(True)
        return self

    def __exit__(self, *unused: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, text: str) -> None:
        if self._live is None:
            say(text)
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Show what has changed since the last time."""
        for entry in self._ledger.points:
            before = self._state.get(entry.folder)
            if before != entry.state:
                self._state[entry.folder] = entry.state
                if self._lines and (before is not None or entry.state != "queued"):
                    self.line(line_of(entry, self._ledger))
        now = time.monotonic()
        if self._live is not None and now - self._at > REFRESH_S:
            from rich.text import Text

            self._at = now
            self._live.update(Text(self.view(), no_wrap=True, overflow="ellipsis"), refresh=True)

    def view(self) -> str:
        """Return the live table, with as many points as there is room for."""
        columns, lines = shutil.get_terminal_size((100, 24))
        points, left = self._ledger.points, dict[str, float]()
        first = sorted(points, key=lambda e: (_ORDER.index(e.state), e.number))[: max(lines - 6, 3)]
        rows: list[tuple[str, ...]] = [("run", "state", "step", "train loss", "tokens/s", "left")]
        for entry in sorted(first, key=lambda e: e.number):
            path = self._ledger.path / entry.folder
            row = RunFolder(path).last_row() if entry.state != "queued" else {}
            eta = row.get("eta")
            if entry.state == "running" and eta is not None:
                left[entry.folder] = eta
            cells = (
                name_of(entry, self._ledger.swept),
                "waiting" if waits(entry, self._ledger.path) else entry.state,
                f"{row['step']:,}/{steps_of(path):,}" if row else "",
                shown_as(row.get("train/loss"), ".4f"),
                shown_as(row.get("tokens_per_sec"), ",.0f"),
                duration(left[entry.folder]) if entry.folder in left else "",
            )
            rows.append(cells)
        kept = 6 if columns >= 80 else 4
        # One column is left free: an echoed ^C must not wrap a line.
        text = aligned([row[:kept] for row in rows], left=1, width=columns - 1)
        return f"{text}\n{counts(self._ledger)}{self._time_left(left)}"

    def _time_left(self, left: dict[str, float]) -> str:
        """Return when the sweep may end, from what is under way and the mean time of a point."""
        points, now, took = self._ledger.points, time.time(), list[float]()
        for entry in points:
            if entry.started and entry.folder in left:
                took.append(now - entry.started + left[entry.folder])
            elif entry.started and entry.ended and entry.state == "finished":
                took.append(entry.ended - entry.started)
        if not took or not left:
            return ""
        queued = sum(e.state == "queued" for e in points) / self.slots
        return f"; about {duration(fmean(left.values()) + queued * fmean(took))} left"


def values_of(entry: LedgerEntry, swept: Sequence[str]) -> dict[str, Any]:
    """Return the swept keys of a point with their values, as its overrides have them."""
    keys = {key.lstrip("+") for key in swept}
    given = (o.lstrip("+").partition("=") for o in entry.overrides)
    return {key: parse_value(text) for key, equals, text in given if equals and key in keys}


def name_of(entry: LedgerEntry, swept: Sequence[str]) -> str:
    """Return the number of a point and the short names of what is swept."""
    return f"{entry.number} {short_label(values_of(entry, swept)) or entry.label}"


def waits(entry: LedgerEntry, where: Path) -> bool:
    """Return whether a run has stopped at a rung of successive halving, where it was to stop."""
    return entry.state == "preempted" and not entry.error and by_plan(where / entry.folder)


def line_of(entry: LedgerEntry, ledger: Ledger) -> str:
    """Return a line for a point whose state has changed."""
    path, name = ledger.path / entry.folder, name_of(entry, ledger.swept)
    if entry.state in _UNFINISHED and entry.error:
        return f"{name}  {entry.state}: {one_line(entry.error)}"
    if waits(entry, ledger.path):
        row = RunFolder(path).last_row()
        return f"{name}  waits at step {row.get('step', 0):,}{loss_in(row)}"
    if entry.state != "finished":
        return f"{name}  {entry.state}"
    line = f"{name}  finished{loss_in(RunFolder(path).summary, 'final ')}"
    if entry.ended and entry.started:
        line += f" in {duration(entry.ended - entry.started)}"
    return line


def loss_in(figures: Mapping[str, Any], prefix: str = "") -> str:
    """Return the validation loss in a row or summary, else the train loss, as a part of a line."""
    for key, name in (("val/loss", "val loss"), ("train/loss", "train loss")):
        if text := shown_as(figures.get(f"{prefix}{key}"), ".4f"):
            return f", {name} {text}"
    return ""


def unfinished(ledger: Ledger) -> list[str]:
    """Return lines that say why points did not finish, each with its whole reason."""
    left = [e for e in ledger.points if e.state in _UNFINISHED and e.error]
    return [fitted(line_of(entry, ledger)) for entry in left]


def shown_as(value: Any, form: str) -> str:
    """Return a figure in this form; the empty string where there is none."""
    return "" if value is None else format(value, form)


def counts(ledger: Ledger) -> str:
    """Return how many points are in which state."""
    states = Counter[str]()
    for entry in ledger.points:
        if entry.rung is not None:
            states[f"out at {entry.rung:.3g} of its steps"] += 1
        else:
            states["waiting" if waits(entry, ledger.path) else entry.state] += 1
    return ", ".join(f"{count} {state}" for state, count in states.items())


def results_table(ledger: Ledger) -> str:
    """Return the state and the final figures of every point, where nothing can be compared."""
    rows: list[tuple[str, ...]] = [("run", "state", "train loss", "val loss", "tokens/s")]
    for entry in ledger.points:
        run = RunFolder(ledger.path / entry.folder)
        summary = run.summary if entry.state != "infeasible" else {}
        state = entry.state if entry.rung is None else f"out at {entry.rung:.3g}"
        cells = [name_of(entry, ledger.swept), state]
        for key in ("train/loss", "val/loss"):
            cells.append(shown_as(summary.get(f"final {key}", run.last_row(key).get(key)), ".4f"))
        rows.append((*cells, shown_as(summary.get("mean tokens_per_sec"), ",.0f")))
    return aligned(rows, left=2, width=width_of(sys.stdout))


def width_of(stream: TextIO, otherwise: int | None = None) -> int | None:
    """Return the columns of the terminal that `stream` is, less one."""
    return shutil.get_terminal_size().columns - 1 if stream.isatty() else otherwise


def fitted(text: str, stream: TextIO | None = None) -> str:
    """Wrap text to a terminal; what goes into a file stays one line."""
    width = width_of(stream or sys.stdout)
    return text if width is None else in_lines(text, width)


def naming(
    points: Sequence[tuple[int, Mapping[str, Any]]],
    rest: Sequence[Sequence[str]],
    width: int | None,
) -> list[tuple[str, ...]]:
    """Return the first cells of a table of points, with their header.

    They are a number and a column a swept key where that fits beside the `rest` of the columns,
    else a short name. `points`: their numbers and the values of the swept keys.
    """
    keys = list(dict.fromkeys(key for _, values in points for key in values))
    short = short_keys(keys)
    columns = [("", *(short[key] for key in keys))]
    for n, values in points:
        columns.append((str(n), *(short_value(values[k]) if k in values else "" for k in keys)))
    whole = [(*a, *b) for a, b in zip(columns, rest, strict=True)]
    if width is None or len(aligned(whole, left=0).partition("\n")[0]) <= width:
        return columns
    return [("run",), *((f"{n} {short_label(values)}".rstrip(),) for n, values in points)]


def warn_of_budgets(spent: Sequence[budgets.Spent], knobs: Sweep, arguments: Sequence[str]) -> None:
    """Warn on standard error of points whose losses will not compare."""
    if knobs.report == "throughput":  # no losses are of interest there
        return
    # the same with another budget, into a folder of its own
    replaced = (*BUDGETS, "hydra.sweep.dir", "--measure", "--json")
    again = [*recordable(arguments), *kept_back(arguments)]
    kept = [a for a in again if key_of(a) not in replaced and not a.startswith("plan.")]
    for line in budgets.warning(spent, partial(command, "train", *kept)):
        print(redacted(fitted(line, sys.stderr) if line[0] != " " else line), file=sys.stderr)
