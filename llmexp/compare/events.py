"""Read runs out of TensorBoard's event files, a folder of these each, by its own package."""

from __future__ import annotations

import importlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from llmexp.compare.strangers import OtherRun, said_by
from llmexp.config.commands import need_package
from llmexp.folders.find import looks_like_run
from llmexp.system.redact import clean

_FILES = "events.out.tfevents.*"


def event_folders(path: Path) -> list[Path]:
    """Return the folders at and below a path that hold event files of no run of our own."""
    if not path.is_dir():
        return [path.parent] if path.match(_FILES) else []
    found = {file.parent for deep in ("", "*/", "*/*/") for file in path.glob(f"{deep}{_FILES}")}
    return sorted(folder for folder in found if not looks_like_run(folder.parent))


def runs_of_events(folders: list[Path]) -> list[OtherRun]:
    """Return the runs of folders of event files. Raises ConfigError without the package."""
    need_package("tensorboard", str(folders[0]), "an event file of TensorBoard")
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    array = importlib.import_module("tensorboard.util.tensor_util").make_ndarray
    runs = []
    for folder in folders:
        read = events.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        read.Reload()
        rows = defaultdict[int, dict[str, Any]](dict)  # the last of a step counts
        for tag in read.Tags()["scalars"]:
            for event in read.Scalars(tag):
                rows[event.step][tag] = event.value
        for tag in read.Tags()["tensors"]:
            for event in read.Tensors(tag):
                if (value := array(event.tensor_proto)).size == 1:
                    rows[event.step][tag] = value.item()
        looks = [{"step": step, **row} for step, row in sorted(rows.items())]
        given = said_by(folder)
        runs.append(OtherRun(clean(folder.name), given, "", looks, folder, given))
    return runs
