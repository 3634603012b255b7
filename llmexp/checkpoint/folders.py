"""Name the folders of a run's checkpoints, such as step_00000100; standard library only."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "manifest.json"  # written last: a folder without it holds no checkpoint


def checkpoint_folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step under `root`."""
    return root / f"step_{step:08d}"


def is_step(folder: Path) -> bool:
    """Return whether a folder has the name of a checkpoint."""
    return re.fullmatch(r"step_[0-9]+", folder.name) is not None


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(folder.name.removeprefix("step_"))


def checkpoint_folders(root: Path) -> list[Path]:
    """Return the folders of checkpoints under `root`, damaged ones too, oldest first."""
    return sorted(
        (path for path in root.glob("step_*") if path.is_dir() and is_step(path)), key=step_of
    )
