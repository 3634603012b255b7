"""A row of metrics.jsonl, from what was measured."""

from __future__ import annotations

from typing import Any

import torch

from llmexp import mesh
from llmexp.data.window import Window
from llmexp.system import hardware
from llmexp.train.state import Loop
from llmexp.train.step import BAD_LOSS, EMPTY, StepResult

WEIGHT_NORM_EVERY = 10  # rows


def build_row(loop: Loop, step: StepResult, window: Window, evaluation: bool) -> dict[str, Any]:
    """Return the row of the last step, without what evaluation and hooks add.

    A figure that is not known is absent. All ranks call together and wait for the device; the
    counts of the next row start here.
    """
    run, setup, progress, seen = loop.run, loop.setup, loop.progress, step.read()
    row: dict[str, Any] = {"step": progress.step, "tokens_seen": loop.meter.tokens_seen()}
    if run.ramp:
        before = run.sequences_at(progress.step - 1)
        row["real_batch_size"] = run.sequences_at(progress.step) - before
    row["epoch"] = run.sequences_at(progress.step) / run.train_sequences
    if seen.code not in (EMPTY, BAD_LOSS):
        row["train/loss"] = seen.loss
    row["lr"] = step.lr
    if seen.applied:
        row["grad_norm"] = seen.grad_norm
        row["grad_norm_post_clip"] = seen.grad_norm_post_clip
        row |= loop.measures.row(seen.measured)
    if evaluation or progress.step % (WEIGHT_NORM_EVERY * loop.config.train.log_every) == 0:
        weights = [parameter.detach() for parameter in setup.parameters]
        row["weight_norm"] = float(mesh.global_norm(loop.mesh, weights))
    if setup.scaler.enabled:
        row["loss_scale"] = seen.loss_scale
    row["skipped"] = not seen.applied
    row["skipped_steps"] = progress.skipped_steps
    row["target_tokens"] = int(seen.target_tokens)
    if loop.config.train.data_digest:
        digest = torch.tensor(window.digest, device=loop.mesh.device)
        row["data_digest"] = f"{int(mesh.total(loop.mesh, digest)) % 2**63:016x}"
    row |= loop.meter.take(loop.mesh.world_size) | loop.norms.take()
    row |= loop.measures.take() | loop.noise.figures()
    if setup.outliers.sigma is not None:
        row["outlier_steps"] = progress.outlier_count
    if run.flops_per_token is not None:
        flops_per_sec = run.flops_per_token * row["tokens_per_sec_per_rank"]
        row["tflops_per_sec_per_rank"] = flops_per_sec / 1e12
        if loop.peak_flops is not None:
            row["mfu"] = flops_per_sec / loop.peak_flops
    memory = torch.tensor(hardware.peak_memory_gib(loop.mesh.device), dtype=torch.float64)
    row["peak_memory_gib"] = float(mesh.maximum(loop.mesh, memory))
    row["amp"] = int(run.precision in ("bf16", "fp16"))
    left: float = run.max_steps - progress.step
    if run.ramp:  # later steps may take longer
        sequences = run.total_sequences - run.sequences_at(progress.step)
        left = sequences / run.stage_at(progress.step - 1).real_batch_size
    row["eta"] = left * row["step_time"]
    return row
