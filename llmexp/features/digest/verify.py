from __future__ import annotations

from typing import Any


def trial() -> dict[str, Any]:
    return {"train": {"data_digest": True}}
