from __future__ import annotations

from collections.abc import Callable
from typing import Any

WORDS = {"sample": "text"}


def counts(
    config: Any, times: Callable[[int | None], int], at_last: Callable[[int | None], bool]
) -> dict[str, int]:
    """Return how many texts a run writes in its middle."""
    every = config.train.sample_every
    return {"sample": times(every) - at_last(every)}
