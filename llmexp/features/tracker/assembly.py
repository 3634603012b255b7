from __future__ import annotations

from llmexp.config.sections import Config
from llmexp.tracker.stores import check_chosen


def check(config: Config) -> None:
    """Raise ConfigError for a tracker that there is not, or whose package is missing."""
    check_chosen(config.tracker.kind, config.tracker.also)
