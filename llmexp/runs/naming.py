"""Find a checkpoint by its name on a command line, and the rows that led to it; without torch."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any

from llmexp.runs import rundir
from llmexp.settings.values import ConfigError

WEIGHTS = ("model", "ema")  # of a checkpoint
LINEAGE = "lineage.jsonl"  # in a fork's folder: the rows of its parents, up to its step


def rows_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of a run and of its own parents up to a step, those that can be read."""
    found: list[dict[str, Any]] = []
    for name in (LINEAGE, rundir.METRICS):
        with contextlib.suppress(ConfigError, OSError):
            found += rundir.read_rows(path / name)
    return [row for row in found if row["step"] <= step]


def refuse_folder(wanted: Path, holds_run: bool, resume: str) -> None:
    """Raise ConfigError where checkpoint.resume does not allow a run in its chosen folder."""
    if holds_run and resume == "never":
        state = rundir.read_status(wanted).get("state", "unknown")
        raise ConfigError(
            f"hydra.run.dir={wanted}: holds a run already (state: {state}); to go on with it: "
            f"{rundir.how_to_resume(wanted)}"
        )
    if not holds_run and resume == "must":
        raise ConfigError(
            f"hydra.run.dir={wanted}: checkpoint.resume=must, but there is no run to resume"
        )


def named_checkpoint(text: str) -> tuple[Path, int | None]:
    """Return the folder and the step of RUN@STEP; no step for RUN, whose newest checkpoint it is.

    Raises ConfigError where there is no such run, or no such checkpoint.
    """
    path, at, step = Path(text), "", ""
    if not path.exists() and "@" in text:  # a folder may have an @ in its name
        run, at, step = text.rpartition("@")
        path = Path(run)
    rundir.check_plain(path)
    if not rundir.is_run(path):
        rundir.read_config(path)  # raises
    if not at:
        return path, None
    if not (steps := rundir.saved_steps(path)):
        raise ConfigError(f"{path}: has no checkpoint yet")
    if not (step.isdecimal() and int(step) in steps):
        raise ConfigError(
            f"{text}: there is no checkpoint of step {step or '(none given)'}; there are those of "
            f"{', '.join(map(str, steps))}; for example {path}@{steps[-1]}"
        )
    return path, int(step)


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Let a command choose which weights of a checkpoint it takes."""
    words = "ema: the average that train.ema keeps; default: model, those that were trained"
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0], help=words)


def check_new(folder: Path, key: str) -> None:
    """Raise ConfigError where something is there already, or no folder can be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is there already; name a new folder")
    existing = rundir.check_writable(folder, key)
    try:
        with tempfile.TemporaryDirectory(prefix=".llmexp-", dir=existing):
            pass  # a read-only file system, or a full one, is found out by trying
    except OSError as error:
        text = f"{key} {folder}: {existing} cannot be written: {error.strerror}"
        raise ConfigError(f"{text}; for example {key} /tmp/new") from None
