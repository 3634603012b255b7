"""Optional parts of a run, each in a folder of its own, which a run without it never executes.

The files of a feature are named after the rooms that they stand in. A room collects them by `parts`
and names none of them; a feature is removed by its folder and its line in FEATURES.

settings   its `Knobs`, which join the section `SECTION`, the `KEYS` of its figures in the rows;
           where it comes between or beside the steps `OFF`, its knobs where it does not, and those
           of which the work depends on none (`NO_WORK`), or on whether they are set (`SOMETIMES`)
train      `make`: the `train.feature.Feature` that a run asks for, or None
assembly   `check`: refuses a config before anything is built; `prepare`: what is built with its
           data; what of that is `fixed` in checkpoints, and whether they are of an `other` run
compare    its `COLUMNS`, and what it finds in the folder of a run and says of settings
runs       `start`, beside that of a process that makes runs; `record`, into the folder of each
page       `table`: a table of the page
forecast   `counts`: how often it acts, for the time that a run takes, and its `WORDS`
cli        `check_resume`: what a resumed run cannot ask of it

Other files are a feature's own.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FEATURES = (
    "digest",
    "ema",
    "noise",
    "outliers",
    "layers",
    "spikes",  # of layers and outliers
    "tasks",
    "sample",
    "profile",
    "picture",
    "tracker",
    "provenance",
)


@functools.cache
def parts(room: str) -> tuple[Any, ...]:
    """Return the module of each feature that has one in a room, in their order."""
    there = [name for name in FEATURES if (HERE / name / f"{room}.py").exists()]
    return tuple(importlib.import_module(f"{__name__}.{name}.{room}") for name in there)


def offered(room: str, name: str) -> list[Any]:
    """Return what the features have under a name in a room, such as a function."""
    return [getattr(part, name) for part in parts(room) if hasattr(part, name)]


def merged(room: str, name: str, *given: Any) -> dict[str, Any]:
    """Return what the functions of a name in a room answer, in one mapping."""
    return {key: found for of in offered(room, name) for key, found in of(*given).items()}
