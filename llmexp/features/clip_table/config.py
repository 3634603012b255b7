from __future__ import annotations

from typing import Any

SECTION = "clip"


def asked(config: Any) -> bool:
    return True
