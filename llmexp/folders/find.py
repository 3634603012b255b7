"""Find the runs and sweeps that paths and globs mean."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmexp.config.values import ConfigError
from llmexp.folders import ledger, rundir
from llmexp.folders.ledger import TO_TRAIN, Ledger, LedgerEntry
from llmexp.system.redact import clean

FILES = (rundir.CONFIG, rundir.RUN, rundir.STATUS, rundir.METRICS, rundir.LOG, ledger.LEDGER)
DEPTH = 4  # outputs/<name>/<stamp>/<number>-<label>


@dataclass(frozen=True)
class SweepFolder:
    """The sweep that a run belongs to; without a path where there is none."""

    path: Path | None = None
    ledger: Ledger | None = None  # None where it cannot be read

    @cached_property
    def points(self) -> dict[str, LedgerEntry]:
        """Return the points by the names of their folders."""
        return {point.folder: point for point in self.ledger.points} if self.ledger else {}

    def point_of(self, run: Path) -> LedgerEntry | None:
        """Return the point of a run below the sweep's folder, if its ledger has one."""
        if self.path is None:
            return None
        # both without links: a path may name the sweep otherwise than the first one did
        own, its = run.parent.resolve() / run.name, self.path.resolve()
        return self.points.get(os.path.relpath(own, its))

    @cached_property
    def left(self) -> int:
        """Return how many points are still to be trained."""
        return sum(p.state in TO_TRAIN and p.rung is None for p in self.points.values())


def find(paths: Sequence[str | Path]) -> tuple[list[tuple[Path, SweepFolder]], list[str]]:
    """Return the runs under paths and globs, each once and in order, and a line for each problem.

    A run whose folder holds links, pipes or devices is left out.
    """
    found: list[tuple[Path, SweepFolder]] = []
    sweeps: dict[Path, SweepFolder] = {}
    runs, problems = runs_meant(paths)
    for run in runs:
        try:
            rundir.check_plain(run)
        except ConfigError as error:
            problems.append(f"{clean(error)}; this run is left out")
            continue
        found.append((run, _sweep_of(run, sweeps, problems)))
    return found, problems


def _sweep_of(run: Path, sweeps: dict[Path, SweepFolder], problems: list[str]) -> SweepFolder:
    """Return the sweep of a run: its parent folder, or one above whose ledger has the run."""
    parent = run / ".." if run.name in ("", "..") else run.parent
    deeper = [] if ledger.is_sweep(parent) else run.absolute().parents[1:DEPTH]
    for path in [*filter(ledger.is_sweep, deeper), parent]:
        if path.resolve() not in sweeps:
            sweeps[path.resolve()] = _sweep(path, problems)
        if path is parent or sweeps[path.resolve()].point_of(run):
            break
    return sweeps[path.resolve()]


def _sweep(path: Path, problems: list[str]) -> SweepFolder:
    """Return the sweep of a folder of runs."""
    if not ledger.is_sweep(path):
        return SweepFolder(path if (path / "multirun.yaml").is_file() else None)
    try:
        found = ledger.read_ledger(path)
    except ConfigError as error:
        problems.append(f"{clean(error)}; the runs speak for themselves")
        return SweepFolder(path)
    for point in [p for p in found.points if p.refused is not None][:10]:
        label, why = clean(point.label), clean(point.refused)[:200]
        problems.append(f"{path / ledger.LEDGER}: {label} could not run: {why}")
    return SweepFolder(path, found)


def paths_of(given: str | Path) -> list[Path]:
    """Return what is there of this name, or what a glob finds."""
    if os.path.lexists(given):
        return [Path(given)]
    return list(map(Path, sorted(glob.glob(str(given), recursive=True))))


def runs_meant(paths: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """Return the runs that paths and globs mean, each once, and a line for each that has none.

    Raises ConfigError for a path that does not exist, or a glob that finds nothing.
    """
    found: dict[Path, Path] = {}
    problems: list[str] = []
    for given in paths:
        names = paths_of(given)
        # a file of a run stands for its folder
        folders = [p.parent if p.name in FILES and p.is_file() else p for p in names]
        runs = [run for folder in folders for run in runs_under(folder)]
        for run in runs:
            found.setdefault(run.resolve(), run)
        if not names:
            text = f"{clean(given) or '.'}: {rundir.nothing_at(given)}"
            raise ConfigError("not_a_run", text)
        if not runs:
            text = f"is not a run, and holds none (a run folder has a {rundir.CONFIG})"
            problems.append(f"{clean(given) or '.'}: {text}")
    return list(found.values()), problems


def runs_under(path: Path, depth: int = DEPTH) -> list[Path]:
    """Return the folder itself where it is a run, else the runs below it by their numbers."""
    if looks_like_run(path):
        return [path]
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for inner in sorted(path.iterdir() if depth else (), key=rundir.by_number):
            hidden = inner.name.startswith(".") or inner.name == rundir.CHECKPOINTS
            followed = depth == DEPTH or not inner.is_symlink()
            if inner.is_dir() and followed and not hidden:
                found += runs_under(inner, depth - 1)
    return found


def looks_like_run(path: Path) -> bool:
    """Return whether there is a record of a run beside a config or rows, which others write too."""
    there = {name for name in FILES if (path / name).is_file()}
    beside = {rundir.STATUS, rundir.RUN}
    if rundir.CONFIG in there:
        return bool(there & {*beside, rundir.METRICS})
    return rundir.METRICS in there and bool(there & beside)
