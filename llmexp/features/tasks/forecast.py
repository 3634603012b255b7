from __future__ import annotations

from collections.abc import Callable
from typing import Any

WORDS = {"tasks": "task score"}


def counts(
    config: Any, times: Callable[[int | None], int], at_last: Callable[[int | None], bool]
) -> dict[str, int]:
    """Return how often a run scores its tasks: at the end, too."""
    every = config.train.tasks_every
    return {"tasks": times(every) + (not at_last(every)) if config.train.tasks else 0}
