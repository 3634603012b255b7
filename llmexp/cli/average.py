"""`llmexp average RUN --last 5`: the mean of the weights of several checkpoints."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmexp.compose import command_line
from llmexp.runs import rundir
from llmexp.runs.naming import OF_WEIGHTS, named_checkpoint
from llmexp.runs.rundir import check_new
from llmexp.settings.values import ConfigError


@dataclass(frozen=True)
class Averaged:
    """The mean of checkpoints in `path`, a folder that other commands take as they take a run."""

    path: Path
    weights: str  # model or ema
    steps: list[int]  # of the checkpoints
    parameters: int


def main(arguments: list[str]) -> int:
    """Write the mean of checkpoints into a folder that other commands take as they take a run."""
    text = (
        "Average the weights of several checkpoints, of one run or of several. evaluate, sample, "
        "export and model.init_from take the result as they take a run."
    )
    table = {
        "runs+": ("RUN[@STEP]", "run folder; without a step its newest one"),
        "--last": ("N", "the newest N checkpoints of each run", int),
        **OF_WEIGHTS,
        "--out": ("FOLDER", "a new folder (default, of one run: in it)", Path),
    }
    args = command_line.read("average", text, table, arguments)
    done = averaged(args.runs, args.last, args.weights, args.out)
    steps = ", ".join(f"{step:,}" for step in done.steps)
    kind = "ema" if done.weights == "ema" else "weights"
    print(f"{done.path}: mean of the {kind} of steps {steps}; {done.parameters:,} parameters")
    print(f"use it: {rundir.command_on(done.path, 'evaluate', done.path)}")
    return 0


def averaged(names: Sequence[str], last: int | None, weights: str, out: Path | None) -> Averaged:
    """Write the mean of the named checkpoints into `out`, or into the run where that is null.

    Raises ConfigError.
    """
    found = _chosen(names, last)
    if len(found) < 2 and weights == "model":
        raise ConfigError("out_of_range", f"{names[0]}: is one checkpoint; for example --last 5")
    folder = out or default_folder(found, weights)
    check_new(folder, "--out")
    from llmexp.exchange import average as exchange
    from llmexp.exchange.reading import open_checkpoint

    opened = [open_checkpoint(path, step, weights) for path, step in found]
    exchange.write_average(opened, weights, folder)
    size = sum(math.prod(pieces[0].shape) for pieces in opened[0].model.values())
    return Averaged(folder, weights, [one.step for one in opened], size)


def _chosen(names: Sequence[str], last: int | None) -> list[tuple[Path, int]]:
    """Return the run and the step of each checkpoint. Raises ConfigError."""
    found: list[tuple[Path, int]] = []
    if last is not None and last < 1:
        raise ConfigError(
            "out_of_range", f"--last {last}: must be at least 1; for example --last 5"
        )
    for name in names:
        path, step = named_checkpoint(name)
        steps = rundir.saved_steps(path)
        if step is not None and last is not None:
            text = "give the step or --last; for example"
            raise ConfigError("conflict", f"{name} --last {last}: {text} {shlex.quote(str(path))}")
        if len(steps) < (last or 1):
            there = ", ".join(map(str, steps)) or "none yet"
            way = f"checkpoint.keep={max(2, last or 1)} keeps more"
            raise ConfigError(
                "no_checkpoint",
                f"{path}: has {len(steps)} of {last or 1} checkpoints: {there}; {way}",
            )
        found += [(path, one) for one in ([step] if step is not None else steps[-(last or 1) :])]
    if twice := [f"{path}@{step}" for path, step in found if found.count((path, step)) > 1]:
        raise ConfigError("conflict", f"{twice[0]}: is named twice")
    return found


def default_folder(found: list[tuple[Path, int]], weights: str) -> Path:
    """Return the folder of an average within its run. Raises ConfigError for several runs."""
    (path, first), (other, last) = found[0], found[-1]
    if any(one != path for one, _ in found):
        raise ConfigError(
            "missing_value", f"{path} and {other}: name the folder of their average: --out FOLDER"
        )
    name = "-".join(dict.fromkeys((str(first), str(last))))
    return path / "averages" / (name if weights == "model" else f"{weights}-{name}")
