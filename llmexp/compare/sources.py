"""Read runs wherever they are, as records: run folders, tables, data frames, wandb, TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmexp.compare.events import event_folders, runs_of_events
from llmexp.compare.projects import ONLINE, fetch_figure, offline_files, offline_run, project_runs
from llmexp.compare.reading import read
from llmexp.compare.records import Record
from llmexp.compare.strangers import Asked, OtherRun, figure_of, records_of
from llmexp.compare.tables import is_table, runs_of
from llmexp.config.values import ConfigError
from llmexp.folders.find import find, paths_of


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
    paths = [one] if hasattr(type(one), "columns") else paths_of(one) or [one]
    if all(map(is_table, paths)):
        return [run for path in paths for run in runs_of(path, asked)]
    if files := [file for path in paths for file in offline_files(path)]:
        return [*map(offline_run, files)]
    folders = [folder for path in paths for folder in event_folders(path)]
    return runs_of_events(folders) if folders else []
