"""The batch equation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmexp.config.forms import ramp_sizes
from llmexp.config.sections import Batch
from llmexp.config.values import AUTO, ConfigError, override_value, refuse

CUT_KEYS = ("batch.micro_batch_size", "batch.gradient_accumulation_steps")
BATCH_TOTALS = ("batch.real_batch_size", "batch.tokens_per_step")
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
    product. With a ramp, `real_batch_size` and the accumulation are those of its last stage.
    """
    if batch.ramp is not None:
        return _solve_ramp(batch, ramp_sizes(batch.ramp), dp_size)
    micro, accum = batch.micro_batch_size, batch.gradient_accumulation_steps
    if batch.tokens_per_step is not None:
        batch = replace(batch, real_batch_size=_sequences(batch, dp_size))
    real = batch.real_batch_size
    if isinstance(micro, str):
        micro, accum = _uncut(batch, dp_size), 1
    if real is None:
        micro, accum = micro or DEFAULT_MICRO_BATCH_SIZE, accum or 1
        real = micro * accum * dp_size
    elif micro is None:
        accum = accum or 1
        micro = _divide(
            real, accum * dp_size, f"gradient_accumulation_steps {accum} x dp_size {dp_size}"
        )
    elif accum is None:
        accum = _divide(real, micro * dp_size, f"micro_batch_size {micro} x dp_size {dp_size}")
    elif micro * accum * dp_size != real:
        raise refuse(
            "conflict",
            "batch.real_batch_size",
            real,
            f"micro_batch_size {micro} x gradient_accumulation_steps {accum} x dp_size {dp_size} = "
            f"{micro * accum * dp_size}; set one of the three to null to have it solved",
            micro * accum * dp_size,
        )
    solved = {"micro_batch_size": micro, "gradient_accumulation_steps": accum}
    return SolvedBatch(**vars(batch) | solved | {"real_batch_size": real})


def _sequences(batch: Batch, dp_size: int) -> int:
    """Return the sequences in batch.tokens_per_step, where all that is given divides it.

    Raises ConfigError."""
    tokens, length, key = batch.tokens_per_step or 0, batch.sequence_length, "batch.tokens_per_step"
    real, accum = batch.real_batch_size, batch.gradient_accumulation_steps
    micro = batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else None
    if real is not None and real * length != tokens:
        text = f"batch.real_batch_size={real} x sequence_length {length} = {real * length:,} tokens"
        raise refuse("conflict", key, tokens, f"{text}; leave one of the two out", real * length)
    parts = {
        "sequence_length": length,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": accum,
        "dp_size": dp_size,
    }
    product = " x ".join(f"{name} {size}" for name, size in parts.items() if size is not None)
    unit = length * (micro or 1) * (accum or 1) * dp_size
    if micro and accum and unit != tokens:
        text = f"{product} = {unit:,} tokens; set one of them to null to have it solved"
        raise refuse("conflict", key, tokens, text, unit)
    _divide(tokens, unit, product, key)
    return tokens // length


def _solve_ramp(batch: Batch, ramp: dict[int, int], dp_size: int) -> SolvedBatch:
    """Solve a batch of which each stage has so many micro-batches. Raises ConfigError."""
    micro, accum = batch.micro_batch_size, batch.gradient_accumulation_steps
    sizes = list(ramp.values())
    ends = {"tokens_per_step": sizes[-1] * batch.sequence_length, "real_batch_size": sizes[-1]}
    for name, last in ends.items():
        if (given := getattr(batch, name)) not in (None, last):
            text = f"batch.ramp ends with {sizes[-1]} sequences a step; leave one of them out"
            raise refuse("conflict", f"batch.{name}", given, text, "null")
    if not isinstance(micro, int):
        _check_ramp(ramp, dp_size, f"dp_size {dp_size}")
        micro = _uncut(batch, dp_size) if micro == AUTO else shared_sequences(batch) // dp_size
    _check_ramp(ramp, micro * dp_size, f"micro_batch_size {micro} x dp_size {dp_size}")
    steps = [size // (micro * dp_size) for size in sizes]
    if accum not in (None, steps[-1]):
        counts = " and ".join(map(str, steps))
        text = f"batch.ramp has stages of {counts} micro-batches of {micro} sequences; leave it out"
        raise refuse("conflict", "batch.gradient_accumulation_steps", accum, text, "null")
    solved = {"micro_batch_size": micro, "gradient_accumulation_steps": steps[-1]}
    return SolvedBatch(**vars(batch) | solved | {"real_batch_size": sizes[-1]})


def _check_ramp(ramp: dict[int, int], by: int, what: str) -> None:
    """Raise ConfigError where a stage does not divide into micro-batches of all ranks."""
    for tokens, size in ramp.items():
        if size % by:
            near = {key: -(-value // by) * by for key, value in ramp.items()}
            text = f"{size} sequences from token {tokens:,} on are not a multiple of {what} = {by}"
            raise refuse("out_of_range", "batch.ramp", override_value(ramp), text, near)


def shared_sequences(batch: Batch) -> int:
    """Return the most sequences that the steps of all stages can be cut into."""
    if batch.ramp is not None:
        return math.gcd(*ramp_sizes(batch.ramp).values())
    return batch.real_batch_size or max(1, (batch.tokens_per_step or 0) // batch.sequence_length)


def too_large(given: Batch, solved: SolvedBatch, dp_size: int, train_sequences: int) -> ConfigError:
    """Return the refusal of a batch that the data do not fill, by the key that was given.

    Its example is the largest value of this key that fits beside the others, if there is one.
    """
    micro, accum = solved.micro_batch_size, solved.gradient_accumulation_steps
    real, length = solved.real_batch_size, solved.sequence_length
    unit = (given.gradient_accumulation_steps or 1) * dp_size
    if isinstance(given.micro_batch_size, int):
        unit *= given.micro_batch_size
    fitting = train_sequences // unit * unit or None  # sequences a step
    why = (
        f"is more than the {train_sequences} training sequences of {length} "
        "tokens; more data, a shorter batch.sequence_length or a smaller batch is needed"
    )
    if given.tokens_per_step is not None:
        tokens = fitting and fitting * length
        return refuse(
            "too_little_data", "batch.tokens_per_step", given.tokens_per_step, why, tokens
        )
    if given.ramp is not None:
        ramp = ramp_sizes(given.ramp)
        smaller = fitting and {tokens: min(size, fitting) for tokens, size in ramp.items()}
        return refuse(
            "too_little_data", "batch.ramp", given.ramp, f"{max(ramp.values())} {why}", smaller
        )
    if given.real_batch_size is not None:
        return refuse("too_little_data", "batch.real_batch_size", real, why, fitting)
    why = (
        f"micro_batch_size {micro} x gradient_accumulation_steps {accum} x dp_size {dp_size} = "
        f"{real} {why}"
    )
    if given.gradient_accumulation_steps is not None and given.micro_batch_size is None:
        most = train_sequences // (micro * dp_size) or None
        return refuse("too_little_data", "batch.gradient_accumulation_steps", accum, why, most)
    most = train_sequences // (accum * dp_size) or None
    return refuse("too_little_data", "batch.micro_batch_size", micro, why, most)


def cut_anew(batch: Batch, dp_size: int | None) -> Batch:
    """Return the same real batch on another number of replicas.

    It has the largest micro-batch up to the old one that divides it; where `dp_size` is not known
    yet, the cut is left open.
    """
    if dp_size is None:
        return replace(batch, micro_batch_size=None, gradient_accumulation_steps=None)
    micro, real = int(batch.micro_batch_size or 1), shared_sequences(batch)
    fitting = [m for m in range(1, micro + 1) if real % (m * dp_size) == 0]
    return replace(
        batch, micro_batch_size=max(fitting, default=micro), gradient_accumulation_steps=None
    )


def _uncut(batch: Batch, dp_size: int) -> int:
    """Return the sequences of a replica in a step, which `auto` cuts. Raises ConfigError."""
    if (accum := batch.gradient_accumulation_steps) is not None:
        text = "is solved with batch.micro_batch_size=auto; leave it out"
        raise refuse("conflict", "batch.gradient_accumulation_steps", accum, text)
    if batch.real_batch_size is None and batch.ramp is None:
        text = "cuts batch.real_batch_size, which is needed beside it"
        raise refuse(
            "missing_value",
            "batch.micro_batch_size",
            AUTO,
            text,
            f"{AUTO} batch.real_batch_size=64",
        )
    return _divide(shared_sequences(batch), dp_size, f"dp_size {dp_size}")


def _divide(real: int, by: int, what: str, key: str = "batch.real_batch_size") -> int:
    if real % by == 0:
        return real // by
    below, above = real - real % by, real - real % by + by
    near = f"{below} or {above}" if below else f"{above}"
    raise refuse(
        "out_of_range",
        key,
        real,
        f"is not a multiple of {what} = {by}; the nearest are {near}",
        above,
    )
