from __future__ import annotations

from typing import Any


def unskipped() -> dict[str, Any]:
    return {"metrics": {"outlier_sigma": None, "skip_outliers": False}}
