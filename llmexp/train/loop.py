"""The loop around the step: rows, evaluation, checkpoints, hooks, signals."""

from __future__ import annotations

import functools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmexp import mesh
from llmexp.config.sections import Config
from llmexp.config.values import ConfigError, Plain
from llmexp.data.window import Window
from llmexp.metrics.lines import format_row
from llmexp.run import Run
from llmexp.system import hardware
from llmexp.system.child import STOP
from llmexp.train.checkpointing import (
    advance_save,
    finish_save,
    save,
)
from llmexp.train.evaluation import validate
from llmexp.train.feature import Features
from llmexp.train.finishing import finish_step, none_applied
from llmexp.train.state import Loop
from llmexp.train.step import BAD_LOSS, EMPTY, Outcome, TrainingFailed, train_step


@dataclass(frozen=True)
class Due:
    """List what follows a step."""

    row: bool = False
    evaluation: bool = False
    measures: tuple[Callable[[], dict[str, float]], ...] = ()  # of features, for the row
    checkpoint: bool = False
    acts: tuple[Callable[[], None], ...] = ()  # of features


def due_after(
    step: int,
    last: bool,
    config: Config,
    run: Run,
    by_time: bool,
    features: Features,
) -> Due:
    """Return what follows a step: a function of the step and the config, but for `by_time`."""

    def every(steps: int | None) -> bool:
        return steps is not None and step % steps == 0

    chosen = config.train
    evaluation = last or step == chosen.stop_step or run.evaluations(chosen, step - 1, step) > 0
    measures, acts = (
        tuple(act for due in features.on(event) if (act := due(step, last)))
        for event in ("measure", "due")
    )
    return Due(
        row=evaluation or bool(measures) or every(chosen.log_every),
        evaluation=evaluation,
        measures=measures,
        checkpoint=(last and config.checkpoint.last)
        or by_time
        or every(config.checkpoint.every)
        or every(config.checkpoint.keep_every),
        acts=acts,
    )


def train(loop: Loop) -> str:
    """Train to the end ("finished") or to a signal ("preempted", with a checkpoint).

    Raises TrainingFailed.
    """
    config, max_steps, progress = loop.config, loop.run.max_steps, loop.progress
    stop_step = config.train.stop_step or max_steps
    if progress.step == 0 and config.checkpoint.save_initial:
        save(loop)
    first, minutes = progress.step, config.checkpoint.every_minutes
    windows = loop.windows(first)
    loop.features.at("train_start")
    while progress.step < max_steps:
        # by this rank's clock
        old = minutes is not None and time.monotonic() - loop.saved_at >= 60 * minutes
        stop, writing, by_time = mesh.any_rank(loop.mesh, STOP.requested, loop.is_writing, old)
        if loop.saving is not None and not writing:
            advance_save(loop)
        if stop or progress.step >= stop_step:
            show_rows(loop)
            loop.console.line(f"stopping at step {progress.step:,}; saving a checkpoint")
            finish_step(loop)
            save(loop, must=True)
            break
        last = progress.step + 1 == max_steps
        due = due_after(progress.step + 1, last, config, loop.run, by_time, loop.features)
        window, outcome = take_step(loop, windows, due)
        if due.row:
            report_step(loop, outcome, window, due)
        else:
            loop.features.at("step_end", window, None)
        slow = due.evaluation or due.measures or due.checkpoint or due.acts
        if loop.rows is not None and (slow or loop.rows.due):
            show_rows(loop)
        if loop.console.live:
            loop.console.progress(progress.step, *loop.shown)
        if progress.step == first + 1:  # all ranks are there, compiled and warm
            mesh.shorten_timeout(loop.mesh, config.parallelism.timeout_s)
        if due.checkpoint:
            save(loop, wait=last or not config.checkpoint.async_, must=last)
        for act in due.acts:
            act()
    loop.features.at("train_end")
    if progress.step < max_steps:
        return "preempted"
    finish_save(loop)  # without checkpoint.last one may be on its way
    if progress.consecutive_skips >= progress.step - loop.run.first_step:  # all of them
        raise TrainingFailed(none_applied(loop))
    return "finished"


def take_step(loop: Loop, windows: Iterator[Window], due: Due) -> tuple[Window, Outcome]:
    """Train on the next window. The host waits for the device only where `due` asks for it."""
    progress, meter = loop.progress, loop.meter
    loop.row_is_due, loop.evaluates = due.row, due.evaluation
    loop.features.at("step_start", progress.step + 1)
    with meter.stepping():
        with meter.waiting_for_data():
            window = next(windows)
        loop.features.at("backward_start", window)
        loop.seed(progress.step)
        try:
            outcome = train_step(loop.setup, window, lambda: finish_step(loop))
        except ConfigError as error:  # such as a rate that is not finite, maybe of this rank alone
            raise TrainingFailed(f"step {progress.step + 1} is refused: {error}") from error
        progress.step += 1
        loop.outcome = outcome
        meter.add(outcome.target_tokens)
        if due.row or due.checkpoint or due.acts:
            finish_step(loop)
    return window, outcome


def report_step(loop: Loop, outcome: Outcome, window: Window, due: Due) -> None:
    """Evaluate when due, and write the step's row; the host reads the device here."""
    progress = loop.progress
    row = build_row(loop, outcome, window)
    loop.row_is_due = True
    loop.features.at("step_end", window, row)
    if loop.rows is not None and (due.measures or due.evaluation):
        loop.rows.flush()  # this may take long
    for measure in due.measures:
        row |= measure()
    if due.evaluation:
        row |= validate(loop.parts, loop.setup)
        if not loop.run.evaluations(loop.config.train, progress.step - 1, progress.step):
            row["off_interval"] = True
        elif "val/loss" in row:
            progress.best_val_loss = min(row["val/loss"], progress.best_val_loss)
        loop.features.at("evaluated", window, row)
    loop.features.at("row_ready", row)
    publish(loop, row)


def build_row(loop: Loop, outcome: Outcome, window: Window) -> Plain:
    """Return the row of the last step, without what evaluation and hooks add.

    A figure that is not known is absent. All ranks call together and wait for the device. Raises
    TrainingFailed where a feature returns a figure that the row has already.
    """
    run, step, outcome = loop.run, loop.progress.step, outcome.read()
    row: Plain = {"step": step, "tokens_seen": loop.meter.tokens_seen()}
    if run.ramp:
        row["real_batch_size"] = run.sequences_at(step) - run.sequences_at(step - 1)
    row["epoch"] = run.sequences_at(step) / run.train_sequences
    if outcome.code not in (EMPTY, BAD_LOSS):
        row["train/loss"] = outcome.loss
    row["lr"] = outcome.lr
    if not outcome.skipped:
        row["grad_norm"] = outcome.grad_norm
        row["grad_norm_post_clip"] = outcome.grad_norm_post_clip
    if loop.setup.scaler.enabled:
        row["loss_scale"] = outcome.loss_scale
    row["skipped"] = outcome.skipped
    row["skipped_steps"] = loop.progress.skipped_steps
    row["target_tokens"] = int(outcome.target_tokens)
    tokens = run.tokens_at(step) - run.tokens_at(step - loop.meter.timed_steps)
    row |= loop.meter.rates(tokens, loop.mesh.world_size)
    loop.meter.restart()
    for feature in loop.features.acting("row"):
        found = feature.row(window)
        if taken := [key for key in found if key in row]:
            raise TrainingFailed(
                f"{type(feature).__name__} returned {taken[0]}, which the row of step {step} has "
                f"already; choose another name, for example mine/{taken[0]}"
            )
        row |= found
    if run.flops_per_token is not None:
        flops_per_sec = run.flops_per_token * row["tokens_per_sec_per_rank"]
        row["tflops_per_sec_per_rank"] = flops_per_sec / 1e12
        if loop.peak_flops is not None:
            row["mfu"] = flops_per_sec / loop.peak_flops
    memory = hardware.peak_memory_gib(loop.mesh.device)
    row["peak_memory_gib"] = mesh.largest(loop.mesh, memory)
    row["amp"] = int(run.precision in ("bf16", "fp16"))
    # in steps of today's size: later ones may take longer
    left = run.total_sequences - run.sequences_at(step)
    row["eta"] = left / run.stage_at(step - 1).real_batch_size * row["step_time"]
    return row


def publish(loop: Loop, row: Plain) -> None:
    """Give a row to metrics.jsonl. It is strict JSON: what has overflowed is absent."""
    row = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
    if loop.rows is not None:
        loop.rows.add(row)
        loop.shown = (row.get("train/loss"), row["tokens_per_sec"], row["eta"])


def show_rows(loop: Loop) -> None:
    """Write the rows that wait, and show the last one."""
    rows = loop.rows
    if rows is None or not rows.flush():
        return
    line = functools.partial(format_row, rows.figures.last, loop.run.max_steps, loop.run.max_epochs)
    live = loop.console.live
    loop.console.line(line(), line(shutil.get_terminal_size().columns) if live else None)
