"""`llmexp average RUN --last 5`: the mean of the weights of several checkpoints."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from llmexp.config.values import ConfigError, count
from llmexp.folders import rundir
from llmexp.folders.naming import Name, Names, Weights, named_checkpoint
from llmexp.folders.rundir import check_new


@dataclass(frozen=True)
class Averaged:
    """The mean of checkpoints in `path`, a folder that other commands take as they take a run."""

    path: Path
    weights: str  # one of naming.WEIGHTS
    steps: Sequence[int]  # of the checkpoints
    parameters: int

    def __str__(self) -> str:
        steps = ", ".join(f"{step:,}" for step in self.steps)
        kind = "weights" if self.weights == "model" else self.weights
        use = rundir.command_on(self.path, "evaluate", self.path)
        mean = f"mean of the {kind} of steps {steps}; {self.parameters:,} parameters"
        return f"{self.path}: {mean}\nuse it: {use}"


def average(
    run: Name,
    *runs: Names,
    last: Annotated[int | None, count("the newest so many checkpoints of each run", 5)] = None,
    weights: Weights = "model",
    out: Annotated[Path | None, "FOLDER", "a new folder (default, of one run: in it)"] = None,
) -> Averaged:
    """Average the weights of several checkpoints, of one run or of several.

    evaluate, sample, export and model.init_from take the result as they take a run.
    """
    found = [one for name in (run, *runs) for one in _chosen(name, last)]
    if len(found) < 2 and weights == "model":
        raise ConfigError("out_of_range", f"{run}: is one checkpoint; for example --last 5")
    if twice := [f"{path}@{step}" for path, step in found if found.count((path, step)) > 1]:
        raise ConfigError("conflict", f"{twice[0]}: is named twice")
    folder = out or default_folder(found, weights)
    check_new(folder, "--out")
    from llmexp.hf import average as exchange
    from llmexp.hf.reading import open_checkpoint

    opened = [open_checkpoint(path, step, weights) for path, step in found]
    exchange.write_average(opened, weights, folder)
    size = sum(math.prod(pieces[0].shape) for pieces in opened[0].model.values())
    return Averaged(folder, weights, [one.step for one in opened], size)


def _chosen(name: str, last: int | None) -> list[tuple[Path, int]]:
    """Return the run and the step of each checkpoint that a name means. Raises ConfigError."""
    path, step = named_checkpoint(name)
    if step is not None and last is not None:
        text = "give the step or --last; for example"
        raise ConfigError("conflict", f"{name} --last {last}: {text} {shlex.quote(str(path))}")
    steps, wanted = rundir.saved_steps(path), last or 1
    if len(steps) < wanted:
        there = ", ".join(map(str, steps)) or "none yet"
        way = f"checkpoint.keep={max(2, wanted)} keeps more"
        raise ConfigError(
            "no_checkpoint", f"{path}: has {len(steps)} of {wanted} checkpoints: {there}; {way}"
        )
    return [(path, one) for one in ([step] if step is not None else steps[-wanted:])]


def default_folder(found: list[tuple[Path, int]], weights: str) -> Path:
    """Return the folder of an average within its run. Raises ConfigError for several runs."""
    (path, first), (other, last) = found[0], found[-1]
    if any(one != path for one, _ in found):
        raise ConfigError(
            "missing_value", f"{path} and {other}: name the folder of their average: --out FOLDER"
        )
    name = "-".join(dict.fromkeys((str(first), str(last))))
    return path / "averages" / (name if weights == "model" else f"{weights}-{name}")
