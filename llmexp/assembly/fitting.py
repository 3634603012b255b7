"""Estimate which larger micro-batch would fit into memory."""

from __future__ import annotations

import torch

from llmexp import precision
from llmexp.assembly.assemble import Parts
from llmexp.metrics import hardware
from llmexp.models.memory import saved_bytes

# The memory of a backward pass over that which the forward pass keeps, and the share of all memory
# that may be planned with.
TEMPORARY, ROOM = 1.25, 0.8


def larger_micro_batch(parts: Parts) -> str | None:
    """In words, with its figures: the largest micro-batch that would do with less accumulation and
    surely fits into memory, by an upper estimate. None without accumulation, where none fits, and
    where memory is not known."""
    run, there = parts.run, hardware.memory_bytes(parts.device)
    if run.gradient_accumulation_steps == 1 or there is None:
        return None
    with torch.device("meta"):
        model = parts.build_model()
    saved = saved_bytes(
        model, run.sequence_length, whole_logits=not run.facts.loss_kernel.startswith("chunked")
    )
    if not saved:
        return None
    # weight, gradient and two moments
    held = 4 * precision.parameter_dtype(parts.precision).itemsize
    ranks = 1 if parts.device.type == "cuda" else run.facts.layout.nproc_per_node
    cuts = [
        n
        for n in range(1, run.gradient_accumulation_steps)
        if run.gradient_accumulation_steps % n == 0
    ]
    for accumulation in cuts:
        micro = run.micro_batch_size * run.gradient_accumulation_steps // accumulation
        needed = ranks * (held * run.facts.parameters + TEMPORARY * micro * saved)
        if needed > ROOM * there:
            continue
        share = (
            f"{held} bytes x {run.facts.parameters:,} parameters + {TEMPORARY} x {micro} x "
            f"{saved / 2**20:,.1f} MiB"
        )
        times = f" x {ranks} ranks" if ranks > 1 else ""
        cut = (
            f"gradient_accumulation_steps {accumulation}" if accumulation > 1 else "no accumulation"
        )
        return (
            f"batch.micro_batch_size={micro} with {cut} computes the same, but for rounding and "
            f"the random numbers of dropout, and fits: at most about {needed / 2**30:,.3g} of "
            f"{there / 2**30:,.3g} GiB ({share} that the forward pass of a sequence keeps{times})"
        )
    return None
