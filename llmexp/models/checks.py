"""Checks of a model's arguments; every message names the key as it is written in a config."""

from __future__ import annotations

import math

from llmexp.settings.values import shown


def _shown(value: object) -> object:
    """Return a value as it is written; a text in quotes, which a number is not."""
    return repr(value) if isinstance(value, str) else shown(value)


def check_sizes(**sizes: int) -> None:
    """Raise ValueError for the first of `sizes` (name=value) that is no int above zero."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"model.{name}={_shown(value)}: must be an integer above 0")


def check_positive(**numbers: float) -> None:
    """Raise ValueError for the first of `numbers` (name=value) that is not finite or not above
    zero."""
    for name, value in numbers.items():
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not 0 < value < math.inf:
            raise ValueError(f"model.{name}={_shown(value)}: must be a finite number above 0")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless the value is one of `choices`."""
    if value not in choices:
        raise ValueError(f"model.{name}={shown(value)}: must be one of {', '.join(choices)}")


def check_divides(divisor_name: str, divisor: int, whole_name: str, whole: int) -> None:
    """Raise ValueError, with the nearest divisors of `whole`, unless `divisor` divides it."""
    if whole % divisor:
        divisors = [d for d in range(1, whole + 1) if whole % d == 0]
        nearest = sorted(sorted(divisors, key=lambda d: abs(d - divisor))[:3])
        raise ValueError(
            f"model.{divisor_name}={divisor} does not divide model.{whole_name}={whole}: "
            f"nearest valid values of model.{divisor_name}: {', '.join(map(str, nearest))}"
        )


def check_dropout(dropout: float) -> None:
    """Raise ValueError unless `dropout` is a number in [0, 1)."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(
            f"model.dropout={_shown(dropout)}: must be a number from 0 up to but not including 1"
        )


def check_length(length: int, max_position_embeddings: int) -> None:
    """Raise ValueError where a batch is longer (in tokens) than the model has positions."""
    if length > max_position_embeddings:
        raise ValueError(
            f"sequence of {length} tokens: the model has model.max_position_embeddings="
            f"{max_position_embeddings}; shorten batch.sequence_length or raise it"
        )
