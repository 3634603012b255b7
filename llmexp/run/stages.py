"""The stages of a run: where each begins, and how many sequences its steps have."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Begin(NamedTuple):
    """The place where a run begins: what the runs before a fork have done, else zeros."""

    step: int = 0
    sequences: int = 0  # the place in the order of sequences where the run begins
    tokens: int = 0  # of the budget
    tokens_seen: int = 0  # target tokens that count


@dataclass(frozen=True)
class BatchStage:
    """A part of a run whose full windows have equally many sequences."""

    from_tokens: int  # of batch.ramp; it begins with the first step at or after them
    first_step: int  # steps before it
    first_sequence: int  # place in the order of sequences
    real_batch_size: int
    gradient_accumulation_steps: int
    rate: float = 1.0  # factor on the learning rate, by optimizer.rule

    def sequences_at(self, step: int) -> int:
        """Return the place in the order of sequences after so many steps."""
        return self.offset + step * self.real_batch_size

    @property
    def offset(self) -> int:
        """Return what to add to step x real_batch_size for the place in the order; may be < 0."""
        return self.first_sequence - self.first_step * self.real_batch_size


def stages_of(
    sizes: Mapping[int, int], length: int, per_micro_step: int, begin: Begin
) -> tuple[BatchStage, ...]:
    """Return the stages of a run without an end, in their order.

    `sizes`: sequences a step by the tokens from which on they hold. `length`: tokens of a sequence.
    `per_micro_step`: sequences of a micro-batch on all ranks.
    """
    step, sequence, tokens, _ = begin
    found: list[BatchStage] = []
    for from_tokens, size in sizes.items():
        if found:
            before = found[-1].real_batch_size
            steps = max(0, -((tokens - from_tokens) // (before * length)))  # rounded up
            step, sequence = step + steps, sequence + steps * before
            tokens += steps * before * length
            if not steps:
                found.pop()  # the next one begins with its first step
        found.append(BatchStage(from_tokens, step, sequence, size, size // per_micro_step))
    return tuple(found)


def stage_at(stages: Sequence[BatchStage], step: int) -> BatchStage:
    """Return the stage of the window that follows `step` steps."""
    after = bisect.bisect_right(stages, step, key=lambda stage: stage.first_step)
    return stages[max(0, after - 1)]


def step_after(stages: Sequence[BatchStage], sequences: int) -> int:
    """Return the first step at whose end so many sequences were trained on."""
    stage = [stage for stage in stages if stage.first_sequence < sequences][-1]
    return -((stage.offset - sequences) // stage.real_batch_size)


def recorded_stages(recorded: Mapping[str, Any]) -> list[BatchStage]:
    """Return the stages of a run from its run.json. Raises KeyError where it lacks them."""
    if stages := recorded.get("stages"):
        return [BatchStage(**stage) for stage in stages]
    size, accumulation = recorded["real_batch_size"], recorded.get("gradient_accumulation_steps", 1)
    parent = recorded.get("parent") or {}
    return [BatchStage(0, parent.get("step", 0), parent.get("sequences", 0), size, accumulation)]
