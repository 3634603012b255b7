from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmexp.features.layers.reading import FILE
from llmexp.folders.rows import Rows


def look_back(path: Path, step: int) -> Callable[[], None]:
    file = path / FILE
    if not file.exists():
        return lambda: None
    rows = Rows(file, step)
    return lambda: rows.open().close()
