from __future__ import annotations

from collections.abc import Callable

from llmexp.features.sample.settings import Knobs
from llmexp.settings.config import Config, knobs_of


def counts(
    config: Config, times: Callable[[int | None], int], at_last: Callable[[int | None], bool]
) -> dict[str, int]:
    """Return how many texts a run writes in its middle."""
    every = knobs_of(config, Knobs).sample_every
    return {"sample": times(every) - at_last(every)}
