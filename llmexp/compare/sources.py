"""Read runs wherever they are, as records: run folders, tables, data frames, wandb, TensorBoard."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmexp.compare.projects import ONLINE, fetch_figure, offline_files, offline_run, project_runs
from llmexp.compare.reading import read
from llmexp.compare.records import Record
from llmexp.compare.strangers import Asked, OtherRun, figure_of, records_of, said_by
from llmexp.compare.tables import is_table, runs_of
from llmexp.config.commands import need_package
from llmexp.config.values import ConfigError
from llmexp.folders.find import find, looks_like_run, paths_of
from llmexp.system.redact import clean

_FILES = "events.out.tfevents.*"


def gathered(given: Sequence[Any], asked: Asked) -> tuple[list[Record], list[str], list[str]]:
    """Return runs as records, what could not be read, and what was guessed about them."""
    runs, folders, said = list[OtherRun](), list[Any](), list[str]()
    for one in given:
        found = others(one, asked)
        runs += found
        folders += [] if found else [one]
    if asked.flags and not runs:
        text = "is of tables and trackers; run folders say it themselves, and --sort orders these"
        text = f"{asked.flags[0]}: {text}; for example llmexp compare runs.csv"
        raise ConfigError("idle_knob", text)
    if asked.filter and not any(str(one).startswith(ONLINE) for one in given):
        text = f"--filter {asked.filter}: takes runs of a project of wandb, and none is given; "
        raise ConfigError("idle_knob", f"{text}for example llmexp compare wandb:ENTITY/PROJECT")
    own, problems = find(folders)
    records = read(own)
    if runs:
        figure = figure_of(runs, asked, said)
        fetch_figure(runs, figure)
        records += records_of(runs, asked, figure, said)
    return records, problems, said


def others(one: Any, asked: Asked) -> list[OtherRun]:
    """Return the runs that a path means and llmexp did not train; of wandb without rows."""
    if str(one).startswith(ONLINE):
        return project_runs(str(one), asked.filter)
    paths = [one] if hasattr(type(one), "columns") else paths_of(one)
    if all(map(is_table, paths)):
        return [run for path in paths for run in runs_of(path, asked)]
    if files := [file for path in paths for file in offline_files(path)]:
        return [*map(offline_run, files)]
    folders = [folder for path in paths for folder in event_folders(path)]
    return runs_of_events(folders) if folders else []


def event_folders(path: Path) -> list[Path]:
    """Return the folders at and below a path that hold event files of no run of our own."""
    if not path.is_dir():
        return [path.parent] if path.match(_FILES) else []
    found = {file.parent for deep in ("", "*/", "*/*/") for file in path.glob(f"{deep}{_FILES}")}
    return sorted(folder for folder in found if not looks_like_run(folder.parent))


def runs_of_events(folders: list[Path]) -> list[OtherRun]:
    """Return the runs of folders of event files. Raises ConfigError without the package."""
    need_package("tensorboard", str(folders[0]), "an event file of TensorBoard")
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    array = importlib.import_module("tensorboard.util.tensor_util").make_ndarray
    runs = []
    for folder in folders:
        opened = events.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        opened.Reload()
        rows = defaultdict[int, dict[str, Any]](dict)  # the last of a step counts
        for tag in opened.Tags()["scalars"]:
            for event in opened.Scalars(tag):
                rows[event.step][tag] = event.value
        for tag in opened.Tags()["tensors"]:
            for event in opened.Tensors(tag):
                if (value := array(event.tensor_proto)).size == 1:
                    rows[event.step][tag] = value.item()
        looks = [{"step": step, **row} for step, row in sorted(rows.items())]
        runs.append(OtherRun(clean(folder.name), said_by(folder), "", looks, folder, True))
    return runs
