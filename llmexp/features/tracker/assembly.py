from __future__ import annotations

from llmexp.settings.config import Config


def check(config: Config) -> None:
    """Raise ConfigError for a tracker that there is not, or whose package is missing."""
    chosen = config.tracker
    if chosen.kind != "none" or chosen.also:
        from llmexp.tracker.stores import check_chosen

        check_chosen(chosen.kind, chosen.also)
