"""Find runs and checkpoints by their names on a command line; read the rows that led to one. No
torch."""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from llmexp.runs import rundir
from llmexp.settings.values import ConfigError

WEIGHTS = ("model", "ema")  # of a checkpoint
LINEAGE = "lineage.jsonl"  # in a fork's folder: the rows of its parents, up to its step
LEDGER = "sweep.json"  # in a sweep's folder
CHANGES = "sweep.jsonl"  # beside it: what has changed since it was written whole, a line a change
FILES = (rundir.CONFIG, rundir.RUN, rundir.STATUS, rundir.METRICS, rundir.LOG, LEDGER)
DEPTH = 4  # outputs/<name>/<stamp>/<number>-<label>


def by_number(path: Path) -> list[tuple[str, int]]:
    """Return a key that orders folders by the numbers in their names: 10 after 9."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", path.name)
    return [(text, int(number or 0)) for text, number in parts]


def runs_meant(given: str | Path) -> tuple[list[Path], str]:
    """Return the runs that a path or a glob means, and why there are none."""
    names = [given] if os.path.lexists(given) else sorted(glob.glob(str(given), recursive=True))
    runs = [run for name in map(Path, names) for run in runs_under(_folder(name))]
    if runs:
        return runs, ""
    if not names:
        return [], "there is nothing of that name; a run looks like outputs/default/..."
    return [], f"is no run, and there is none below (a run folder has a {rundir.CONFIG})"


def runs_under(path: Path, depth: int = DEPTH) -> list[Path]:
    """Return the folder itself where it is a run, else the runs below it; a sweep's points by their
    number."""
    if looks_like_run(path):
        return [path]
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for inner in sorted(path.iterdir() if depth else (), key=by_number):
            hidden = inner.name.startswith(".") or inner.name == rundir.CHECKPOINTS
            followed = depth == DEPTH or not inner.is_symlink()
            if inner.is_dir() and followed and not hidden:
                found += runs_under(inner, depth - 1)
    return found


def looks_like_run(path: Path) -> bool:
    """Look for a config or rows and a record beside them: any program may write a config.yaml."""
    there = {name for name in FILES if (path / name).is_file()}
    beside = {rundir.STATUS, rundir.RUN}
    if rundir.CONFIG in there:
        return bool(there & {*beside, rundir.METRICS})
    return rundir.METRICS in there and bool(there & beside)


def _folder(path: Path) -> Path:
    """Return the folder that is meant: of a file of a run, the run."""
    return path.parent if path.name in FILES and path.is_file() else path


def with_changes(tree: Any, sweep: Path) -> Any:
    """Return what a sweep's ledger holds, with the changes since it was written whole.

    A line counts if it is whole and of this very ledger (`since`: when that was written); what is
    damaged is left out, as the runs' own folders know better.
    """
    if not isinstance(tree, dict) or not isinstance(points := tree.get("points"), list):
        return tree
    try:
        lines = (sweep / CHANGES).read_bytes().split(b"\n")[:-1]
    except OSError:
        return tree
    known = {p["number"]: p for p in points if isinstance(p, dict) and type(p.get("number")) is int}
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError):
            change = json.loads(line)
            if change.pop("since") == tree.get("updated"):
                known.get(change["number"], {}).update(change)
    return tree


def lineage(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of a run and of its own parents up to a step, those that can be read."""
    found: list[dict[str, Any]] = []
    for name in (LINEAGE, rundir.METRICS):
        with contextlib.suppress(ConfigError, OSError):
            found += rundir.read_rows(path / name)
    return [row for row in found if row["step"] <= step]


def refuse_folder(wanted: Path, holds_run: bool, resume: str) -> None:
    """Raise ConfigError where `resume`, the value of checkpoint.resume, does not allow a run in the
    folder that was chosen for it."""
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
    """Return (run folder, step) of RUN@STEP, and (run folder, None) of RUN, which means its newest
    checkpoint. Raises ConfigError where there is no such run, or no such checkpoint."""
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
