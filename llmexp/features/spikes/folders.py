from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmexp.features.spikes.config import FOLDER

LEFT = FOLDER


def look_back(path: Path, step: int) -> Callable[[], None]:
    files = [file for file in (path / FOLDER).glob("*.json") if file.stem.isdigit()]

    def remove() -> None:
        for file in files:
            if int(file.stem) > step:
                file.unlink()

    return remove
