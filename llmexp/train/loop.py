"""The loop around the step: rows, evaluation, checkpoints, hooks, signals."""

from __future__ import annotations

import functools
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmexp import mesh
from llmexp.data.window import Window
from llmexp.metrics.lines import format_row
from llmexp.run import Run
from llmexp.runs.ending import COMES_AGAIN
from llmexp.settings.config import Config
from llmexp.settings.targets import place
from llmexp.system.child import STOP
from llmexp.train.checkpointing import go_on_saving, save
from llmexp.train.evaluation import score_tasks, validate
from llmexp.train.hooks import call_hooks
from llmexp.train.profiling import start_profiler
from llmexp.train.row import build_row
from llmexp.train.sampling import print_sample
from llmexp.train.state import Loop
from llmexp.train.step import StepResult, TrainingFailed, seed_step, train_step
from llmexp.train.verdicts import finish_step
from llmexp.train.windows import read_ahead


@dataclass(frozen=True)
class Due:
    """List what follows a step."""

    row: bool = False
    evaluation: bool = False
    tasks: bool = False
    checkpoint: bool = False
    sample: bool = False

    @property
    def verdict(self) -> bool:
        """Return whether the step has to be settled before the next one."""
        return self.row or self.checkpoint or self.sample


def due_after(step: int, last: bool, config: Config, run: Run, by_time: bool = False) -> Due:
    """Return what follows a step: a function of the step and the config, but for `by_time`."""

    def every(steps: int | None) -> bool:
        return steps is not None and step % steps == 0

    chosen = config.train
    evaluation = last or step == chosen.stop_step or run.evaluations(chosen, step - 1, step) > 0
    tasks = bool(chosen.tasks) and (last or every(chosen.tasks_every))
    return Due(
        row=evaluation or tasks or every(chosen.log_every),
        evaluation=evaluation,
        tasks=tasks,
        checkpoint=(last and config.checkpoint.last)
        or by_time
        or every(config.checkpoint.every)
        or every(config.checkpoint.keep_every),
        sample=not last and every(chosen.sample_every),
    )


def train(loop: Loop) -> str:
    """Train to the end ("finished") or to a signal ("preempted", with a checkpoint).

    Raises TrainingFailed.
    """
    config, max_steps, progress = loop.config, loop.run.max_steps, loop.progress
    stop_step = max_steps if config.train.stop_step is None else config.train.stop_step
    if progress.step == 0 and config.checkpoint.save_initial:
        save(loop)
    loop.setup.model.train()
    first = progress.step
    windows = read_ahead(loop.parts, loop.mesh, first)
    profiler = start_profiler(loop)
    while progress.step < max_steps:
        stop, writing, by_time = mesh.any_rank(
            loop.mesh, STOP.requested, loop.is_writing, due_by_time(loop)
        )
        if loop.saving is not None and not writing:
            go_on_saving(loop)
        if stop or progress.step >= stop_step:
            show_rows(loop)
            loop.out.console.line(f"stopping at step {progress.step:,}; saving a checkpoint")
            finish_step(loop)
            save(loop, must=True)
            break
        last = progress.step + 1 == max_steps
        due = due_after(progress.step + 1, last, config, loop.run, by_time)
        window, step = take_step(loop, windows, due)
        layers = loop.setup.layers
        if step.layers is not None and layers is not None and layers.wanted(progress.step):
            report_layers(loop, layers.row(step.layers))
        if due.row:
            report_step(loop, step, window, due)
        else:
            call_hooks(loop, "step_end", progress.step, window=window)
        slow = due.evaluation or due.tasks or due.checkpoint or due.sample
        if loop.out.rows is not None and (slow or loop.out.rows.due):
            show_rows(loop)
        loop.out.console.progress(progress.step, *loop.shown)
        if progress.step == first + 1:  # all ranks are there, compiled and warm
            mesh.shorten_timeout(loop.mesh, config.parallelism.timeout_s)
        if profiler is not None:
            profiler.step()
        if due.checkpoint:
            save(loop, wait=last or not config.checkpoint.async_, must=last)
        # a split model needs all its ranks to write a text
        if due.sample and (loop.out.main or loop.mesh.sharded):
            print_sample(loop)
    if profiler is not None:
        profiler.stop()  # writes a trace that the end of the run has cut short
    if progress.step < max_steps:
        return "preempted"
    if progress.updates == 0:
        raise TrainingFailed(
            f"none of the {progress.step:,} steps applied an update: every window had no valid "
            "target (as data.ignore_id may cause), overflowed in fp16, or was skipped as an "
            f"outlier; {COMES_AGAIN}"
        )
    return "finished"


def due_by_time(loop: Loop) -> bool:
    """Return whether the last checkpoint is so old, by this rank's clock, that one is due."""
    minutes = loop.config.checkpoint.every_minutes
    return minutes is not None and time.monotonic() - loop.saved_at >= 60 * minutes


def take_step(loop: Loop, windows: Iterator[Window], due: Due) -> tuple[Window, StepResult]:
    """Train on the next window. The host waits for the device only where a verdict is due."""
    progress, meter = loop.progress, loop.meter
    hook = functools.partial(call_hooks, loop, step=progress.step + 1, wanted=due.row)
    hook("step_start")
    with meter.stepping():
        with meter.waiting_for_data():
            window = next(windows)
        hook("backward_start", window=window)  # before the seed: it may draw random numbers
        seed, foreign = loop.config.train.seed, loop.parts.foreign_code
        seed_step(seed, progress.step, loop.mesh.drawing, loop.mesh.device, foreign)
        gradients_ready = functools.partial(hook, "backward_end", window=window)
        step = train_step(loop.setup, window, lambda: finish_step(loop), gradients_ready)
        progress.step += 1
        loop.pending = step
        if step.layers is not None:
            loop.last_layers.append((progress.step, step.layers))
        meter.add(step.target_tokens)
        if due.verdict:
            finish_step(loop)
    return window, step


def report_step(loop: Loop, step: StepResult, window: Window, due: Due) -> None:
    """Evaluate when due, and write the step's row; the host reads the device here."""
    progress = loop.progress
    row = build_row(loop, step, window, due.evaluation)
    call_hooks(loop, "step_end", progress.step, row, window=window, wanted=True)
    if loop.out.rows is not None and (due.tasks or due.evaluation):
        loop.out.rows.flush()  # this may take long
    if due.tasks:
        row |= score_tasks(loop.parts, loop.setup)
    if due.evaluation:
        row |= validate(loop.parts, loop.setup, loop.text_bytes)
        if "val/loss" in row:
            best = math.inf if progress.best_val_loss is None else progress.best_val_loss
            progress.best_val_loss = min(row["val/loss"], best)
        call_hooks(loop, "evaluated", progress.step, row, window=window, wanted=True)
    figures, loop.figures = loop.figures, {}
    for key, (value, (name, hook)) in figures.items():
        if key in row:
            raise TrainingFailed(
                f"the hook {name}{place(hook)} returned {key}, which the row of step "
                f"{progress.step} has already; choose another name, for example mine/{key}"
            )
        row[key] = value
    publish(loop, row)


def report_layers(loop: Loop, figures: dict[str, Any]) -> None:
    """Write the figures of the last step layer by layer."""
    tokens_seen = loop.meter.tokens_seen()  # by all ranks
    if loop.out.layers is not None:
        line = {"step": loop.progress.step, "tokens_seen": tokens_seen}
        loop.out.layers.add(line | figures)
        loop.out.layers.flush()


def publish(loop: Loop, row: dict[str, Any]) -> None:
    """Give a row to metrics.jsonl. It is strict JSON: what has overflowed is absent."""
    row = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
    if loop.out.rows is not None:
        loop.out.rows.add(row)
        loop.shown = (row.get("train/loss"), row["tokens_per_sec"], row["eta"])


def show_rows(loop: Loop) -> None:
    """Write the rows that wait, and show the last one."""
    rows = loop.out.rows
    if rows is None or not rows.flush():
        return
    lengths = (loop.run.max_steps, loop.run.max_epochs)
    short = None
    if loop.out.console.live:
        short = format_row(rows.figures.last, *lengths, shutil.get_terminal_size().columns)
    loop.out.console.line(format_row(rows.figures.last, *lengths), short)
