"""Sum up a run: its figures for status.json, and its end for its reader."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from llmexp.config.values import Plain
from llmexp.folders import rundir
from llmexp.folders.rows import Figures
from llmexp.metrics.keys import figures_in
from llmexp.metrics.lines import format_row
from llmexp.system.child import STOP
from llmexp.system.console import banner
from llmexp.system.text import Note, duration
from llmexp.train.state import Loop

_TRAINING: dict[str, Callable[[Any], str]] = {
    "tokens_seen": "{:,} target tokens".format,
    "own tokens_seen": "{:,} of them since the fork".format,
    "train_time": duration,
    "mean tokens_per_sec": "{:,.0f} tokens/s".format,
    "peak_memory_gib": "{:.3g} GiB of memory".format,
}


def summarise(loop: Loop) -> Plain:
    """Return the figures that end status.json and the summary of features, as far as known."""
    progress, run = loop.progress, loop.run
    rows = Figures(run.first_step) if loop.rows is None else loop.rows.figures
    newest, since = rows.newest, loop.meter.since_row()
    if progress.loss is not None:  # its step may have no row
        newest["train/loss"] = progress.loss
    found: Plain = {"steps": progress.step}
    if progress.step:
        with contextlib.suppress(RuntimeError):  # a device that is lost counts no more
            found["tokens_seen"] = loop.meter.tokens_seen()
            if run.parent:
                found["own tokens_seen"] = found["tokens_seen"] - run.begin.tokens_seen
    for key in figures_in([newest]):
        if key in newest:
            step, value = newest[key]
            # a stop may lie between two rows
            found[f"{'final' if step == progress.step else 'latest'} {key}"] = value
    best = min(progress.best_val_loss, found.get("final val/loss", math.inf))
    if math.isfinite(best):
        found["best val/loss"] = best
    # of the whole run, of a fork without its parent; what a resumed run did twice counts once
    seconds = rows.train_time + since["step_time"]
    if seconds and since["steps"] == progress.step - rows.step:  # else some were not timed
        found["train_time"] = seconds
        found["mean tokens_per_sec"] = (run.tokens_at(progress.step) - run.begin.tokens) / seconds
    found |= {k: rows.last[k] for k in ("mfu", "peak_memory_gib") if k in rows.last}
    if progress.step:
        found["skipped_steps"] = progress.skipped_steps
    for summary_of in loop.features.on("summary"):
        found |= summary_of()
    return found


def told(loop: Loop, event: str) -> list[Note]:
    """Return titles and texts of all features: `words`, `last_words`, `files`, ....

    The run is over and recorded: an error of one is told in its place.
    """
    found = list[Note]()
    for texts_of in loop.features.on(event):
        try:
            found += texts_of()
        except Exception as error:
            found.append(("missing", f"a part of this report: {error!r}"))
    return found


def say_the_end(loop: Loop, state: str, summary: Plain, last_words: list[Note]) -> None:
    """Show the end of a run: figures, words, files, the folder, the next command."""
    console, path, step = loop.console, loop.path, loop.progress.step
    how, saved = "finished", ""
    if state != "finished":
        by_plan = step >= (loop.config.train.stop_step or math.inf)
        cause = "train.stop_step" if by_plan else STOP.signal_name or "another rank"
        how, saved = f"preempted by {cause}", ", checkpoint saved"
    result = f"{how} at step {step:,} of {loop.run.max_steps:,}{saved}"
    sections = [("result", result), *_figures(summary), *told(loop, "words"), *last_words]
    to_copy = [*told(loop, "files"), ("folder", str(path)), *told(loop, "commands")]
    if state == "preempted":
        to_copy.append(("next", rundir.how_to_resume(path)))
    elif loop.saved:
        to_copy.append(("next", rundir.command_on(path, "sample", path, "--prompt", "The ")))
    console.line(banner(sections))
    column = max(len(label) for label, _ in sections) + 2
    for label, text in to_copy:  # never wrapped: these are for the clipboard
        console.line(f"{label:<{column}}{text}")


def _figures(summary: Plain) -> Iterator[Note]:
    """Yield what the training took, counts that are not 0, and losses; status.json has more."""
    parts = [show(summary[key]) for key, show in _TRAINING.items() if summary.get(key)]
    for key, count in summary.items():
        if isinstance(count, int) and count and key not in ("steps", *_TRAINING):
            parts.append(f"{count:,} {key}")
    yield "training", ", ".join(parts)
    for when in ("final ", "latest ", "best "):
        row = {k.removeprefix(when): v for k, v in summary.items() if k.startswith(when)}
        if row and (when == "final " or row != {"val/loss": summary.get("final val/loss")}):
            yield when, " ".join(format_row(row, 0).split()).replace(" |", ",")
