"""Learning-rate schedules: pure functions of the number of applied updates.

Each returns the factor on the base rate for update u = 0 .. total_updates-1. Warm-up over W updates
is (u+1)/W; the end value is reached on the last planned update.
"""

from __future__ import annotations

import math

from llmexp.settings.values import refuse, shown


def warmup_updates(
    total_updates: int, warmup_steps: int | None = None, warmup_ratio: float | None = None
) -> int:
    """Length of the warm-up in updates: `warmup_steps`, else `warmup_ratio` of all updates, else
    none.

    Raises ValueError for a value out of range.
    """
    if warmup_steps is not None:
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ValueError(
                f"schedule.warmup_steps={warmup_steps}: a whole number from 0 is needed"
            )
        return warmup_steps
    if warmup_ratio is None:
        return 0
    return round(_share("warmup_ratio", warmup_ratio) * total_updates)


def _share(key: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(
            f"schedule.{key}={shown(value)}: a number from 0 to 1 is needed; for example "
            f"schedule.{key}=0.1"
        )
    return value


def _warmup_and_decay(update: int, start: int, total: int) -> tuple[float, float]:
    """Return (warm-up factor, progress of the decay from 0 at the peak to 1 on the last update)."""
    if update < start:
        return (update + 1) / start, 0.0
    peak = max(start - 1, 0)
    return 1.0, min(1.0, (update - peak) / max(1, total - 1 - peak))


def constant(
    update: int,
    total_updates: int,
    warmup_steps: int | None = None,
    warmup_ratio: float | None = None,
) -> float:
    """Warm-up, then 1."""
    return _warmup_and_decay(
        update, warmup_updates(total_updates, warmup_steps, warmup_ratio), total_updates
    )[0]


def linear(
    update: int,
    total_updates: int,
    warmup_steps: int | None = None,
    warmup_ratio: float | None = None,
    end_ratio: float = 0.0,
) -> float:
    """Warm-up, then a straight line to `end_ratio`."""
    start = warmup_updates(total_updates, warmup_steps, warmup_ratio)
    rise, progress = _warmup_and_decay(update, start, total_updates)
    return rise * (1 + (_share("end_ratio", end_ratio) - 1) * progress)


def cosine(
    update: int,
    total_updates: int,
    warmup_steps: int | None = None,
    warmup_ratio: float | None = None,
    end_ratio: float = 0.1,
) -> float:
    """Warm-up, then half a cosine to `end_ratio` (Loshchilov & Hutter 2017, without restarts)."""
    start = warmup_updates(total_updates, warmup_steps, warmup_ratio)
    rise, progress = _warmup_and_decay(update, start, total_updates)
    end = _share("end_ratio", end_ratio)
    return rise * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress)))


def cooldown(
    update: int,
    total_updates: int,
    warmup_steps: int | None = None,
    warmup_ratio: float | None = None,
    decay_start: int | None = None,
    decay_steps: int | None = None,
    decay_ratio: float = 0.2,
    end_ratio: float = 0.0,
) -> float:
    """Warm-up, stable, then a line to `end_ratio` (Hu et al. 2024).

    The decay starts at update `decay_start` and takes `decay_steps` updates, else all to the end.
    Without a start it is the last `decay_steps` updates, else the last `decay_ratio` of all.
    Raises ConfigError where the warm-up reaches into the decay: the rate would fall in one step.
    """
    for key, value, least in (("decay_start", decay_start, 0), ("decay_steps", decay_steps, 1)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < least
        ):
            raise refuse(f"schedule.{key}", value, f"a whole number from {least} is needed")
    start = decay_start
    if start is None:
        length = decay_steps or round(_share("decay_ratio", decay_ratio) * total_updates)
        start = max(0, total_updates - length)
    risen = warmup_updates(total_updates, warmup_steps, warmup_ratio)
    if start < risen < total_updates:
        key = "warmup_ratio" if warmup_steps is None else "warmup_steps"
        given = warmup_ratio if warmup_steps is None else warmup_steps
        text = (
            f"the warm-up of {risen} updates reaches into the decay, which starts at update "
            f"{start} of {total_updates}; for example schedule.warmup_steps={start}"
        )
        raise refuse(f"schedule.{key}", given, text)
    if update < risen:
        return (update + 1) / risen
    decayed = update + 1 - start  # updates of the decay, with this one
    length = decay_steps or max(1, total_updates - start)
    return 1 + (_share("end_ratio", end_ratio) - 1) * min(max(decayed, 0), length) / length


wsd = cooldown  # the decay is a share of all updates
