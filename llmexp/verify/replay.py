"""Repeat a step of a run, and say whether the data or the state made it unusual."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.checkpoint.folders import checkpoint_folder
from llmexp.runs import rundir
from llmexp.runs.rows import LINEAGE, read_rows
from llmexp.settings.config import Config
from llmexp.settings.convert import with_knobs
from llmexp.settings.values import ConfigError, refuse
from llmexp.system.fileio import read_json
from llmexp.verify import runs

UNUSUAL = 2  # times the usual gradient norm
BEFORE, FEWEST = 32, 4  # steps before, whose median norm is the usual one; known at least


@dataclass(frozen=True)
class ReplayOf:
    """Hold what to repeat, and what to change: see `llmexp replay --help`."""

    run: Path
    step: int
    start: int | None = None
    lr: float | None = None
    max_norm: float | None = None
    skip: bool = False
    after: int = 0


def repeat(wanted: ReplayOf) -> dict[str, Any]:
    """Return what the step was made of, with a verdict.

    Raises ConfigError where the step cannot be repeated, or is not what the run recorded.
    """
    saved, last = rundir.saved_steps(wanted.run), last_step(wanted.run)
    parent = rundir.read_run(wanted.run).get("parent") or {"step": 0}
    first = parent["step"] + 1
    if not first <= wanted.step <= last:
        text = f"{wanted.run}@{wanted.step}: the run took the steps {first} to {last}"
        raise ConfigError(f"{text}; for example llmexp replay {wanted.run}@{last}")
    if wanted.start is not None and wanted.start not in [0, *saved]:
        there = ", ".join(map(str, saved)) or "none"
        raise ConfigError(
            f"--from {wanted.start}: there is no checkpoint of that step; there are those of "
            f"{there}, and 0, the beginning"
        )
    near = max((step for step in saved if step < wanted.step), default=0)
    later = wanted.start is not None and wanted.start >= wanted.step
    begin = near if wanted.start is None or later else wanted.start
    found = _worker(wanted, begin, only_look=False)
    found["repeated_from"] = found["from"]  # of a fork that begins, the step of its parent
    if later and wanted.start is not None:
        found["start"] = _worker(wanted, wanted.start, only_look=True)["start"]
        found["from"] = wanted.start
    if (bad := found["differs"]) is not None:
        raise ConfigError(
            f"{wanted.run}: step {bad['step']} came out otherwise than the run recorded it: "
            f"{bad['figure']} {bad['replayed']!r}, in its row {bad['row']!r}; a replay needs the "
            "machine, the versions and the code of the run (llmexp verify determinism)"
        )
    norms = {
        row["step"]: row["grad_norm"]
        for row in read_rows(wanted.run / rundir.METRICS)
        if "grad_norm" in row
    }
    norms |= {int(step): norm for step, norm in found.pop("norms").items()}
    before = [norms[step] for step in sorted(norms) if wanted.step - BEFORE <= step < wanted.step]
    return {"step": wanted.step} | found | verdict(wanted.step, found, before)


def last_step(run: Path) -> int:
    """Return the last step that the run took, as far as its rows and checkpoints tell."""
    rows = read_rows(run / rundir.METRICS)
    return max([row["step"] for row in rows[-1:]] + [rundir.saved_step(run) or 0])


def verdict(step: int, found: dict[str, Any], before: list[float]) -> dict[str, Any]:
    """Return `cause` and a sentence, from gradient norms at two states.

    `times_here` is the norm of the step over the median of the steps `before` it; `times_there` is
    that of its window with the weights of the start over the median of other windows there. A step
    is unusual from UNUSUAL times on; then the cause is that which `times_there` is nearer to, on a
    logarithmic scale: `times_here` is the data, 1 is the state.
    """
    start, here = found["start"], found["here"]
    there = [norm for _, norm in start["others"]] or [start["window"][1]]
    count, begin = len(here["sequences"]), found["from"]
    usual = statistics.median(before if len(before) >= FEWEST else there)
    if not (usual > 0 and statistics.median(there) > 0):
        text = f"step {step:,} cannot be judged: the windows near it have gradients of norm 0."
        return {"cause": None, "usual_norm": usual, "sentence": text}
    if "grad_norm" not in here:
        return {"cause": None, "usual_norm": usual, "sentence": skipped(step, found, usual)}
    times_here = here["grad_norm"] / usual
    times_there = start["window"][1] / statistics.median(there)
    figures = {"usual_norm": usual, "times_here": times_here, "times_there": times_there}
    if times_here < UNUSUAL:
        text = f"no spike: step {step} has {times_here:.3g} times the usual gradient norm."
        return figures | {"cause": "none", "sentence": text}
    if math.log(max(times_there, 1e-9)) > math.log(times_here) / 2:
        text = (
            f"the data: these {count} sequences give {times_there:.3g} times the usual norm with "
            f"the weights of step {begin:,}, too ({times_here:.3g} times at step {step:,})."
        )
        return figures | {"cause": "data", "sentence": text}
    text = (
        f"the state: with the weights of step {begin:,} the same window is ordinary "
        f"({times_there:.3g} times the usual norm; {times_here:.3g} times at step {step:,})."
    )
    return figures | {"cause": "state", "sentence": text}


def skipped(step: int, found: dict[str, Any], usual: float) -> str:
    """Return what became of the run without the window of a step."""
    if not found["later"]:
        return f"without the window of step {step:,}: no step follows."
    largest, at = max((norm, later) for later, _, norm in found["later"])
    count = len(found["later"])
    text = f"without the window of step {step:,} the gradient norm of the next {count} steps"
    if largest < UNUSUAL * usual:
        return f"{text} stays within {largest / usual:.3g} times the usual one."
    return f"{text} comes to {largest / usual:.3g} times the usual one, at step {at:,}."


def _worker(wanted: ReplayOf, begin: int, *, only_look: bool) -> dict[str, Any]:
    """Do it in a copy of the run's folder, on the run's ranks. Raises ConfigError."""
    config = _quiet(rundir.built_config(wanted.run), wanted.step)
    rows = read_rows(wanted.run / rundir.METRICS)
    asked = {
        "step": wanted.step,
        "rows": {row["step"]: row for row in rows if begin < row["step"] <= wanted.step},
        "only_look": only_look,
        "lr": wanted.lr,
        "max_norm": wanted.max_norm,
        "skip": wanted.skip,
        "after": wanted.after,
    }
    with tempfile.TemporaryDirectory(prefix="llmexp-replay-") as folder:
        path = Path(folder, "run")
        _copy(wanted.run, path, begin)
        try:
            runs.train_folder(path, config, **{rundir.REPLAY_ASKED: json.dumps(asked)})
        except ConfigError:
            words = runs.last_words(path).removeprefix("llmexp: ")
            text = words.partition("; the logs of all ranks are in")[0]  # they go with the copy
            text = text.replace(str(path), str(wanted.run))
            raise ConfigError(f"{wanted.run}: it cannot be repeated: {text}") from None
        return read_json(path / rundir.REPLAY)


def _copy(run: Path, path: Path, begin: int) -> None:
    """Make a folder that goes on from a checkpoint of the run, or from its beginning."""
    path.mkdir()
    for name in (rundir.CONFIG, rundir.RUN, LINEAGE):
        if (run / name).exists():
            shutil.copy(run / name, path / name)
    rundir.write_status(path, "preempted")
    checkpoint = checkpoint_folder(run / rundir.CHECKPOINTS, begin)
    if checkpoint.is_dir():
        there = checkpoint_folder(path / rundir.CHECKPOINTS, begin)
        there.mkdir(parents=True)
        for file in checkpoint.iterdir():
            _link(file, there / file.name)


def _link(file: Path, link: Path) -> None:
    try:
        os.link(file, link)
    except OSError:  # another file system
        shutil.copy(file, link)


def _quiet(config: Config, step: int) -> Config:
    """Return the config without anything that the steps do not need. Raises ConfigError."""
    if (hosts := config.parallelism.nnodes) > 1:
        raise refuse("parallelism.nnodes", hosts, "a replay runs on this host alone", 1)
    train: dict[str, Any] = {
        "stop_step": None, "tasks": [], "sample_tokens": 0, "sample_every": None,
        "profile_start": None,
    }  # fmt: skip
    checkpoint: dict[str, Any] = {
        "every": None, "every_minutes": None, "keep_every": None, "save_initial": False,
        "last": False, "resume": "auto",
    }  # fmt: skip
    metrics = {
        "noise_scale_every": None, "picture": False, "spikes": False, "layers_every": step,
    }  # fmt: skip
    return with_knobs(
        config, train=train, checkpoint=checkpoint, metrics=metrics, tracker={"kind": "none"}
    )
