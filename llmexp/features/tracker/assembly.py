from __future__ import annotations

from llmexp.features.tracker.settings import asked
from llmexp.settings.config import Config


def check(config: Config) -> None:
    """Raise ConfigError for a tracker that there is not, or whose package is missing."""
    if asked(config):
        from llmexp.tracker.stores import check_chosen

        check_chosen(config.tracker.kind, config.tracker.also)
