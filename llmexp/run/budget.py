"""Solve how long a run trains: exactly one of three budgets, in sequences and optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from llmexp.run.stages import BatchStage, stage_at
from llmexp.settings.config import Train
from llmexp.settings.values import ConfigError, refuse

BUDGETS = ("train.max_steps", "train.max_epochs", "train.max_tokens")
NO_BUDGET: dict[str, Any] = {key.removeprefix("train."): None for key in BUDGETS}
DEFAULT_MAX_STEPS = 300  # used when no budget is given


@dataclass(frozen=True)
class Budget:
    """Hold how long a run trains."""

    total_sequences: int
    max_steps: int
    tail_sequences: int
    dropped_sequences: int


def budgets_in(overrides: Iterable[str]) -> list[str]:
    """Return the budgets that overrides give a value."""
    pairs = (override.lstrip("+").partition("=")[::2] for override in overrides)
    return [key for key, value in pairs if key in BUDGETS and value != "null"]


def replace_budgets(tree: Any, overrides: Iterable[str]) -> None:
    """Set the budgets in the files of a composed config to null where an override gives one."""
    given = budgets_in(overrides)
    for key in BUDGETS if given and isinstance(tree.get("train"), dict) else ():
        if key not in given:
            tree["train"][key.removeprefix("train.")] = None


def keep_warmup(schedule: dict[str, Any], warmup: Any) -> bool:
    """Keep the warm-up of a run that gets another budget at its updates.

    Return whether there was something to keep: the warm-up was a share of the old budget.
    """
    relative = schedule.get("warmup_steps", 0) is None and bool(schedule.get("warmup_ratio"))
    if not relative or not isinstance(warmup, int):
        return False
    schedule |= {"warmup_steps": warmup, "warmup_ratio": None}
    return True


def solve_budget(
    train: Train,
    stages: Sequence[BatchStage],
    sequence_length: int,
    train_sequences: int,
    parent: Any = None,
) -> Budget:
    """Return the one budget that is given, in sequences and optimizer steps.

    In a fork it counts what its `parent` (`run.Parent`) and those before it have done. `stages`:
    of the run without an end. Raises ConfigError where several budgets are given, and where nothing
    is left to train.
    """
    given = {
        key: value
        for key in BUDGETS
        if (value := getattr(train, key.removeprefix("train."))) is not None
    }
    if len(given) > 1:
        named = ", ".join(f"{k}={v}" for k, v in given.items())
        raise ConfigError(
            f"{named}: one budget is needed, not {len(given)}; leave "
            f"{('one', 'two')[len(given) - 2]} out"
        )
    first, tokens, before = (parent.sequences, parent.tokens, parent.step) if parent else (0, 0, 0)
    if train.max_epochs is not None:
        total = int(Fraction(str(train.max_epochs)) * train_sequences)
    elif train.max_tokens is not None:
        total = first + (train.max_tokens - tokens) // sequence_length
    else:
        steps = train.max_steps or DEFAULT_MAX_STEPS
        total = stage_at(stages, steps).sequences_at(steps)
    key, value = next(iter(given.items()), ("train.max_steps", DEFAULT_MAX_STEPS))
    if total <= first and parent:
        gone = {"train.max_steps": before, "train.max_tokens": tokens}
        longer = round(first / train_sequences * 1.25, 3)
        if key in gone:
            longer = gone[key] + max(1, gone[key] // 4)
        raise refuse(
            key,
            value,
            f"counts the parent's part too, and that is {before:,} steps, {tokens:,} tokens and "
            f"{first / train_sequences:.4g} epochs at fork.step={before}: nothing is left to train",
            longer,
        )
    if total < 1:
        raise refuse(key, value, f"is less than one sequence of {sequence_length} tokens")
    last = [stage for stage in stages if stage.first_sequence < total][-1]
    steps, rest = divmod(total - last.first_sequence, last.real_batch_size)
    full = last.first_step + steps
    if rest and train.tail == "drop":
        if full == before:
            text = f"with train.tail=drop no window of {last.real_batch_size} sequences is full"
            raise refuse(key, value, f"{text} ({total} there)")
        return Budget(total - rest, full, 0, rest)
    return Budget(total, full + bool(rest), rest, 0)
