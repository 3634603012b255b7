"""List runs and sweeps, and clear up: `llmexp runs [FOLDER ...]`."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from llmexp.checkpoint.folders import MANIFEST, checkpoint_folders
from llmexp.checkpoint.hashes import open_undamaged
from llmexp.cli.running import Paths, paths_of
from llmexp.config.labels import plural
from llmexp.config.values import ConfigError, choice
from llmexp.folders import rundir
from llmexp.folders.find import SweepFolder, find
from llmexp.folders.folder import STATES, RunFolder, clean_name
from llmexp.folders.steps import steps_in
from llmexp.system import fileio
from llmexp.system.child import DONE
from llmexp.system.console import banner
from llmexp.system.redact import clean, warn
from llmexp.system.text import columns, duration, one_line, padded_cells, readable_size


def runs(
    *folders: Paths,
    state: Annotated[str | None, choice("only those in this state", " | ".join(STATES))] = None,
    name: Annotated[str, "GLOB", "only those of such a name, such as '*max_norm_0.5*'"] = "*",
    remove_checkpoints: Annotated[bool, "of finished runs, all but the newest whole one"] = False,
    yes: Annotated[bool, "remove them; without it they are only listed"] = False,
) -> Listed | Removed:
    """List runs and sweeps; clear up."""
    if yes and not remove_checkpoints:
        raise ConfigError("idle_knob", "--yes: add --remove-checkpoints, which it confirms")
    found, problems = find(paths_of(folders))
    if not found:
        text = "there is no run to show; for example llmexp runs outputs/default"
        raise ConfigError("not_a_run", "\n".join([*problems, text]))
    lines = [_line(path, sweep) for path, sweep in found]
    lines = [line for line in lines if state in (None, line["state"])]
    lines = [line for line in lines if fnmatch.fnmatch(line["name"], name)]
    return _removed(lines, yes, problems) if remove_checkpoints else Listed(lines, problems)


@dataclass(frozen=True)
class Listed:
    """The runs under some folders, as `llmexp runs` lists them."""

    runs: Sequence[dict[str, Any]]
    problems: Sequence[str]

    def show(self) -> None:
        """Print the runs."""
        if self.runs:
            _show(self.runs)
        else:
            print("no run matches these filters")


@dataclass(frozen=True)
class Removed:
    """Checkpoints that were removed, or would be, with their bytes; those that could not be."""

    removed: bool
    checkpoints: dict[str, int]
    failed: list[str]
    problems: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else DONE

    def __str__(self) -> str:
        if not self.checkpoints:
            return "" if self.failed else "there is nothing to remove"
        verb = "removed" if self.removed else "would remove"
        sizes = {clean(path): readable_size(size) for path, size in self.checkpoints.items()}
        total = readable_size(sum(self.checkpoints.values()))
        end = "freed" if self.removed else "would be freed; --yes removes them"
        lines = [f"{verb} {path} ({size})" for path, size in sizes.items()]
        return "\n".join([*lines, f"{plural(len(sizes), 'checkpoint')}, {total} {end}"])


def _line(path: Path, sweep: SweepFolder) -> dict[str, Any]:
    """Return what is known of a run, for the list and as JSON.

    `loss_key` says which loss there is: val/loss as it was last measured, else train/loss. `age_s`:
    since its status or its rows last changed. `size`: bytes on disk.
    """
    run = RunFolder(path, strict=False)
    key, loss = _loss(run)
    times = [run.status.get("updated")]
    with contextlib.suppress(OSError):
        times.append((path / rundir.METRICS).stat().st_mtime)
    changed = max((at for at in times if at is not None), default=None)
    whole = {
        "path": str(path),
        "sweep": sweep.path and str(sweep.path),
        "name": clean_name(path),
        "state": run.state,
        "step": steps_in(path) or int(run.summary.get("steps") or 0) or None,
        "max_steps": run.facts.get("max_steps"),
        "loss": loss,
        "loss_key": key,
        "age_s": None if changed is None else max(0.0, time.time() - changed),
        "size": disk_size(path),
        "error": run.error,
        "kind": run.status.get("kind") if run.error else None,
        "summary": run.summary,
    }
    return {key: value for key, value in whole.items() if value not in (None, "")}


def _loss(run: RunFolder) -> tuple[str | None, float | None]:
    """Return the key and value of the newest validation loss, else of the last train loss."""
    summary = run.summary
    for key in ("val/loss", "train/loss"):  # the last step may have no row
        ended = [summary.get(f"{when} {key}") for when in ("final", "latest")]
        for loss in (*ended, run.last_row(key).get(key)):
            if loss is not None:
                return key, loss
    return None, None


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the runs below a folder as `llmexp runs --json` lists them."""
    return [_line(path, sweep) for path, sweep in find([folder])[0]]


def disk_size(path: Path) -> int:
    """Return bytes that the files below take on disk; links are not followed."""
    total = 0
    for root, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total


def _show(lines: Sequence[dict[str, Any]]) -> None:
    """Print the runs of each sweep or folder below its name, as `ls -l` does: the name is last."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=columns(), highlight=False, markup=False, emoji=False)
    count = 5 if console.width >= 80 else 3
    table = [(line["state"], *_cells(line)) for line in lines]
    titles = ("state", "step", "loss", "age", "size")
    head, *rows = padded_cells([row[:count] for row in (titles, *table)], left=(0,))
    console.print("  ".join([*head, "run"]))
    groups: dict[str, list[tuple[dict[str, Any], list[str]]]] = defaultdict(list)
    for line, cells in zip(lines, rows, strict=True):
        groups[line.get("sweep") or str(Path(line["path"]).parent)].append((line, cells))
    for group in sorted(groups):
        tally = Counter(line["state"] for line, _ in groups[group])
        counts = ", ".join(f"{tally[state]} {state}" for state in STATES if tally[state])
        sweep = f"sweep {clean(group)}: {counts}"
        title = Text(sweep if "sweep" in groups[group][0][0] else clean(group), style="bold")
        console.print(title, soft_wrap=True)
        for line, (word, *figures) in groups[group]:
            state = Text(word, style=STATES[line["state"]])
            row = Text("  ").join([state, *map(Text, (*figures, line["name"]))])
            console.print(row, soft_wrap=True)
            if "error" in line:
                console.print(banner([("", one_line(line["error"]))], console.width))
    size = sum(line["size"] for line in lines)
    console.print(f"\n{plural(len(lines), 'run')}, {readable_size(size)}")


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    step = f"{line['step']:,}" if "step" in line else ""
    if step and "max_steps" in line:
        step += f"/{line['max_steps']:,}"
    loss = f"{line['loss']:#.5g}" if "loss" in line else ""
    loss += " train" if line.get("loss_key") == "train/loss" else ""
    age = duration(line["age_s"]) if "age_s" in line else ""
    return step, loss, age, readable_size(line["size"])


def _removed(lines: Sequence[dict[str, Any]], yes: bool, problems: Sequence[str]) -> Removed:
    """Remove the checkpoints of finished runs but the newest whole one; without `yes` find them."""
    done = Removed(yes, {}, [], problems)
    for path in (Path(line["path"]) for line in lines if line["state"] == "finished"):
        if rundir.is_locked(path):
            continue
        # Held, as training that starts meanwhile would lose what it reads.
        with contextlib.suppress(ConfigError):  # it is in training
            try:
                with rundir.locked(path) if yes else contextlib.nullcontext():
                    if rundir.read_status(path).get("state") == "finished":
                        _clear(path / rundir.CHECKPOINTS, done)
            except OSError as error:
                warn(f"{clean(path)}: {error.strerror}; nothing is removed there")
                done.failed.append(str(path))
    return done


def _clear(where: Path, done: Removed) -> None:
    """Remove the checkpoints of a run that are not needed; the caller holds its lock."""
    steps = checkpoint_folders(where)
    if len(steps) < 2:
        return
    kept = next(filter(_is_whole, reversed(steps)), None)
    if kept is None:
        warn(f"{clean(where)}: no checkpoint is whole, so none is removed")
        return
    for old in steps:
        if old == kept:
            continue
        size = disk_size(old)
        try:
            if done.removed:
                shutil.rmtree(old)
            done.checkpoints[str(old)] = size
        except OSError as error:
            warn(f"{clean(old)}: cannot be removed: {error.strerror}")
            done.failed.append(str(old))


def _is_whole(checkpoint: Path) -> bool:
    """Tell whether all files that the manifest names are there and have its sizes and sha256."""
    try:
        files = fileio.read_json(checkpoint / MANIFEST)["files"]
        paths = {checkpoint / name: about for name, about in files.items()}
        # before anything is read, which a pipe would wait for
        there = all(path.parent == checkpoint and path.is_file() for path in paths)
        if there:
            open_undamaged(paths)
        return there and bool(paths)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
