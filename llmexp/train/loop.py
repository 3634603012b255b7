"""The loop around the step: rows, evaluation, checkpoints, hooks, skipped updates, signals."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from llmexp import mesh
from llmexp.checkpoint import loading
from llmexp.child import STOP
from llmexp.data.reader import Cut, Window, read_windows
from llmexp.metrics import hardware
from llmexp.metrics.console import format_row
from llmexp.metrics.meter import Meter
from llmexp.metrics.noise import NoiseScale
from llmexp.metrics.norms import Norms
from llmexp.metrics.outliers import describe
from llmexp.train.checkpointing import finish_saving, go_on_saving, save
from llmexp.train.diagnose import first_bad
from llmexp.train.hooks import call_hooks
from llmexp.train.sampling import first_words, sample
from llmexp.train.state import OUTLIERS_KEPT, Loop, Measured, Progress
from llmexp.train.step import (
    BAD_LOSS,
    BAD_NORM,
    EMPTY,
    OK,
    OUTLIER,
    SKIPPED_OUTLIER,
    Seen,
    Setup,
    Step,
    TrainingFailed,
    evaluate,
    order_of,
    seed_step,
    train_step,
)


def train(loop: Loop) -> str:
    """Train to the end ("finished") or to a signal ("preempted", with a checkpoint). Raises
    TrainingFailed."""
    s, p, meter, config = loop.s, loop.p, loop.meter, loop.s.parts.config
    max_steps = s.parts.run.max_steps
    stop_step = max_steps if config.train.stop_step is None else config.train.stop_step
    if p.step == 0 and config.checkpoint.save_initial:
        save(loop)
    s.model.train()
    reader = read_ahead(s, p.step)
    profiler = start_profiler(loop)
    first = p.step
    while p.step < max_steps:
        stop, writing = mesh.any_rank(s.mesh, STOP.requested, loop.writer.busy())
        if loop.saving is not None and not writing:
            go_on_saving(loop)
        if stop or p.step >= stop_step:
            loop.out.console.line(f"stopping at step {p.step:,}; saving a checkpoint")
            settle(loop)
            save(loop, must=True)
            break
        due_row, due_eval, due_save, due_sample = due_at(loop, p.step + 1)
        hook = functools.partial(call_hooks, loop, step=p.step + 1, wanted=due_row)
        hook("step_start")
        with meter.stepping():
            with meter.waiting_for_data():
                window = next(reader)
            hook("backward_start")  # before the seed: it may draw random numbers
            seed_step(config.train.seed, p.step, s.mesh.dp_rank, s.mesh.device)
            step = train_step(
                s, window, lambda: settle(loop), functools.partial(hook, "backward_end")
            )
            p.step += 1
            loop.pending, loop.own_nll = step.verdict, step.own_nll
            meter.add(step.target_tokens, step.clipped)
            if due_row or due_save or due_sample:
                settle(loop)  # the host waits for the device here, and only here
        if due_row:
            report(loop, step, window, due_eval)
        else:
            call_hooks(loop, "step_end", p.step)
        loop.out.console.progress(p.step, *loop.shown)
        if p.step == first + 1:  # all ranks are there, compiled and warm
            mesh.shorten_timeout(s.mesh, config.parallelism.timeout_s)
        if profiler is not None:
            profiler.step()
        if due_save:
            last = p.step == max_steps
            save(loop, wait=last or not config.checkpoint.async_, must=last)
        # a split model speaks with all its ranks
        if due_sample and (loop.out.main or s.mesh.sharded):
            say_sample(loop)
    if profiler is not None:
        profiler.stop()  # writes a trace that the end of the run has cut short
    if p.step < max_steps:
        return "preempted"
    if p.updates == 0:
        raise TrainingFailed(
            f"none of the {p.step:,} steps applied an update: every window had no valid target (as "
            "data.ignore_id may cause), overflowed in fp16, or was skipped as an outlier"
        )
    return "finished"


def due_at(loop: Loop, step: int) -> tuple[bool, bool, bool, bool]:
    """Return whether a row, an evaluation, a checkpoint and a text sample are due after this
    step."""
    config, last = loop.s.parts.config, step == loop.s.parts.run.max_steps

    def every(steps: int | None) -> bool:
        return steps is not None and step % steps == 0

    evaluation = last or step == config.train.stop_step or every(config.train.eval_every)
    row = evaluation or every(config.train.log_every)
    return (
        row,
        evaluation,
        last or every(config.checkpoint.every),
        not last and every(config.train.sample_every),
    )


def settle(loop: Loop) -> int:
    """Look at the verdict on the last step; the number of applied updates. Raises
    TrainingFailed."""
    p, s = loop.p, loop.s
    if loop.pending is None:
        return p.updates
    seen, loop.pending = loop.pending.read(), None
    code = seen.code
    note(loop, seen)
    if code in (OK, OUTLIER):
        p.updates += 1
        p.consecutive_skips = 0
        return p.updates
    what = {
        EMPTY: "no valid target",
        SKIPPED_OUTLIER: "an outlier",
        BAD_LOSS: "a loss",
        BAD_NORM: "a gradient norm",
    }[code]
    overflowed = code in (BAD_LOSS, BAD_NORM)
    if overflowed and not s.scaler.enabled:
        assert loop.own_nll is not None
        before_failing(loop)
        ranks = mesh.ranks_where(s.mesh, not bool(loop.own_nll.isfinite()))
        where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
        raise TrainingFailed(
            f"step {p.step} has {what} that is not finite{where}; the update was not applied; "
            f"{diagnosed(loop)}{grew(loop)}"
        )
    p.skipped_steps += 1
    p.consecutive_skips += 1
    limit = s.parts.config.train.max_consecutive_skips
    if overflowed and s.scaler.state_dict()["scale"] < 1:
        before_failing(loop)
        raise TrainingFailed(
            f"the fp16 loss scale fell below 1 at step {p.step}: these gradients do not fit fp16; "
            f"{diagnosed(loop)}"
        )
    if p.consecutive_skips > limit:
        before_failing(loop)
        raise TrainingFailed(
            f"{p.consecutive_skips} updates in a row were skipped, the last at step {p.step} "
            f"({what}); train.max_consecutive_skips={limit}"
        )
    return p.updates


def before_failing(loop: Loop) -> None:
    """All ranks are here: the checkpoint that is on its way is still finished."""
    try:
        finish_saving(loop)
    except (OSError, TrainingFailed) as error:  # what is wrong with the step comes first
        loop.out.console.line(f"WARNING: {error}")


def grew(loop: Loop) -> str:
    """Return a hint, where the losses of the rows had been on their way up."""
    rows = loop.out.rows.rows if loop.out.rows is not None else []
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    if len(losses) < 2 and loop.p.step < 100:  # too soon for rows to tell
        return (
            "; if the steps are too large, a smaller optimizer.lr or a longer "
            "schedule.warmup_steps helps"
        )
    if not losses or losses[-1] < min(losses) + 1:
        return ""
    return (
        f"; the loss had grown from {min(losses):.4g} to {losses[-1]:.4g} before: a smaller "
        "optimizer.lr, or a longer schedule.warmup_steps, may keep it from that"
    )


def diagnosed(loop: Loop) -> str:
    """Return where the last step went wrong, from a second pass over it; for a run that ends."""
    try:
        window = next(read_ahead(loop.s, loop.p.step - 1))
        return first_bad(loop.s, window)
    except Exception as error:  # it only explains
        return f"where is not known: {error!r}"


def note(loop: Loop, seen: Seen) -> None:
    """Take what is measured of the last step; its figures are on the host now."""
    p, outliers = loop.p, loop.s.outliers
    if seen.code in (OUTLIER, SKIPPED_OUTLIER):
        assert outliers.limits is not None
        p.outlier_count += 1
        p.outlier_steps = [*p.outlier_steps, p.step][-OUTLIERS_KEPT:]
        skipped = "; its update was skipped" if seen.code == SKIPPED_OUTLIER else ""
        why = describe(outliers.limits, seen.loss, seen.grad_norm)
        loop.out.console.line(f"step {p.step:,} is an outlier: {why}{skipped}")
    if seen.code in (OK, OUTLIER, SKIPPED_OUTLIER):
        outliers.add(seen.loss, seen.grad_norm)
        if seen.small is not None:
            loop.measured.noise.add(*seen.small, seen.grad_norm**2, seen.target_tokens)
    if seen.code in (OK, OUTLIER):
        loop.measured.norms.add(seen.grad_norm, seen.clipped)


def report(loop: Loop, step: Step, window: Window, due_eval: bool) -> None:
    """Evaluate when due and write the step's row; the host reads the device here."""
    s, p, run, out = loop.s, loop.p, loop.s.parts.run, loop.out
    code = step.verdict.read().code
    row: dict[str, Any] = {"step": p.step, "tokens_seen": loop.meter.counts()[0]}
    row["epoch"] = min(p.step * run.real_batch_size, run.total_sequences) / run.train_sequences
    applied = code in (OK, OUTLIER)
    if code not in (EMPTY, BAD_LOSS):
        row["train/loss"] = float(step.loss)
    row["lr"] = step.lr
    if applied:
        row["grad_norm"] = float(step.grad_norm)
        row["grad_norm_post_clip"] = float(step.grad_norm_post_clip)
    row["weight_norm"] = float(mesh.global_norm(s.mesh, [q.detach() for q in s.parameters]))
    if step.loss_scale is not None:
        row["loss_scale"] = float(step.loss_scale)
    row |= {
        "skipped": not applied,
        "skipped_steps": p.skipped_steps,
        "target_tokens": int(step.target_tokens),
    }
    if s.parts.config.train.data_digest:
        digest = int(mesh.total(s.mesh, torch.tensor(window.digest, device=s.mesh.device)))
        row["data_digest"] = f"{digest % 2**63:016x}"
    row |= (
        loop.meter.take(s.mesh.world_size)
        | loop.measured.norms.take()
        | loop.measured.noise.figures()
    )
    if run.facts.single_rank_rate is not None:
        row["scaling_efficiency"] = row["tokens_per_sec_per_rank"] / run.facts.single_rank_rate
    if s.outliers.sigma is not None:
        row["outlier_steps"] = p.outlier_count
    if run.facts.flops_per_token is not None:
        flops_per_sec = run.facts.flops_per_token * row["tokens_per_sec_per_rank"]
        row["tflops_per_sec_per_rank"] = flops_per_sec / 1e12
        if loop.peak_flops is not None:
            row["mfu"] = flops_per_sec / loop.peak_flops
    row["peak_memory_gib"] = float(
        mesh.maximum(
            s.mesh, torch.tensor(hardware.peak_memory_gib(s.mesh.device), dtype=torch.float64)
        )
    )
    row["amp"] = int(s.parts.precision in ("bf16", "fp16"))
    row["eta"] = (run.max_steps - p.step) * row["step_time"]
    call_hooks(loop, "step_end", p.step, row, wanted=True)
    if due_eval:
        row |= evaluate(s, loop.byte_lengths)
        if "val/loss" in row:
            p.best_val_loss = min(
                row["val/loss"], math.inf if p.best_val_loss is None else p.best_val_loss
            )
        call_hooks(loop, "evaluated", p.step, row, wanted=True)
    figures, loop.figures = loop.figures, {}
    for key, (value, hook) in figures.items():
        if key in row:
            raise TrainingFailed(
                f"the hook {hook} returned {key}, which the row of step {p.step} has already; "
                f"choose another name, for example mine/{key}"
            )
        row[key] = value
    # A row is strict JSON: what has overflowed is absent.
    row = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
    if out.rows is not None:
        out.rows.append(row)
        lengths, columns = (run.max_steps, run.max_epochs), shutil.get_terminal_size().columns
        out.console.line(format_row(row, *lengths), format_row(row, *lengths, columns))
        loop.shown = (row.get("train/loss"), row["tokens_per_sec"], row["eta"])


def measuring(s: Setup) -> Measured:
    """For a run that starts."""
    config = s.parts.config
    return Measured(
        Norms(config.clip.kind, config.clip.max_norm), NoiseScale(s.parts.run.sequence_length)
    )


def resume(s: Setup, loaded: loading.Loaded) -> tuple[Progress, Meter, Measured]:
    """Put a checkpoint back, whatever the layout that saved it: parameters, moments, scaler,
    counters, measurements. (The RNG and the data position follow from the step number.) Raises
    CheckpointError."""
    measured = measuring(s)
    try:
        loading.restore_model(loaded, s.model)
        loading.restore_optimizers(loaded, s.model, s.optimizers)
        s.scaler.load_state_dict(loaded.state["scaler"])
        for name, part in (
            ("norms", measured.norms),
            ("noise", measured.noise),
            ("outliers", s.outliers),
        ):
            if name in loaded.state:  # older checkpoints have none
                part.load_state_dict(loaded.state[name])
        progress, meter = (
            Progress(**loaded.state["progress"]),
            Meter(s.mesh.device, **loaded.state["meter"]),
        )
        if progress.step != loaded.step:
            raise ValueError(f"its progress is of step {str(progress.step)[:60]}")
    except loading.CheckpointError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        file = loaded.path / loading.STATE
        raise loading.CheckpointError(f"{file} is not the state of this run: {error!r}") from error
    return progress, meter, measured


def read_ahead(s: Setup, start_step: int) -> Iterator[Window]:
    """Yield this rank's windows from `start_step` on, read ahead in the background."""
    run = s.parts.run
    return read_windows(
        order_of(s.parts),
        Cut(run.micro_batch_size, s.mesh.dp_rank, s.mesh.dp_size),
        start_step,
        run.max_steps,
        digest=s.parts.config.train.data_digest,
        pin_memory=s.mesh.device.type == "cuda",
    )


def sample_text(loop: Loop) -> str:
    """Return a sampled text from the start of a document, or from the first words of the validation
    text, on one line."""
    parts = loop.s.parts
    # no position that was never trained
    length, tokens = (parts.run.sequence_length, parts.config.train.sample_tokens)
    prompt = first_words(parts.tokenizer, parts.corpus)
    return " ".join(
        sample(parts.tokenizer, loop.s.loss, length, parts.precision, prompt, tokens).split()
    )


def say_sample(loop: Loop) -> None:
    """In mid-run, where a sample that fails is only said."""
    try:
        text = sample_text(loop)
    except Exception as error:
        if loop.s.mesh.sharded and not isinstance(error, (KeyError, ValueError)):
            raise  # not of the tokenizer: other ranks may be waiting for this one in the model
        text = f"none: {error!r}"
    loop.out.console.line(f"sample: {text}")


def start_profiler(loop: Loop) -> torch.profiler.profile | None:
    """Return a torch.profiler trace of steps profile_start .. profile_start+profile_steps-1 into
    the run folder."""
    train_config = loop.s.parts.config.train
    first = train_config.profile_start
    if first is None or not loop.out.main or first <= loop.p.step:
        return None
    target = loop.out.path / f"trace_step_{first:08d}.json"
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=first - 1 - loop.p.step, warmup=0, active=train_config.profile_steps, repeat=1
        ),
        on_trace_ready=lambda done: export_trace(done, target),
    )
    profiler.start()
    return profiler


def export_trace(done: torch.profiler.profile, path: Path) -> None:
    """Not through a link in the place of the file."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        done.export_chrome_trace(str(temporary))
        with contextlib.suppress(FileNotFoundError):  # torch has said why it could not write it
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
