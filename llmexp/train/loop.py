"""The loop around the step: rows, evaluation, checkpoints, hooks, skipped updates, signals."""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp import checkpoint, folder, mesh, saving
from llmexp.data.reader import Window, read_windows
from llmexp.metrics import hardware
from llmexp.metrics.console import Console, format_row
from llmexp.metrics.meter import Meter
from llmexp.metrics.noise import NoiseScale
from llmexp.metrics.norms import Norms
from llmexp.metrics.outliers import describe
from llmexp.metrics.tracker import Tracker
from llmexp.process import STOP
from llmexp.run import Run
from llmexp.sample import sample
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
    Verdict,
    evaluate,
    seed_step,
    train_step,
)


@dataclass
class Progress:
    """Where the run is: everything besides tensors that a checkpoint has to restore."""

    step: int = 0  # windows consumed
    updates: int = 0  # applied updates: the schedule's position
    skipped_steps: int = 0
    consecutive_skips: int = 0
    best_val_loss: float | None = None
    outlier_count: int = 0
    outlier_steps: list[int] = dataclasses.field(default_factory=list)  # the last OUTLIERS_KEPT of them


OUTLIERS_KEPT = 100


@dataclass(frozen=True)
class Measured:
    """What a run measures for its comparison with others."""

    norms: Norms
    noise: NoiseScale


@dataclass(frozen=True)
class Outputs:
    """Where a run writes to. Only rank 0 writes."""

    path: Path
    main: bool
    console: Console
    tracker: Tracker
    rows: folder.Rows | None


@dataclass
class Saving:
    """A checkpoint on its way: all ranks write their files, then rank 0 commits them."""

    step: int
    commit: Callable[[], Path]
    committing: bool = False


@dataclass
class Loop:
    """The state of the loop on this rank."""

    s: Setup
    out: Outputs
    p: Progress
    meter: Meter
    measured: Measured
    byte_lengths: Tensor
    peak_flops: float | None
    pending: Verdict | None = None  # verdict on the last step, not yet looked at
    own_nll: Tensor | None = None  # of the last step, to say which rank has a loss that is not finite
    writer: saving.Writer = dataclasses.field(default_factory=saving.Writer)
    saving: Saving | None = None  # the checkpoint that is on its way to the disk
    saved_step: int | None = None  # of the newest checkpoint
    shown: tuple[float | None, ...] = (None, None, None)  # loss, tokens/s and eta of the bar


@dataclass(frozen=True)
class HookContext:
    """What a hook sees. `step` counts from 1; `row` holds the row's figures so far, None when no row is due."""

    step: int
    model: nn.Module
    optimizers: list[Optimizer]
    run: Run
    row: dict[str, Any] | None


def train(loop: Loop) -> str:
    """Trains to the end ("finished") or to a signal ("preempted", with a checkpoint). Raises TrainingFailed."""
    s, p, meter, config = loop.s, loop.p, loop.meter, loop.s.parts.config
    max_steps, log_every, every = s.parts.run.max_steps, config.train.log_every, config.checkpoint.every
    eval_every, sample_every = config.train.eval_every, config.train.sample_every
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
            save(loop)
            if profiler is not None:
                profiler.stop()
            return "preempted"
        call_hooks(loop, "step_start", p.step + 1)
        with meter.stepping():
            with meter.waiting_for_data():
                window = next(reader)
            seed_step(config.train.seed, p.step, s.mesh.dp_rank, s.mesh.device)
            step = train_step(s, window, lambda: settle(loop))
            p.step += 1
            loop.pending, loop.own_nll = step.verdict, step.own_nll
            meter.add(step.target_tokens, step.clipped)
            last = p.step == max_steps
            due_eval = last or p.step == stop_step or (eval_every is not None and p.step % eval_every == 0)
            due_row = due_eval or p.step % log_every == 0
            due_save = last or (every is not None and p.step % every == 0)
            due_sample = sample_every is not None and not last and p.step % sample_every == 0
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
            save(loop, wait=last or not config.checkpoint.async_)
        if due_sample and (loop.out.main or s.mesh.sharded):  # a split model speaks with all its ranks
            loop.out.console.line(f"sample: {sample_text(loop)}")
    if profiler is not None:
        profiler.stop()  # writes a trace that the end of the run has cut short
    return "finished"


def settle(loop: Loop) -> int:
    """Looks at the verdict on the last step; the number of applied updates. Raises TrainingFailed."""
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
    if loop.saving is not None and loop.saving.step < p.step:  # this step may be the run's last
        finish_saving(loop)
    what = {EMPTY: "no valid target", SKIPPED_OUTLIER: "an outlier", BAD_LOSS: "a loss", BAD_NORM: "a gradient norm"}[
        code
    ]
    overflowed = code in (BAD_LOSS, BAD_NORM)
    if overflowed and not s.scaler.enabled:
        assert loop.own_nll is not None
        ranks = mesh.ranks_where(s.mesh, not bool(loop.own_nll.isfinite()))
        where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
        raise TrainingFailed(f"step {p.step} has {what} that is not finite{where}; the update was not applied")
    p.skipped_steps += 1
    p.consecutive_skips += 1
    limit = s.parts.config.train.max_consecutive_skips
    if overflowed and s.scaler.state_dict()["scale"] < 1:
        raise TrainingFailed(f"the fp16 loss scale fell below 1 at step {p.step}: these gradients do not fit fp16")
    if p.consecutive_skips > limit:
        raise TrainingFailed(
            f"{p.consecutive_skips} updates in a row were skipped, the last at step {p.step} ({what}); "
            f"train.max_consecutive_skips={limit}"
        )
    return p.updates


def note(loop: Loop, seen: Seen) -> None:
    """What is measured of the last step; its figures are on the host now."""
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
    """Evaluates when due and writes the step's row; the host reads the device here."""
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
    row |= {"skipped": not applied, "skipped_steps": p.skipped_steps, "target_tokens": int(step.target_tokens)}
    if s.parts.config.train.data_digest:
        digest = int(mesh.total(s.mesh, torch.tensor(window.digest, device=s.mesh.device)))
        row["data_digest"] = f"{digest % 2**63:016x}"
    row |= loop.meter.take(s.mesh.world_size) | loop.measured.norms.take() | loop.measured.noise.figures()
    if s.outliers.sigma is not None:
        row["outlier_steps"] = p.outlier_count
    if run.facts.flops_per_token is not None:
        flops_per_sec = run.facts.flops_per_token * row["tokens_per_sec_per_rank"]
        row["tflops_per_sec_per_rank"] = flops_per_sec / 1e12
        if loop.peak_flops is not None:
            row["mfu"] = flops_per_sec / loop.peak_flops
    row["peak_memory_gib"] = float(
        mesh.maximum(s.mesh, torch.tensor(hardware.peak_memory_gib(s.mesh.device), dtype=torch.float64))
    )
    row["amp"] = int(s.parts.precision in ("bf16", "fp16"))
    row["eta"] = (run.max_steps - p.step) * row["step_time"]
    figures = call_hooks(loop, "step_end", p.step, row)
    if due_eval:
        row |= evaluate(s, loop.byte_lengths)
        if "val/loss" in row:
            p.best_val_loss = min(row["val/loss"], math.inf if p.best_val_loss is None else p.best_val_loss)
        figures |= call_hooks(loop, "evaluated", p.step, row)
    if clash := sorted(figures.keys() & row.keys()):
        raise TrainingFailed(f"a hook returned {', '.join(clash)}, which the row has already; choose another name")
    row |= figures
    # A row is strict JSON: what has overflowed is absent.
    row = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
    if out.rows is not None:
        out.rows.append(row)
        out.tracker.log(row)
        columns = shutil.get_terminal_size().columns
        out.console.line(format_row(row, run.max_steps), format_row(row, run.max_steps, columns))
        loop.shown = (row.get("train/loss"), row["tokens_per_sec"], row["eta"])


def call_hooks(loop: Loop, event: str, step: int, row: dict[str, Any] | None = None) -> dict[str, float]:
    """Calls the user's functions, here and nowhere else; the figures that they return, as floats."""
    figures: dict[str, float] = {}
    for name, hook in loop.s.parts.hooks:
        context = HookContext(
            step, loop.s.model, loop.s.optimizers, loop.s.parts.run, None if row is None else dict(row)
        )
        try:
            found = hook(event, context) or {}
            if row is not None:  # else there is no row to take them, and reading a tensor makes the host wait
                figures |= {str(k): float(v) for k, v in found.items()}
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{at.filename}:{at.lineno}"
            raise TrainingFailed(f"the hook {name} failed at {event} of step {step}: {error!r} ({where})") from error
    return {k: v for k, v in figures.items() if math.isfinite(v)}  # a row is strict JSON


def save(loop: Loop, wait: bool = True) -> None:
    """Saves a checkpoint of the current step; its rows reach the disk first. Without `wait` it returns as soon as the
    state is copied to host memory, and `go_on_saving` does the rest between later steps."""
    s, p, out = loop.s, loop.p, loop.out
    settle(loop)
    finish_saving(loop)
    if loop.saved_step == p.step:
        return
    tokens_seen, clipped, steps = loop.meter.counts()
    run, root, keep = s.parts.run, out.path / folder.CHECKPOINTS, s.parts.config.checkpoint.keep
    if out.rows is not None:
        out.rows.sync()
    geometry = {k: getattr(run, k) for k in ("real_batch_size", "sequence_length", "dp_size", "world_size")}
    meta = {"tokens_seen": tokens_seen, "geometry": {**geometry, "parallelism": run.facts.parallelism}}
    state = {
        "progress": dataclasses.asdict(p),
        "meter": {"tokens_seen": tokens_seen, "clipped": clipped, "steps": steps},
        "norms": loop.measured.norms.state_dict(),
        "noise": loop.measured.noise.state_dict(),
        "outliers": s.outliers.state_dict(),
        "scaler": s.scaler.state_dict(),
    }
    pieces = saving.snapshot(s.model, s.optimizers, s.mesh.rank, s.mesh.world_size, copy=not wait)
    loop.saving = Saving(p.step, functools.partial(saving.commit, root, p.step, pieces, state, meta, keep))
    loop.writer.start(functools.partial(saving.write, root, p.step, pieces))
    if wait:
        finish_saving(loop)


def go_on_saving(loop: Loop) -> None:
    """The next stage of the checkpoint that is on its way. All ranks are here at the same step. Raises OSError."""
    saving, joined = loop.saving, loop.s.mesh
    assert saving is not None
    error: OSError | None = None
    try:
        loop.writer.wait()
    except OSError as failed:
        error = failed
    if failing := mesh.ranks_where(joined, error is not None):
        loop.saving = None
        if error is None:
            time.sleep(1.0)  # who knows the cause says it first
        raise error or OSError(f"saving step {saving.step} failed on rank {', '.join(map(str, failing))}")
    if not saving.committing:
        saving.committing = True
        if loop.out.main:
            loop.writer.start(saving.commit)
        return
    loop.saving, loop.saved_step = None, saving.step
    call_hooks(loop, "saved", saving.step)


def finish_saving(loop: Loop) -> None:
    """Waits until the checkpoint that is on its way, if there is one, is committed."""
    while loop.saving is not None:
        # By turns, not in one long wait: a large checkpoint may take longer than a rank may be missing.
        pause = 0.001
        while mesh.any_rank(loop.s.mesh, loop.writer.busy())[0]:
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        go_on_saving(loop)


def measuring(s: Setup) -> Measured:
    """For a run that starts."""
    config = s.parts.config
    return Measured(Norms(config.clip.kind, config.clip.max_norm), NoiseScale(s.parts.run.sequence_length))


def resume(s: Setup, loaded: checkpoint.Loaded) -> tuple[Progress, Meter, Measured]:
    """Puts a checkpoint back, whatever the layout that saved it: parameters, moments, scaler, counters, measurements.
    (The RNG and the data position follow from the step number.)"""
    checkpoint.restore_model(loaded, s.model)
    checkpoint.restore_optimizers(loaded, s.model, s.optimizers)
    s.scaler.load_state_dict(loaded.state["scaler"])
    measured = measuring(s)
    for name, part in (("norms", measured.norms), ("noise", measured.noise), ("outliers", s.outliers)):
        if name in loaded.state:  # older checkpoints have none
            part.load_state_dict(loaded.state[name])
    return Progress(**loaded.state["progress"]), Meter(s.mesh.device, **loaded.state["meter"]), measured


def read_ahead(s: Setup, start_step: int) -> Iterator[Window]:
    """This rank's windows from `start_step` on, read ahead in the background."""
    run, config = s.parts.run, s.parts.config
    return read_windows(
        s.parts.corpus.train,
        sequence_length=run.sequence_length,
        real_batch_size=run.real_batch_size,
        micro_batch_size=run.micro_batch_size,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        rank=s.mesh.dp_rank,
        dp_size=s.mesh.dp_size,
        seed=config.train.seed,
        shuffle=config.data.get("shuffle", True),
        ignore_id=config.data.get("ignore_id"),
        start_step=start_step,
        max_steps=run.max_steps,
        total_sequences=run.total_sequences,
        digest=config.train.data_digest,
        pin_memory=s.mesh.device.type == "cuda",
    )


def sample_text(loop: Loop) -> str:
    """A sampled text from the start of a document, on one line."""
    parts, run = loop.s.parts, loop.s.parts.run
    length = run.facts.max_position_embeddings or run.sequence_length
    tokens = parts.config.train.sample_tokens
    return " ".join(sample(parts.tokenizer, loop.s.loss, length, parts.precision, "", tokens).split())


def start_profiler(loop: Loop) -> torch.profiler.profile | None:
    """A torch.profiler trace of steps profile_start .. profile_start+profile_steps-1 into the run folder."""
    train_config = loop.s.parts.config.train
    first = train_config.profile_start
    if first is None or not loop.out.main or first <= loop.p.step:
        return None
    target = loop.out.path / f"trace_step_{first:08d}.json"
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=first - 1 - loop.p.step, warmup=0, active=train_config.profile_steps, repeat=1
        ),
        on_trace_ready=lambda done: done.export_chrome_trace(str(target)),
    )
    profiler.start()
    return profiler
