"""Check that the points of a sweep train on as many tokens as each other.

Find the budget that would make them comparable. Plain figures in, plain text out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from llmexp.config.labels import short_label
from llmexp.run.budget import BUDGETS
from llmexp.system.text import first_of

# share by which budgets and schedules may differ, such as by a last window that is left out
CLOSE = 0.01


@dataclass(frozen=True)
class Spent:
    """The budget of a point of a sweep."""

    values: Mapping[str, Any]  # of the swept keys
    tokens: int  # in all; the schedule ends there
    steps: int  # optimizer steps in all
    evaluated: int | None = None  # tokens between evaluations; None: only at the end
    sized_by: str = ""  # the budget whose tokens follow from the model, where it is one


def equal(tokens: Iterable[int]) -> bool:
    """Tell whether budgets are the same but for the last window."""
    found = list(tokens)
    return not found or max(found) - min(found) <= CLOSE * max(found)


def by_cause(points: Sequence[Spent]) -> dict[str, int]:
    """Return the tokens by the values that decide them.

    {"accum=1": 307_200, "accum=2": 614_400}, for example.
    """
    keys = list(dict.fromkeys(key for point in points for key in point.values))
    for size in range(1, len(keys) + 1):
        for some in combinations(keys, size):
            found: dict[str, list[int]] = {}
            for point in points:
                name = short_label({key: point.values[key] for key in some if key in point.values})
                found.setdefault(name, []).append(point.tokens)
            if all(equal(tokens) for tokens in found.values()):
                return {name: tokens[0] for name, tokens in found.items()}
    return {short_label(point.values): point.tokens for point in points}


def common(points: Sequence[Spent]) -> int:
    """Return the budget in tokens that suits all points.

    It is the smallest one, in whole steps of all where that is near.
    """
    smallest = min(point.tokens for point in points)
    whole = math.lcm(*(max(1, round(point.tokens / point.steps)) for point in points))
    return smallest // whole * whole if smallest % whole <= smallest / 10 else smallest


def warning(points: Sequence[Spent], again: Callable[..., str]) -> list[str]:
    """Return the lines that say that budgets are unequal; none where they are equal.

    `again` gives the command of the sweep with another budget.
    """
    unlike, between = [], {p.evaluated for p in points if p.evaluated and p.evaluated < p.tokens}
    if len(between) > 1 and len({p.tokens // p.steps for p in points}) > 1:
        unlike.append(
            f"note: these runs are evaluated every {min(between):,} to {max(between):,} tokens; "
            f"for evaluations at like tokens: train.eval_every_tokens={max(between)}"
        )
    if equal(point.tokens for point in points):
        return unlike
    low, high = min(p.tokens for p in points), max(p.tokens for p in points)
    if by := points[0].sized_by:
        return [*unlike, f"note: tokens follow from {by} and the model: {low:,} to {high:,}"]
    groups: dict[tuple[str, ...], list[Spent]] = {}
    for point in points:  # a budget that is swept on purpose sets points apart
        chosen = tuple(str(point.values.get(key)) for key in (*BUDGETS, "fork.step"))
        groups.setdefault(chosen, []).append(point)
    if all(equal(p.tokens for p in group) for group in groups.values()):
        return [
            *unlike,
            f"note: the budget is swept, from {low:,} to {high:,} tokens; longer runs "
            "have lower losses anyway",
        ]
    causes = [f"{name}: {tokens:,}" for name, tokens in by_cause(points).items()]
    return [
        f"warning: these runs train on unequal numbers of tokens ({first_of(causes, 6)}).",
        "Their final losses do not compare: at equal tokens their schedules differ.",
        "To compare them at equal tokens:",
        f"  {again(('train.max_tokens', common(points)))}",
        *unlike,
    ]
