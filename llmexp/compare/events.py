"""Read runs out of TensorBoard's event files, a folder of these each, by its own package."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.strangers import OtherRun
from llmexp.config.commands import need_package
from llmexp.config.labels import parse_value
from llmexp.folders.find import looks_like_run
from llmexp.system.redact import clean

_FILES = "events.out.tfevents.*"
_PAIR = re.compile(r"([A-Za-z_][\w.]*)=([^,=/\s]+)")


def event_folders(path: Path) -> list[Path]:
    """Return the folders at and below a path that hold event files of no run of our own."""
    if not path.is_dir():
        return [path.parent] if path.match(_FILES) else []
    found = {file.parent for deep in ("", "*/", "*/*/") for file in path.glob(f"{deep}{_FILES}")}
    return sorted(folder for folder in found if not looks_like_run(folder.parent))


def runs_of_events(folders: list[Path]) -> list[OtherRun]:
    """Return the runs of folders of event files. Raises ConfigError without the package.

    Settings are what their paths say as lr=0.1,seed=1; where none says any, each is one of its own.
    """
    need_package("tensorboard", str(folders[0]), "an event file of TensorBoard")
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    runs = []
    for folder in folders:
        read = events.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        read.Reload()
        given = {k: parse_value(v) for k, v in _PAIR.findall(str(folder))}
        curve = _curve(read)
        runs.append(OtherRun(clean(folder.name), given, "", curve, folder, given))
    if not any(run.values for run in runs):
        for run in runs:
            run.values = run.config = {"run": run.name}
    return runs


def _curve(read: Any) -> dict[str, np.ndarray]:
    """Return all scalars of a run over the steps at which it has any; the last of a step counts."""
    tags: dict[str, dict[int, float]] = {}
    for tag in read.Tags()["scalars"]:
        tags[tag] = {e.step: e.value for e in read.Scalars(tag)}
    for tag in read.Tags().get("tensors", ()):
        one = {e.step: e.tensor_proto.float_val for e in read.Tensors(tag)}
        found = {step: float(values[0]) for step, values in one.items() if len(values) == 1}
        tags |= {tag: found} if found else {}
    steps = sorted({step for values in tags.values() for step in values})
    columns = {k: np.array([v.get(s, np.nan) for s in steps]) for k, v in tags.items()}
    return {"step": np.array(steps, dtype=float)} | columns
