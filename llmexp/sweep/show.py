"""A sweep on the terminal: a live table while it runs, lines elsewhere, a table at the end."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from llmexp import fileio, rundir
from llmexp.child import say
from llmexp.config import ConfigError
from llmexp.labels import label, parsed, short_keys, shown
from llmexp.metrics.console import format_duration
from llmexp.sweep.ledger import Entry, Ledger, figure
from llmexp.sweep.local import by_plan

REFRESH_S = 0.5
TAIL_BYTES = 16384  # of metrics.jsonl: more than a row


class Display:
    """What a person sees while the points run."""

    def __init__(self, ledger: Ledger, lines: bool = True, reasons: set[str] | None = None) -> None:
        """`lines`: says each change of a point's state. `reasons` gets the folders of those whose
        failure was told."""
        self._reasons = set() if reasons is None else reasons
        self._ledger, self._slots, self._lines = ledger, 1, lines
        self._live: Any = None
        self._at = 0.0
        self._max_steps: dict[str, int] = {}
        self._state = {entry.folder: entry.state for entry in ledger.points}
        self._waiting = {
            e.folder for e in ledger.points if e.state == "preempted" and waits(e, ledger.path)
        }

    def slots(self, number: int) -> None:
        """How many points run at the same time, for the time that is left."""
        self._slots = number

    def __enter__(self) -> Display:
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(
                self._table(), auto_refresh=False, transient=True, redirect_stdout=False
            )
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
        now = time.monotonic()
        for entry in self._ledger.points:
            if (before := self._state.get(entry.folder)) != entry.state:
                self._state[entry.folder] = entry.state
                self._waiting.discard(entry.folder)
                if entry.state == "preempted" and waits(entry, self._ledger.path):
                    self._waiting.add(entry.folder)
                if self._lines and (before is not None or entry.state != "queued"):
                    self.line(told(entry, self._ledger))
                    if entry.error:
                        self._reasons.add(entry.folder)
        if self._live is not None and now - self._at > REFRESH_S:
            self._at = now
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Any:
        from rich.text import Text

        columns, lines = shutil.get_terminal_size((100, 24))
        points = self._ledger.points
        order = ("running", "failed", "preempted", "queued", "finished", "infeasible")
        first = sorted(points, key=lambda e: (order.index(e.state), e.number))[: max(lines - 6, 3)]
        entries = sorted(first, key=lambda e: e.number)
        kept = 5 if columns >= 80 else 3
        rows: list[tuple[str, ...]] = [("state", "step", "train loss", "tokens/s", "left")[:kept]]
        left: dict[str, float] = {}
        for entry in entries:
            row = latest_row(self._ledger.path / entry.folder) if entry.state != "queued" else {}
            if entry.state == "running" and (eta := figure(row.get("eta"))) is not None:
                left[entry.folder] = eta
            cells = (
                self._word(entry),
                f"{row['step']:,}/{self._steps(entry):,}" if row else "",
                shown_as(row.get("train/loss"), ".4f"),
                shown_as(row.get("tokens_per_sec"), ",.0f"),
                format_duration(left[entry.folder]) if entry.folder in left else "",
            )
            rows.append(cells[:kept])
        swept = self._ledger.swept
        # One column is left free: an echoed ^C must not wrap a line.
        names = naming([(e.number, values_of(e, swept)) for e in entries], rows, columns - 1)
        text = table(
            [(*a, *b) for a, b in zip(names, rows, strict=True)], left=1, width=columns - 1
        )
        return Text(
            f"{text}\n{counts(points, self._waiting)}{self._time_left(left)}",
            no_wrap=True,
            overflow="ellipsis",
        )

    def _word(self, entry: Entry) -> str:
        return "waiting" if entry.folder in self._waiting else entry.state

    def _steps(self, entry: Entry) -> int:
        if entry.folder not in self._max_steps:
            steps = None
            with contextlib.suppress(ConfigError):  # it may be damaged
                steps = rundir.read_run(self._ledger.path / entry.folder).get("max_steps")
            self._max_steps[entry.folder] = steps if type(steps) is int else 0
        return self._max_steps[entry.folder]

    def _time_left(self, left: dict[str, float]) -> str:
        """Of the sweep: what is under way, then the points in the queue at the mean time of those
        that ran."""
        points = self._ledger.points
        took = [
            e.ended - e.started for e in points if e.state == "finished" and e.started and e.ended
        ]
        took += [
            time.time() - e.started + left[e.folder]
            for e in points
            if e.folder in left and e.started
        ]
        queued = sum(e.state == "queued" for e in points)
        if not took or not left:
            return ""
        seconds = sum(left.values()) / len(left) + queued * (sum(took) / len(took)) / max(
            self._slots, 1
        )
        return f"; about {format_duration(seconds)} left"


def values_of(entry: Entry, swept: Sequence[str]) -> dict[str, Any]:
    """Return the swept keys of a point with their values, as its overrides have them."""
    keys = {key.lstrip("+") for key in swept}
    given = (o.lstrip("+").partition("=") for o in entry.overrides)
    return {key: parsed(text) for key, equals, text in given if equals and key in keys}


def name_of(entry: Entry, swept: Sequence[str]) -> str:
    """Return the number of a point, which begins its folder's name, and the short names of what is
    swept."""
    return f"{entry.number} {label(values_of(entry, swept)) or entry.label}"


def waits(entry: Entry, where: Path) -> bool:
    """Tell whether a run has stopped at a rung of successive halving, where it was to stop."""
    path = where / entry.folder
    return not entry.error and by_plan(path)


def told(entry: Entry, ledger: Ledger) -> str:
    """Return a line for a point whose state has changed."""
    path, name = ledger.path / entry.folder, name_of(entry, ledger.swept)
    if entry.state in ("failed", "preempted") and entry.error:
        return f"{name}  {entry.state}: {flat(entry.error)}"
    if entry.state == "preempted" and waits(entry, ledger.path):
        row = latest_row(path)
        return f"{name}  waits at step {row.get('step', 0):,}{loss_in(row)}"
    if entry.state == "finished":
        took = (
            f" in {format_duration(entry.ended - entry.started)}"
            if entry.ended and entry.started
            else ""
        )
        return f"{name}  finished{loss_in(summary_of(path), 'final ')}{took}"
    return f"{name}  {entry.state}"


def loss_in(figures: Mapping[str, Any], prefix: str = "") -> str:
    """Return the validation loss in a row or summary, else the train loss, to be added to a line;
    empty without."""
    for key, name in (("val/loss", "val loss"), ("train/loss", "train loss")):
        if text := shown_as(figures.get(f"{prefix}{key}"), ".4f"):
            return f", {name} {text}"
    return ""


def unfinished(ledger: Ledger, told: Collection[str] = ()) -> list[str]:
    """Return lines that say why points did not finish; shortly where that was `told` before, by the
    points' folders."""
    lines = []
    for entry in ledger.points:
        if entry.state in ("failed", "infeasible", "preempted") and entry.error:
            text = f"{name_of(entry, ledger.swept)}  {entry.state}: {flat(entry.error)}"
            lines.append(
                textwrap.shorten(text, 79, placeholder=" ...")
                if entry.folder in told
                else fitted(text)
            )
    return lines


def summary_of(path: Path) -> dict[str, Any]:
    """Return the figures of a run's end; empty where there are none."""
    summary = rundir.read_status(path).get("summary")
    return summary if isinstance(summary, dict) else {}


def shown_as(value: Any, form: str) -> str:
    """Return a figure in this form; the empty string where there is none."""
    return "" if figure(value) is None else format(value, form)


def counts(points: Sequence[Entry], waiting: Collection[str] = ()) -> str:
    """Return how many points are in which state; `waiting`: the folders of those that wait at a
    rung."""
    states = ["waiting" if e.folder in waiting and e.rung is None else e.state for e in points]
    states = [
        s if e.rung is None else f"out at {e.rung:.3g} of its steps"
        for s, e in zip(states, points, strict=True)
    ]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def latest_row(path: Path) -> dict[str, Any]:
    """Return the last whole row of a run's metrics; empty where there is none yet."""
    lines = fileio.tail(path / rundir.METRICS, TAIL_BYTES).split(b"\n")
    try:
        row = json.loads(lines[-2]) if len(lines) > 1 else {}
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else {}


def results_table(ledger: Ledger) -> str:
    """Return state and final figures of every point, for sweeps of which there is nothing to
    compare."""
    rows: list[tuple[str, ...]] = [("run", "state", "train loss", "val loss", "tokens/s")]
    for entry in ledger.points:
        path = ledger.path / entry.folder
        summary = summary_of(path) if entry.state != "infeasible" else {}
        losses = [
            summary.get(f"final {k}", summary.get(f"latest {k}"))
            for k in ("train/loss", "val/loss")
        ]
        rate = shown_as(summary.get("mean tokens_per_sec"), ",.0f")
        figures = (*(shown_as(loss, ".4f") for loss in losses), rate)
        rows.append(
            (
                name_of(entry, ledger.swept),
                entry.state if entry.rung is None else f"out at {entry.rung:.3g}",
                *figures,
            )
        )
    return table(rows, left=2, width=width_of(sys.stdout))


def flat(error: str) -> str:
    """Return one line, where the repr of an exception has the newlines of its text as two
    characters each."""
    return " ".join(error.replace("\\n", " ").split())


def width_of(stream: TextIO, otherwise: int | None = None) -> int | None:
    """Return the columns of the terminal that `stream` is, less one."""
    return shutil.get_terminal_size().columns - 1 if stream.isatty() else otherwise


def fitted(text: str, stream: TextIO | None = None) -> str:
    """Wrap text to a terminal; what goes into a file stays one line."""
    width = width_of(stream or sys.stdout)
    return (
        text
        if width is None
        else textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    )


def naming(
    points: Sequence[tuple[int, Mapping[str, Any]]],
    rest: Sequence[Sequence[str]],
    width: int | None,
) -> list[tuple[str, ...]]:
    """Return the first cells of a table of points, with its header: number and short name, a column
    a swept key where that fits beside the `rest` of the columns.

    `points`: their numbers and the values of the swept keys; a key that a point lacks is left
    blank.
    """
    keys = list(dict.fromkeys(key for _, values in points for key in values))
    short = short_keys(keys)
    columns = [("", *(short[key] for key in keys))]
    columns += [
        (str(n), *(shown(values[k]) if k in values else "" for k in keys)) for n, values in points
    ]
    sizes = [
        max(map(len, column))
        for column in zip(*[(*a, *b) for a, b in zip(columns, rest, strict=True)], strict=True)
    ]
    if width is None or sum(sizes) + 2 * (len(sizes) - 1) <= width:
        return columns
    names = [f"{n} {label(values)}".rstrip() for n, values in points]
    return [("run",), *((name,) for name in names)]


def table(rows: Sequence[Sequence[str]], left: int, width: int | None = None) -> str:
    """Aligned columns: the first `left` ones to the left, figures to the right. Of the first column
    the middle is left out where the lines would be wider than `width`; nothing else is ever cut."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    if width is not None:
        widths[0] = min(widths[0], max(12, width - sum(w + 2 for w in widths[1:])))
    lines = []
    for row in rows:
        first = row[0] if len(row[0]) <= widths[0] else f"{row[0][:2]}…{row[0][3 - widths[0] :]}"
        cells = [
            f"{c:<{w}}" if i < left else f"{c:>{w}}"
            for i, (c, w) in enumerate(zip((first, *row[1:]), widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
