"""The batch equation, and learning rates that follow the size of the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from llmexp.settings.config import Batch
from llmexp.settings.convert import checked_knob
from llmexp.settings.values import AUTO, ConfigError, refuse
from llmexp.settings.variables import fill

DEFAULT_MICRO_BATCH_SIZE = 8  # used when the batch section does not determine it


@dataclass(frozen=True, kw_only=True)
class SolvedBatch(Batch):
    """A batch of which every size is known."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    real_batch_size: int


def solve_batch(batch: Batch, dp_size: int) -> SolvedBatch:
    """Solve micro_batch_size x gradient_accumulation_steps x dp_size = real_batch_size.

    Raises ConfigError for what does not divide, with the nearest totals, or contradicts, with the
    product.
    """
    micro, accum = batch.micro_batch_size, batch.gradient_accumulation_steps
    real = batch.real_batch_size
    if isinstance(micro, str):
        micro, accum = _uncut(batch, dp_size), 1
    if real is None:
        micro = DEFAULT_MICRO_BATCH_SIZE if micro is None else micro
        accum = 1 if accum is None else accum
        real = micro * accum * dp_size
    elif micro is None:
        accum = 1 if accum is None else accum
        micro = _divide(
            real, accum * dp_size, f"gradient_accumulation_steps {accum} x dp_size {dp_size}"
        )
    elif accum is None:
        accum = _divide(real, micro * dp_size, f"micro_batch_size {micro} x dp_size {dp_size}")
    elif micro * accum * dp_size != real:
        raise refuse(
            "batch.real_batch_size",
            real,
            f"micro_batch_size {micro} x gradient_accumulation_steps {accum} x dp_size {dp_size} = "
            f"{micro * accum * dp_size}; set one of the three to null to have it solved",
            micro * accum * dp_size,
        )
    solved = {"micro_batch_size": micro, "gradient_accumulation_steps": accum}
    return SolvedBatch(**vars(batch) | solved | {"real_batch_size": real})


def too_large(given: Batch, solved: SolvedBatch, dp_size: int, train_sequences: int) -> ConfigError:
    """Return the refusal of a batch that the data do not fill, by the key that was given."""
    micro, accum = solved.micro_batch_size, solved.gradient_accumulation_steps
    real = solved.real_batch_size
    product = f"micro_batch_size {micro} x gradient_accumulation_steps {accum} x dp_size {dp_size}"
    why = (
        f"is more than the {train_sequences} training sequences of {solved.sequence_length} "
        "tokens; more data, a shorter batch.sequence_length or a smaller batch is needed"
    )
    if given.real_batch_size is not None:
        return refuse("batch.real_batch_size", real, why, train_sequences)
    why = f"{product} = {real} {why}"
    if given.gradient_accumulation_steps is not None and given.micro_batch_size is None:
        return refuse("batch.gradient_accumulation_steps", accum, why, 1)
    fitting = max(1, train_sequences // (accum * dp_size))
    return refuse("batch.micro_batch_size", micro, why, fitting)


def cut_anew(batch: Batch, dp_size: int | None) -> Batch:
    """Return the same real batch on another number of replicas.

    It has the largest micro-batch up to the old one that divides it; where `dp_size` is not known
    yet, the cut is left open.
    """
    if dp_size is None:
        return replace(batch, micro_batch_size=None, gradient_accumulation_steps=None)
    micro, real = int(batch.micro_batch_size or 1), batch.real_batch_size or 1
    fitting = [m for m in range(1, micro + 1) if real % (m * dp_size) == 0]
    return replace(
        batch, micro_batch_size=max(fitting, default=micro), gradient_accumulation_steps=None
    )


def _uncut(batch: Batch, dp_size: int) -> int:
    """Return the sequences of a replica in a step, which `auto` cuts. Raises ConfigError."""
    if (accum := batch.gradient_accumulation_steps) is not None:
        text = "is solved with batch.micro_batch_size=auto; leave it out"
        raise refuse("batch.gradient_accumulation_steps", accum, text)
    if batch.real_batch_size is None:
        text = "cuts batch.real_batch_size, which is needed beside it"
        raise refuse("batch.micro_batch_size", AUTO, text, f"{AUTO} batch.real_batch_size=64")
    return _divide(batch.real_batch_size, dp_size, f"dp_size {dp_size}")


def _divide(real: int, by: int, what: str) -> int:
    if real % by == 0:
        return real // by
    below, above = real - real % by, real - real % by + by
    near = f"{below} or {above}" if below else f"{above}"
    raise refuse(
        "batch.real_batch_size",
        real,
        f"is not a multiple of {what} = {by}; the nearest are {near}",
        above,
    )


def solve_rates(
    optimizer: dict[str, Any], real_batch_size: int
) -> tuple[dict[str, Any], str | None]:
    """Return the optimizer section with its rates scaled by `lr_rule`, and the equation in words.

    The reference becomes this real batch, so that a solved section is solved again into itself.
    Raises ConfigError.
    """
    rule = checked_knob("optimizer.lr_rule", optimizer.get("lr_rule", "none"))
    reference = checked_knob("optimizer.reference_batch", optimizer.get("reference_batch"))
    if rule == "none":
        return optimizer, None
    if reference is None:
        text = f"optimizer.lr_rule={rule} needs the batch that optimizer.lr was chosen for"
        raise refuse("optimizer.reference_batch", None, text, 32)
    ratio = real_batch_size / reference
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    rates = {
        key: rate
        for key, value in optimizer.items()
        if (key == "lr" or key.endswith("_lr"))
        and type(rate := fill(value, f"optimizer.{key}")) in (int, float)
    }
    if not rates:
        text = "there is no rate `lr` in this section that it could scale"
        raise refuse("optimizer.lr_rule", rule, text, "none")
    scaled = {key: rate * factor for key, rate in rates.items()}
    words = f"real_batch_size {real_batch_size} / reference_batch {reference}"
    by = f"({words})" if rule == "linear" else f"sqrt({words})"
    equations = ", ".join(f"{k} {rates[k]:g} x {by} = {v:g}" for k, v in scaled.items())
    solved = optimizer | scaled | {"reference_batch": real_batch_size}
    return solved, f"{equations} (lr_rule {rule})"
