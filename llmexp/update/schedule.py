"""Learning-rate schedules: pure functions of the number of applied updates.

Each returns the factor on the base rate for update u = 0 .. total_updates-1. Warm-up over W updates
is (u+1)/W; the end value is reached on the last planned update.
"""

from __future__ import annotations

import math

from llmexp.settings.parts import ScheduleKnobs
from llmexp.settings.values import refuse


def warmup_updates(
    total_updates: int, warmup_steps: int | None = None, warmup_ratio: float | None = None
) -> int:
    """Return the length of the warm-up in updates: `warmup_steps`, else a share of all."""
    if warmup_steps is not None:
        return warmup_steps
    return round((warmup_ratio or 0.0) * total_updates)


def _warmup_and_decay(update: int, start: int, total: int) -> tuple[float, float]:
    """Return (warm-up factor, progress of the decay from 0 at the peak to 1 on the last update)."""
    if update < start:
        return (update + 1) / start, 0.0
    peak = max(start - 1, 0)
    return 1.0, min(1.0, (update - peak) / max(1, total - 1 - peak))


def constant(
    update: int,
    total_updates: int,
    warmup_steps: ScheduleKnobs.warmup_steps = None,
    warmup_ratio: ScheduleKnobs.warmup_ratio = None,
) -> float:
    """Warm-up, then 1."""
    return _warmup_and_decay(
        update, warmup_updates(total_updates, warmup_steps, warmup_ratio), total_updates
    )[0]


def linear(
    update: int,
    total_updates: int,
    warmup_steps: ScheduleKnobs.warmup_steps = None,
    warmup_ratio: ScheduleKnobs.warmup_ratio = None,
    end_ratio: ScheduleKnobs.end_ratio = 0.0,
) -> float:
    """Warm-up, then a straight line to `end_ratio`."""
    start = warmup_updates(total_updates, warmup_steps, warmup_ratio)
    rise, progress = _warmup_and_decay(update, start, total_updates)
    return rise * (1 + (end_ratio - 1) * progress)


def cosine(
    update: int,
    total_updates: int,
    warmup_steps: ScheduleKnobs.warmup_steps = None,
    warmup_ratio: ScheduleKnobs.warmup_ratio = None,
    end_ratio: ScheduleKnobs.end_ratio = 0.1,
) -> float:
    """Warm-up, then half a cosine to `end_ratio` (Loshchilov & Hutter 2017, without restarts)."""
    start = warmup_updates(total_updates, warmup_steps, warmup_ratio)
    rise, progress = _warmup_and_decay(update, start, total_updates)
    return rise * (end_ratio + (1 - end_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def cooldown(
    update: int,
    total_updates: int,
    warmup_steps: ScheduleKnobs.warmup_steps = None,
    warmup_ratio: ScheduleKnobs.warmup_ratio = None,
    decay_start: ScheduleKnobs.decay_start = None,
    decay_steps: ScheduleKnobs.decay_steps = None,
    decay_ratio: ScheduleKnobs.decay_ratio = 0.2,
    end_ratio: ScheduleKnobs.end_ratio = 0.0,
) -> float:
    """Warm-up, stable, then a line to `end_ratio` (Hu et al. 2024).

    The decay starts at update `decay_start` and takes `decay_steps` updates, else all to the end.
    Without a start it is the last `decay_steps` updates, else the last `decay_ratio` of all.
    Raises ConfigError where the warm-up reaches into the decay: the rate would fall in one step.
    """
    start = decay_start
    if start is None:
        length = decay_steps or round(decay_ratio * total_updates)
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
    return 1 + (end_ratio - 1) * min(max(decayed, 0), length) / length


wsd = cooldown  # the decay is a share of all updates
