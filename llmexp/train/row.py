"""A row of metrics.jsonl: a pure function of what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmexp.run import Run
from llmexp.train.state import Progress
from llmexp.train.step import BAD_LOSS, EMPTY, OK, OUTLIER, Outcome


@dataclass(frozen=True)
class Measures:
    """Hold the measurements for a row, over all ranks; None is not known or not asked for."""

    tokens_seen: int
    weight_norm: float | None
    peak_memory_gib: float
    rates: dict[str, float]  # of the meter since the last row, the clipping, the noise scale
    lr: float
    loss_scale: float | None
    data_digest: int | None
    outlier_steps: int | None
    peak_flops: float | None


def build_row(run: Run, progress: Progress, seen: Outcome, measures: Measures) -> dict[str, Any]:
    """Return the row of a step, without what evaluation and hooks add.

    A figure that is not known is absent.
    """
    applied = seen.code in (OK, OUTLIER)
    row: dict[str, Any] = {"step": progress.step, "tokens_seen": measures.tokens_seen}
    row["epoch"] = run.sequences_at(progress.step) / run.train_sequences
    if seen.code not in (EMPTY, BAD_LOSS):
        row["train/loss"] = seen.loss
    row["lr"] = measures.lr
    if applied:
        row["grad_norm"] = seen.grad_norm
        row["grad_norm_post_clip"] = seen.grad_norm_post_clip
    if measures.weight_norm is not None:
        row["weight_norm"] = measures.weight_norm
    if measures.loss_scale is not None:
        row["loss_scale"] = measures.loss_scale
    row["skipped"] = not applied
    row["skipped_steps"] = progress.skipped_steps
    row["target_tokens"] = int(seen.target_tokens)
    if measures.data_digest is not None:
        row["data_digest"] = f"{measures.data_digest % 2**63:016x}"
    row |= measures.rates
    rate = row["tokens_per_sec_per_rank"]
    if measures.outlier_steps is not None:
        row["outlier_steps"] = measures.outlier_steps
    if run.flops_per_token is not None:
        flops_per_sec = run.flops_per_token * rate
        row["tflops_per_sec_per_rank"] = flops_per_sec / 1e12
        if measures.peak_flops is not None:
            row["mfu"] = flops_per_sec / measures.peak_flops
    row["peak_memory_gib"] = measures.peak_memory_gib
    row["amp"] = int(run.precision in ("bf16", "fp16"))
    row["eta"] = (run.max_steps - progress.step) * row["step_time"]
    return row
