"""Learning-rate schedules: pure functions of the number of applied updates.

Each returns the factor on the base rate for update u = 0 .. total_updates-1. Warm-up over W updates
is (u+1)/W; the end value is reached on the last planned update.
"""

from __future__ import annotations

import math

from llmexp.settings.values import shown


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


def wsd(
    update: int,
    total_updates: int,
    warmup_steps: int | None = None,
    warmup_ratio: float | None = None,
    decay_ratio: float = 0.2,
    end_ratio: float = 0.0,
) -> float:
    """Warm-up, stable, then a line to `end_ratio` over the last `decay_ratio` of all updates (Hu et
    al. 2024).

    Raises ValueError where the warm-up reaches into the decay: the rate would fall from 1 in one
    step.
    """
    start = warmup_updates(total_updates, warmup_steps, warmup_ratio)
    decay = round(_share("decay_ratio", decay_ratio) * total_updates)
    if total_updates - decay < start < total_updates:
        key, value = (
            ("warmup_steps", warmup_steps)
            if warmup_steps is not None
            else ("warmup_ratio", warmup_ratio)
        )
        raise ValueError(
            f"schedule.{key}={value}: the warm-up of {start} updates reaches into the decay, which "
            f"is the last {decay} of {total_updates}; a shorter warm-up or a smaller "
            f"schedule.decay_ratio is needed; for example "
            f"schedule.decay_ratio={math.floor(100 * (1 - start / total_updates)) / 100:g}"
        )
    if update < start:
        return (update + 1) / start
    left = total_updates - 1 - update  # updates still to come after this one
    return (
        1.0 if left >= decay else 1 + (_share("end_ratio", end_ratio) - 1) * (decay - left) / decay
    )


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
    """Warm-up, stable, then a line to `end_ratio` from update `decay_start` on, over `decay_steps`
    updates, else to the end. Without a start the decay is the last `decay_steps` updates, else the
    last `decay_ratio` of all: as in `wsd`.

    Raises ValueError where the warm-up reaches into the decay.
    """
    for key, value, least in (("decay_start", decay_start, 0), ("decay_steps", decay_steps, 1)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < least
        ):
            raise ValueError(
                f"schedule.{key}={shown(value)}: a whole number from {least} is needed"
            )
    start = decay_start
    if start is None:
        whole = round(_share("decay_ratio", decay_ratio) * total_updates)
        start = max(0, total_updates - (decay_steps or whole))
    risen = warmup_updates(total_updates, warmup_steps, warmup_ratio)
    if start < risen:
        raise ValueError(
            f"schedule.warmup_steps={risen}: the warm-up reaches into the decay, which starts at "
            f"update {start}; for example schedule.warmup_steps={start}"
        )
    if update < risen:
        return (update + 1) / risen
    decayed = update + 1 - start  # updates of the decay, with this one
    progress = min(1.0, max(0.0, decayed / (decay_steps or max(1, total_updates - start))))
    return 1 + (_share("end_ratio", end_ratio) - 1) * progress
