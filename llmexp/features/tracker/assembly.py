from __future__ import annotations

from llmexp.config.sections import Config
from llmexp.features.tracker.config import asked


def check(config: Config) -> None:
    """Raise ConfigError for a tracker that there is not, or whose package is missing."""
    if asked(config):
        from llmexp.tracker.stores import check_chosen

        check_chosen(config.tracker.kind, config.tracker.also)
