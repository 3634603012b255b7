"""Optional parts of a run, each in a folder of its own, which a run without it never executes.

The files of a feature are named after the packages that they extend. A package collects them by
`parts` and names none of them; a feature is removed by its folder, its line in FEATURES, and those
of its knobs in conf/.

config     its `Knobs`, which join the section `SECTION`; whether a config has `asked` for it (each
           has, where that is not there); the `KEYS` of its figures in the rows; `OFF`: values that
           turn it off in proofs; knobs that change neither time nor memory of a step (`NO_WORK`),
           or only by being set or not (`SOMETIMES`); `Status`: its kinds in status.json;
           `WEIGHTS`: what checkpoints hold of it that takes the place of the model's weights, in
           words, and what asks for it; `COPIES_OF_WEIGHTS` that it keeps, for the memory of a run;
           `CLIP_RULES` that it adds
train      `make`: the `train.feature.Feature`; imported where a run asks for it, and only there
assembly   `check`: refuses a config before anything is built; `prepare`: what is built with its
           data; what of that is `fixed` in checkpoints, and whether they are of an `other` run;
           `check_model`: refuses a model; `known`: fields of the solved run; `admit`: refuses a
           run that is to begin, or warns; imported where a run asks for it, and only there
rule       `RULES` of clipping, of which a run takes one
compare    its `COLUMNS`, and what it finds in the folder of a run and says of settings
folders    `start`, beside that of a process that makes runs; `record`, into the folder of each;
           what it has `LEFT` there, by its name, and `look_back`: what a run that goes on removes
           of that, of its steps after the checkpoint
page       `section`: a section of the page
tracker    `BESIDE`: files of lines beside metrics.jsonl, and what a tracker gets of a line
forecast   `counts`: how often it acts, for the time that a run takes, and its `WORDS`
verify     its knobs in a `trial`, in a `replay`, and where no step may be skipped (`unskipped`);
           what its proof needs: formulas of rules of clipping; `prepared`: a config for it; what
           the reference is to `follow` after each step
api        `FIGURES` that a program reads from the folder of a run, by their functions
cli        `check_resume`: what a resumed run cannot ask of it

Other files are a feature's own.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FEATURES = (
    "memory",
    "clip_value",
    "clip_moving",
    "clip_adaptive",
    "clip_per_group",
    "clip_update",
    "qk_limit",
    "clip_table",  # of the rules and qk_limit
    "weight_norm",
    "digest",
    "ema",
    "noise",
    "outliers",
    "moe",
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
def part(name: str, package: str) -> Any:
    """Return the module of a feature in a package; None: it has none."""
    there = (HERE / name / f"{package}.py").exists()
    return importlib.import_module(f"{__name__}.{name}.{package}") if there else None


@functools.cache
def parts(package: str) -> tuple[Any, ...]:
    """Return the module of each feature that has one in a package, in their order."""
    return tuple(there for name in FEATURES if (there := part(name, package)))


def asked_for(config: Any, package: str) -> Iterator[Any]:
    """Yield the modules in a package of those that a config asks for; no other is imported."""
    for name in FEATURES:
        asked = getattr(part(name, "config"), "asked", None)
        if (asked is None or asked(config)) and (there := part(name, package)):
            yield there


def offered(package: str, name: str, config: Any = None) -> list[Any]:
    """Return what features have under a name in a package, such as a function.

    `config`: of those that it asks for alone."""
    there = parts(package) if config is None else asked_for(config, package)
    return [getattr(part, name) for part in there if hasattr(part, name)]


def merged(package: str, name: str, *given: Any, config: Any = None) -> dict[str, Any]:
    """Return mappings of a name in a package, or those that functions answer with, as one.

    `config`: of those that it asks for alone."""
    found = (of(*given) if callable(of) else of for of in offered(package, name, config))
    return {key: value for one in found for key, value in one.items()}
