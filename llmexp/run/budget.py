"""Solve how long a run trains: exactly one of the budgets, in sequences and optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from llmexp.config.sections import Train
from llmexp.config.values import ConfigError, refuse
from llmexp.run.stages import BatchStage, Begin, stage_at

BUDGETS = (
    "train.max_steps", "train.max_epochs", "train.max_tokens", "train.max_flops",
    "train.tokens_per_parameter",
)  # fmt: skip
# Their tokens follow from the model.
BUDGETS_BY_MODEL = ("train.max_flops", "train.tokens_per_parameter")
# Keys of a run that may go on with another budget: a warm-up that was a share of it is then fixed.
EXTENDING = (*BUDGETS, "schedule.warmup_steps", "schedule.warmup_ratio")
NO_BUDGET: dict[str, Any] = {key.removeprefix("train."): None for key in BUDGETS}
DEFAULT_MAX_STEPS = 300  # used when no budget is given
MOST_TOKENS = 2**53  # of a run: numbers of JSON are exact up to there


@dataclass(frozen=True)
class TokenCost:
    """Hold what budgets in FLOPs and in tokens per parameter need to know of a model."""

    flops_per_token: int | None = None
    parameters: int = 0  # with the head, without tables of embeddings


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


def replace_budgets(tree: Any, overrides: Iterable[str]) -> list[str]:
    """Set the budgets in the files of a composed config to null where an override gives one.

    Return those that are given."""
    given = budgets_in(overrides)
    for key in BUDGETS if given and isinstance(tree.get("train"), dict) else ():
        if key not in given:
            tree["train"][key.removeprefix("train.")] = None
    return given


def sized_by(flat: Mapping[str, Any]) -> str:
    """Return the budget of a flat config whose tokens follow from the model; "" for another one."""
    return next((key for key in BUDGETS_BY_MODEL if flat.get(key) is not None), "")


def keep_warmup(schedule: dict[str, Any], warmup: Any) -> None:
    """Fix a warm-up that is a share of the budget at its number of updates.

    So another budget leaves it as it was.
    """
    relative = schedule.get("warmup_steps", 0) is None and schedule.get("warmup_ratio")
    if relative and isinstance(warmup, int):
        schedule |= {"warmup_steps": warmup, "warmup_ratio": None}


def tokens_of(train: Train, token_cost: TokenCost) -> int | None:
    """Return the tokens of a budget in tokens, FLOPs or tokens per parameter; None for others.

    Raises ConfigError for FLOPs of a model that does not count them.
    """
    if train.tokens_per_parameter is not None:
        return int(_exact(train.tokens_per_parameter) * token_cost.parameters)
    if train.max_flops is None:
        return train.max_tokens
    if token_cost.flops_per_token is None:
        text = "the model does not count its FLOPs (`flops_per_token`); give train.max_tokens"
        raise refuse("unsupported", "train.max_flops", train.max_flops, text)
    return int(_exact(train.max_flops) / token_cost.flops_per_token)


def spent_of(train: Train, token_cost: TokenCost, tokens: int) -> str | None:
    """Say what a budget in FLOPs or tokens per parameter has left after so many tokens.

    Those of a fork's parents are among them. None for other budgets.
    """
    if train.max_flops is not None and token_cost.flops_per_token is not None:
        asked, spent, unit = _exact(train.max_flops), tokens * token_cost.flops_per_token, "FLOPs"
        given = f"train.max_flops={train.max_flops:g}"
    elif train.tokens_per_parameter is not None:
        asked, spent = _exact(train.tokens_per_parameter) * token_cost.parameters, tokens
        given = f"train.tokens_per_parameter={train.tokens_per_parameter:g} x "
        given, unit = f"{given}{token_cost.parameters:,} parameters", "tokens"
    else:
        return None
    if asked == spent:
        return f"{given}, met exactly"
    rest = float(asked - spent)
    return f"{given}; the run ends {rest:,.4g} {unit} ({100 * rest / float(asked):.2g}%) before"


def _exact(number: float) -> Fraction:
    """Return the number that a user has typed, not the nearest one in binary."""
    return Fraction(str(number))


def solve_budget(
    train: Train,
    stages: Sequence[BatchStage],
    sequence_length: int,
    train_sequences: int,
    begin: Begin,
    token_cost: TokenCost,
) -> Budget:
    """Return the one budget that is given, in sequences and optimizer steps.

    In a fork it counts what the runs before it have done, too. `stages`: of the run without an end.
    `token_cost`: that of a token. Raises ConfigError where several budgets are given, and where
    nothing is left to train.
    """
    key, value = _one_budget(train)
    if train.max_epochs is not None:
        total = int(_exact(train.max_epochs) * train_sequences)
    elif (wanted := tokens_of(train, token_cost)) is not None:
        total = begin.sequences + (wanted - begin.tokens) // sequence_length
    else:
        total = stage_at(stages, value).sequences_at(value)
    if total <= begin.sequences:
        least = _longer(key, begin, stages, sequence_length, train_sequences, token_cost)
        text = _nothing_left(begin, sequence_length, train_sequences)
        raise refuse("out_of_range", key, value, text, least)
    if total * sequence_length >= MOST_TOKENS:
        text = f"is more than the {MOST_TOKENS:.4g} tokens that a run may have; for example "
        raise refuse("too_large", key, value, f"{text}train.max_steps=600")
    last = [stage for stage in stages if stage.first_sequence < total][-1]
    steps, rest = divmod(total - last.first_sequence, last.real_batch_size)
    full = last.first_step + steps
    if rest and train.tail == "drop":
        if full == begin.step:
            text = f"with train.tail=drop no step of {last.real_batch_size} sequences is full"
            raise refuse("out_of_range", key, value, f"{text} ({total} there)")
        return Budget(total - rest, full, 0, rest)
    return Budget(total, full + bool(rest), rest, 0)


def _one_budget(train: Train) -> tuple[str, Any]:
    """Return the budget that is given, with its key. Raises ConfigError for several."""
    every = {key: getattr(train, key.removeprefix("train.")) for key in BUDGETS}
    given = {key: value for key, value in every.items() if value is not None}
    if len(given) > 1:
        named = ", ".join(f"{k}={v}" for k, v in given.items())
        rest = "one" if len(given) == 2 else "the others"
        text = f"{named}: one budget is needed, not {len(given)}; leave {rest} out"
        raise ConfigError("conflict", text)
    return next(iter(given.items()), ("train.max_steps", DEFAULT_MAX_STEPS))


def _nothing_left(begin: Begin, sequence_length: int, train_sequences: int) -> str:
    if not begin.step:
        return f"is less than one sequence of {sequence_length} tokens"
    text = (
        f"counts the parent's part too, and that is {begin.step:,} steps, {begin.tokens:,} tokens "
    )
    text += f"and {begin.sequences / train_sequences:.4g} epochs at fork.step={begin.step}: "
    return f"{text}nothing is left to train"


def _longer(
    key: str,
    begin: Begin,
    stages: Sequence[BatchStage],
    sequence_length: int,
    train_sequences: int,
    token_cost: TokenCost,
) -> float:
    """Return a budget of which a fork gets a fifth, or one window where that is more."""
    if key == "train.max_steps":
        return begin.step + max(1, begin.step // 4)
    more = max(stages[0].real_batch_size, begin.tokens // sequence_length // 4)  # sequences
    tokens = begin.tokens + more * sequence_length
    if key == "train.max_tokens":
        return tokens
    if key == "train.max_epochs":
        least = (begin.sequences + more) / train_sequences
    elif key == "train.max_flops":
        least = tokens * (token_cost.flops_per_token or 0)
    else:
        least = tokens / token_cost.parameters
    return float(f"{least * 1.01:.3g}")  # rounded to no less
