from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmexp.folders.rundir import SPIKES


def look_back(path: Path, step: int) -> Callable[[], None]:
    files = [file for file in (path / SPIKES).glob("*.json") if file.stem.isdigit()]

    def remove() -> None:
        for file in files:
            if int(file.stem) > step:
                file.unlink()

    return remove
