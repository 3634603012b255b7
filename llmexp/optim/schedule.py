"""Learning-rate schedules: pure functions of the number of applied updates.

Each returns the factor on the base rate for update u = 0 .. total_updates-1. Warm-up over W updates
is (u+1)/W; a schedule that decays to an end value reaches it on the last planned update.
"""

from __future__ import annotations

import math
from typing import Annotated

from llmexp.config.values import Where, choice, count, knob, refuse, where

DECAYS = Where(("schedule.decay_ratio", "schedule.decay_steps", "schedule.decay_start"))


class Knobs:
    warmup_steps = Annotated[
        int | None,
        knob("updates of linear warm-up; null: warmup_ratio decides", 100, at_least=0),
    ]
    warmup_ratio = Annotated[
        float | None,
        knob(
            "share of all updates that is warm-up; give one of the two",
            0.05,
            at_least=0,
            at_most=1,
            acts=where("schedule.warmup_steps", None),
        ),
    ]
    decay_start = Annotated[
        int | None,
        knob(
            "update at which the decay starts; null: fork.step in a fork with schedule=cooldown, "
            "else the last decay_steps or decay_ratio",
            1000,
            at_least=0,
        ),
    ]
    decay_steps = Annotated[int | None, count("updates of the decay; null: to the end", 200)]
    decay_ratio = Annotated[
        float,
        knob(
            "share of all updates that is decay; without a budget on the command line this ends a "
            "fork with schedule=cooldown",
            0.2,
            at_least=0,
            at_most=1,
            acts=where("schedule.decay_steps", None),
        ),
    ]
    decay_shape = Annotated[
        str,
        choice(
            "how the rate falls in the decay",
            "linear | sqrt | one_minus_sqrt | cosine",
            acts=DECAYS,
            default="linear",
        ),
    ]
    end_ratio = Annotated[
        float,
        knob(
            "rate at the last update, as a share of the rate before the decay",
            0.1,
            at_least=0,
            at_most=1,
            acts=DECAYS,
        ),
    ]


def warmup_updates(
    total_updates: int, warmup_steps: int | None = None, warmup_ratio: float | None = None
) -> int:
    """Return the length of the warm-up in updates: `warmup_steps`, else a share of all."""
    if warmup_steps is not None:
        return warmup_steps
    return round((warmup_ratio or 0.0) * total_updates)


def _warmup_and_decay(
    update: int, total: int, steps: int | None, ratio: float | None
) -> tuple[float, float]:
    """Return (warm-up factor, progress of the decay from 0 at the peak to 1 on the last update)."""
    start = warmup_updates(total, steps, ratio)
    if update < start:
        return (update + 1) / start, 0.0
    peak = max(start - 1, 0)
    return 1.0, min(1.0, (update - peak) / max(1, total - 1 - peak))


def constant(
    update: int,
    total_updates: int,
    warmup_steps: Knobs.warmup_steps = None,
    warmup_ratio: Knobs.warmup_ratio = None,
) -> float:
    """Warm-up, then 1."""
    return _warmup_and_decay(update, total_updates, warmup_steps, warmup_ratio)[0]


def linear(
    update: int,
    total_updates: int,
    warmup_steps: Knobs.warmup_steps = None,
    warmup_ratio: Knobs.warmup_ratio = None,
    end_ratio: Knobs.end_ratio = 0.0,
) -> float:
    """Warm-up, then a straight line to `end_ratio`."""
    rise, progress = _warmup_and_decay(update, total_updates, warmup_steps, warmup_ratio)
    return rise * (1 + (end_ratio - 1) * progress)


def cosine(
    update: int,
    total_updates: int,
    warmup_steps: Knobs.warmup_steps = None,
    warmup_ratio: Knobs.warmup_ratio = None,
    end_ratio: Knobs.end_ratio = 0.1,
) -> float:
    """Warm-up, then half a cosine to `end_ratio` (Loshchilov & Hutter 2017, without restarts)."""
    rise, progress = _warmup_and_decay(update, total_updates, warmup_steps, warmup_ratio)
    return rise * (end_ratio + (1 - end_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


# What a decay has taken of the rate, from 0 to 1, when the share t of it is done; "linear" is t.
_TAKEN = {
    "sqrt": lambda t: 1 - math.sqrt(1 - t),
    "one_minus_sqrt": math.sqrt,
    "cosine": lambda t: 0.5 * (1 - math.cos(math.pi * t)),
}


def _decay_start(total: int, start: int | None, steps: int | None, ratio: float) -> int:
    """Return the number of updates before the decay."""
    if start is not None:
        return start
    return max(0, total - (steps or round(ratio * total)))


def cooldown(
    update: int,
    total_updates: int,
    warmup_steps: Knobs.warmup_steps = None,
    warmup_ratio: Knobs.warmup_ratio = None,
    decay_start: Knobs.decay_start = None,
    decay_steps: Knobs.decay_steps = None,
    decay_ratio: Knobs.decay_ratio = 0.2,
    decay_shape: Knobs.decay_shape = "linear",
    end_ratio: Knobs.end_ratio = 0.0,
) -> float:
    """Warm-up, stable, then a decay to `end_ratio` (Hu et al. 2024).

    The decay starts at update `decay_start` and takes `decay_steps` updates, else all to the end.
    Without a start it is the last `decay_steps` updates, else the last `decay_ratio` of all. It
    takes no more updates than are left, so that the last one has the end value. After the share t
    of it the factor is end_ratio + (1 - end_ratio) x shape, where shape is 1 - t (`linear`),
    sqrt(1 - t) (`sqrt`), 1 - sqrt(t) (`one_minus_sqrt`, Haegele et al. 2024) or
    (1 + cos(pi t)) / 2 (`cosine`).
    Raises ConfigError where the warm-up reaches into the decay: the rate would fall in one step.
    """
    start = _decay_start(total_updates, decay_start, decay_steps, decay_ratio)
    risen = warmup_updates(total_updates, warmup_steps, warmup_ratio)
    if start < risen < total_updates:
        key = "warmup_ratio" if warmup_steps is None else "warmup_steps"
        given = warmup_ratio if warmup_steps is None else warmup_steps
        text = (
            f"the warm-up of {risen} updates reaches into the decay, which starts at update "
            f"{start} of {total_updates}; for example schedule.warmup_steps={start}"
        )
        raise refuse("conflict", f"schedule.{key}", given, text)
    if update < risen:
        return (update + 1) / risen
    length = max(1, min(decay_steps or total_updates, total_updates - start))
    done = min(max(update + 1 - start, 0), length)  # updates of the decay, with this one
    if decay_shape == "linear":  # in this order of operations: runs of before keep their bits
        return 1 + (end_ratio - 1) * done / length
    return 1 + (end_ratio - 1) * _TAKEN[decay_shape](done / length)


wsd = cooldown  # the decay is a share of all updates


def power(
    update: int,
    total_updates: int,
    warmup_steps: Knobs.warmup_steps = None,
    warmup_ratio: Knobs.warmup_ratio = None,
    power_start: Annotated[
        int | None,
        count("updates up to which lr holds, before the power law; null: the warm-up's", 1000),
    ] = None,
    exponent: Annotated[
        float, knob("the rate falls as (power_start / updates) ** exponent", 0.51, above=0)
    ] = 0.51,
    decay_start: Knobs.decay_start = None,
    decay_steps: Knobs.decay_steps = None,
    decay_ratio: Knobs.decay_ratio = 0.2,
    decay_shape: Knobs.decay_shape = "linear",
    end_ratio: Knobs.end_ratio = 0.0,
) -> float:
    """Warm-up, then a power law of the updates, then a decay (Shen et al. 2024, equation 8).

    With n = update + 1 the law is P(n) = min(1, (power_start / n) ** exponent). The factor is
    n / W x P(W) in a warm-up of W updates, then P(n), and from the decay's start after D updates on
    P(D) x the factor of `cooldown`, so `end_ratio` is a share of P(D).
    In the paper, n counts tokens and the rate is min(max_lr, batch x a x n ** b): lr is max_lr,
    exponent is -b, and power_start is (batch x a / max_lr) ** (-1 / b) / tokens of an update.
    """
    knobs = (decay_start, decay_steps, decay_ratio)
    decayed = cooldown(
        update, total_updates, warmup_steps, warmup_ratio, *knobs, decay_shape, end_ratio
    )
    risen = max(1, warmup_updates(total_updates, warmup_steps, warmup_ratio))
    step = max(risen, min(update + 1, _decay_start(total_updates, *knobs)))
    return decayed * min(1.0, ((power_start or risen) / step) ** exponent)


def inverse_sqrt(
    update: int,
    total_updates: int,
    warmup_steps: Knobs.warmup_steps = None,
    warmup_ratio: Knobs.warmup_ratio = None,
    decay_start: Knobs.decay_start = None,
    decay_steps: Knobs.decay_steps = None,
    decay_ratio: Knobs.decay_ratio = 0.0,
    decay_shape: Knobs.decay_shape = "linear",
    end_ratio: Knobs.end_ratio = 0.0,
) -> float:
    """Warm-up, then sqrt(warm-up / updates) (Vaswani et al. 2017), at the end a decay if wanted.

    With n = update + 1 and a warm-up of W updates (at least 1) it is min(n / W, sqrt(W / n)). A
    decay that starts after D updates takes sqrt(W / D) to `end_ratio` of it, as in `power`. The
    code of Zhai et al. 2022 lets the root go on beneath a linear decay; here it is held.
    """
    return power(
        update, total_updates, warmup_steps, warmup_ratio, None, 0.5,
        decay_start, decay_steps, decay_ratio, decay_shape, end_ratio,
    )  # fmt: skip
