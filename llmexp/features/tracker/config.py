from __future__ import annotations

from typing import Any

SECTION = "tracker"  # whose knobs are those of all trackers
OFF = {"kind": "none"}


def asked(config: Any) -> bool:
    return config.tracker.kind != "none" or bool(config.tracker.also)
