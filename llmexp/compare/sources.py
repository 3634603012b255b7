"""Read runs wherever they are, as records: run folders, tables, data frames, wandb, TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.events import event_folders, runs_of_events
from llmexp.compare.reading import read
from llmexp.compare.records import Record
from llmexp.compare.strangers import (
    Asked,
    OtherRun,
    axis_in,
    check_keys,
    figure_of,
    records_of,
    state_of,
)
from llmexp.compare.tables import is_table, runs_of
from llmexp.config.labels import parse_value
from llmexp.config.values import ConfigError, flatten
from llmexp.folders.find import find, paths_of
from llmexp.system.text import number
from llmexp.tracker.reading import (
    WandbRun,
    fetch_rows,
    offline_files,
    offline_run,
    project_runs,
)

ONLINE = "wandb:"  # begins what names a project


def gathered(given: Sequence[Any], asked: Asked) -> tuple[list[Record], list[str], list[str]]:
    """Return runs as records, what could not be read, and what was guessed about them."""
    runs, there, folders = list[OtherRun](), list[WandbRun](), list[Any]()
    for one in given:
        if is_table(one):
            runs += runs_of(one, asked)
        elif str(one).startswith(ONLINE):
            there += project_runs(str(one).removeprefix(ONLINE), _filters(asked.filter))
        elif files := [f for path in paths_of(one) for f in offline_files(path)]:
            there += map(offline_run, files)
        elif events := [folder for path in paths_of(one) for folder in event_folders(path)]:
            runs += runs_of_events(events)
        else:
            folders.append(one)
    if asked.flags and len(folders) == len(given):
        text = "is of tables and trackers; run folders say it themselves, and --sort orders these"
        text = f"{asked.flags[0]}: {text}; for example llmexp compare runs.csv"
        raise ConfigError("idle_knob", text)
    found, problems = find(folders)
    records, said = read(found), list[str]()
    others = {id(run): _other(run) for run in there}
    if runs := [*runs, *others.values()]:
        check_keys(runs, asked)
        figure = figure_of(runs, asked, said)
        fetch_rows(there, lambda run: _keys_of(others[id(run)], figure))
        for run in there:
            others[id(run)].curve = _columns(run.rows, figure) or others[id(run)].curve
        records += records_of(runs, asked, figure, said)
    elif len(folders) < len(given):
        problems.append(f"{', '.join(map(str, given))}: there is no run of that name")
    return records, problems, said


def _filters(given: str | None) -> dict[str, Any]:
    """Return what the server is to choose by: KEY=VALUE,... or JSON, as its API takes it."""
    try:
        if not given or given.lstrip().startswith("{"):
            return dict(json.loads(given or "{}"))
        return {k.strip(): parse_value(v) for k, v in (p.split("=") for p in given.split(","))}
    except ValueError:
        text = "is neither KEY=VALUE nor JSON; for example --filter config.lr=0.1,state=finished"
        raise ConfigError("wrong_type", f"--filter {given}: {text}") from None


def _other(run: WandbRun) -> OtherRun:
    """Return a run as wandb has it: its config, and its summary as one row."""
    config = {k: v for k, v in flatten(run.config).items() if not k.startswith(("run.", "_"))}
    last = _columns([flatten(run.summary)])
    path = Path(run.path if run.scan is None else f"{ONLINE}{run.path}")
    return OtherRun(run.name, config, state_of(run.state), last, path, config)


def _keys_of(run: OtherRun, figure: str) -> list[list[str]]:
    """Return what to ask of its rows: the figure with its places, or with wandb's own step."""
    axes = {axis_in(k): k for k in reversed(list(run.curve or ())) if not k.startswith("_")}
    named = [k for axis, k in axes.items() if axis]
    return [[figure, *named, "_step"], [figure, "_step"]]


def _columns(
    rows: Sequence[Mapping[str, Any]], figure: str | None = None
) -> Mapping[str, np.ndarray] | None:
    """Return rows by key, those that have the figure, as numbers; wandb's own step is last."""
    rows = [row for row in rows if figure is None or number(row.get(figure)) is not None]
    keys = dict.fromkeys(k for row in rows for k, v in row.items() if number(v) is not None)
    ordered = sorted((k for k in keys if k[0] != "_" or axis_in(k)), key=lambda k: k[0] == "_")
    if not rows or not keys:
        return None
    numbers = ([number(row.get(key)) for row in rows] for key in ordered)
    return {k: np.array(v, dtype=float) for k, v in zip(ordered, numbers, strict=True)}
