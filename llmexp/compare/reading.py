"""Paths in, runs out. Nothing that a folder holds is trusted; what cannot be read is reported and
passed over."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from llmexp.compare.records import Record, as_dict, number
from llmexp.compare.rows import Columns
from llmexp.runs import ending, rundir
from llmexp.runs.naming import LEDGER, LINEAGE, runs_meant, with_changes
from llmexp.runs.rundir import ends_early
from llmexp.settings.convert import today
from llmexp.settings.knobs import default_of
from llmexp.settings.values import ConfigError
from llmexp.system.redact import clean

LEDGER_FORMAT = 1
STATES = ("queued", "running", "finished", "failed", "preempted")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast
_LARGE = 200 * 2**20  # bytes of rows from which a second process is worth its start
_KEYS = 5000  # of a config at most


@dataclass(frozen=True)
class Sweep:
    """The ledger of a sweep, as far as it is legible."""

    path: Path | None = None
    swept: tuple[str, ...] = ()
    points: dict[str, dict[str, Any]] = field(default_factory=dict)  # by folder
    negligible: float | None = None  # nats below which a difference does not matter
    # points still to train by setting, less the seed
    planned: dict[frozenset[str], int] = field(default_factory=dict)
    left: int = 0  # all points still to train


def clean_name(path: Path) -> str:
    return clean(path.name) or clean(path.resolve().name) or "run"


def find(paths: Sequence[str | Path]) -> tuple[list[tuple[Path, Sweep]], list[str]]:
    """Return the run folders under paths and globs, each once, in the order given; and a line for
    what held none."""
    found: dict[Path, tuple[Path, Sweep]] = {}
    problems: list[str] = []
    sweeps: dict[Path, Sweep] = {}
    for given in paths:
        runs, why = runs_meant(given)
        if not runs:
            problems.append(f"{clean(given) or '.'}: {why}")
        for run in runs:
            try:
                rundir.check_plain(run)
            except ConfigError as error:
                problems.append(f"{clean(error)}; this run is left out")
                continue
            parent = run.resolve().parent
            if parent not in sweeps:
                sweeps[parent] = _sweep(run.parent, problems)
            found.setdefault(run.resolve(), (run, sweeps[parent]))
    return list(found.values()), problems


def _sweep(path: Path, problems: list[str]) -> Sweep:
    """Return the sweep whose folder this is; one without a path where it is none."""
    where = path / LEDGER
    if not where.is_file():
        return Sweep(path if (path / "multirun.yaml").is_file() else None)
    tree = _cleaned(with_changes(read_file(where, problems), path))
    points, swept, form = (tree.get(key) for key in ("points", "swept", "format"))
    if form != LEDGER_FORMAT or not isinstance(points, list) or not isinstance(swept, list):
        if tree:
            known = f"is damaged or newer (format {clean(form)}, known is {LEDGER_FORMAT})"
            problems.append(f"{where}: {known}; the runs speak for themselves")
        return Sweep(path)
    points = [point for point in points if isinstance(point, dict)]
    refused = [p for p in points if p.get("state") == "infeasible"]
    for p in refused[:10]:
        label, error = clean(p.get("label")), clean(p.get("error"))[:200]
        problems.append(f"{where}: {label} could not run: {error}")
    planned = Counter(_setting(p) for p in points if _is_to_train(path, p))
    left = planned.total()
    planned.pop(frozenset(), None)
    by_folder = {str(p.get("folder")): p for p in points}
    negligible = number(tree.get("negligible"))
    return Sweep(path, tuple(map(str, swept)), by_folder, negligible, planned, left)


def _setting(point: dict[str, Any]) -> frozenset[str]:
    """Return the overrides of a sweep's point less its seed; empty where they are not known."""
    overrides = point.get("overrides")
    known = map(str, overrides if isinstance(overrides, list) else ())
    return frozenset(o for o in known if not o.startswith("train.seed="))


def _is_to_train(sweep: Path, point: dict[str, Any]) -> bool:
    """Tell whether resuming the sweep would train the point, by its run where the ledger is
    behind."""
    if point.get("state") not in ("queued", "running", "preempted"):
        return False
    state = read_file(sweep / str(point.get("folder")) / rundir.STATUS).get("state")
    return point.get("rung") is None and state not in ("finished", "failed")


def read(found: Sequence[tuple[Path, Sweep]], whole: bool = False) -> list[Record]:
    """Return the runs as records, with names that are unique. `whole`: all their columns will be
    needed."""
    columns = _columns([path / rundir.METRICS for path, _ in found], whole)
    records = [_record(path, sweep, c) for (path, sweep), c in zip(found, columns, strict=True)]
    for levels in (1, 2, 20):  # of parent folders in front
        tally = Counter(r.name for r in records)
        records = [_named(r, levels) if tally[r.name] > 1 else r for r in records]
    return records


def _named(record: Record, levels: int) -> Record:
    parts = record.path.resolve().parts[-levels - 1 :]
    return dataclasses.replace(record, name=clean("/".join(parts)))


def _columns(paths: Sequence[Path], whole: bool) -> list[Columns]:
    size = sum(p.stat().st_size for p in paths if p.is_file())
    if size > _LARGE:
        with contextlib.suppress(BrokenProcessPool, OSError):
            processes = min(4, os.cpu_count() or 1)
            with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
                return list(pool.map(partial(Columns, whole=whole), paths, chunksize=4))
    return [Columns(path) for path in paths]


def _record(path: Path, sweep: Sweep, columns: Columns) -> Record:
    problems = list(columns.problems)
    facts = read_file(path / rundir.RUN, problems)
    status = read_file(path / rundir.STATUS, problems)
    config = _config(path / rundir.CONFIG, problems)
    if str(config.get("model._target_")).endswith(".GPT2"):
        config.setdefault("model.gelu", default_of("model.gelu"))  # a run of before this key
    if lost := ends_early(status, facts, config.get("train.log_every"), columns["step"]):
        problems.append(f"{path / rundir.METRICS}: the run {lost}; it is not compared")
    point = sweep.points.get(path.name, {})
    return Record(
        path=path,
        name=clean_name(path),
        sweep=sweep.path,
        state=state_of(path, status),
        config=config,
        facts=facts,
        status=status,
        columns=columns,
        problems=tuple(clean(p) for p in problems),
        swept=sweep.swept,
        negligible=sweep.negligible,
        rung=number(point.get("rung")),
        planned=sweep.planned.get(_setting(point), 0),
        left=sweep.left,
        lost=lost,
        last=columns.last,
        before=Columns(path / LINEAGE) if as_dict(facts.get("parent")) else {},
    )


def state_of(path: Path, status: dict[str, Any]) -> str:
    """Return the state by status.json, but `cut` for a running one whose lock nobody holds, also
    after that was mended there; queued where nothing is recorded."""
    state = (
        "cut" if str(status.get("error")).startswith("cut: ") else ending.state_now(path, status)
    )
    if state == "cut" or state in STATES:
        return state
    return "cut" if (path / rundir.METRICS).exists() else "queued"  # a status that was lost


def _load(path: Path, parse: Callable[[str], Any], problems: list[str]) -> dict[Any, Any]:
    """Return the object that a file holds; empty, with a line in `problems`, where there is
    none."""
    try:
        tree = parse(path.read_bytes().decode())
        if isinstance(tree, dict):
            return tree
        problem = "holds no object"
    except FileNotFoundError:
        problem = "is missing"
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problem = f"cannot be read: {clean(error)[:120]}"
    problems.append(f"{path}: {problem}")
    return {}


def read_file(path: Path, problems: list[str] | None = None) -> dict[str, Any]:
    """Return a JSON file of a run as an object with its texts cleaned, empty where there is
    none."""
    problems = [] if problems is None else problems
    return _load(path, lambda text: _cleaned(json.loads(text)), problems)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(v) for v in value]
    return {clean(k): _cleaned(v) for k, v in value.items()} if isinstance(value, dict) else value


def _config(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return config.yaml with dotted keys."""
    # a safe loader: plain values only
    tree = _load(path, lambda text: yaml.load(text, Loader=_LOADER), problems)
    flat: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", tree)]
    for _ in range(_KEYS):  # at most: aliases can make a short YAML file endless
        if not waiting:
            return flat
        name, value = waiting.pop()
        if isinstance(value, dict) and (value or not name):
            inner = [(f"{name}.{clean(k)}"[:200].lstrip("."), v) for k, v in value.items()]
            waiting += reversed(inner)
        else:
            flat[name] = today(_leaf(value)) if name.endswith("_target_") else _leaf(value)
    problems.append(f"{path}: is deeper or longer than a config is; what could be read is shown")
    return flat


def _leaf(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)[:400]
    if isinstance(value, list) and len(value) <= 50:
        if all(isinstance(v, (str, int, float)) for v in value):
            return _cleaned(value)
    elif isinstance(value, (float, type(None))) or (isinstance(value, int) and abs(value) < 10**18):
        return value
    return clean(reprlib.repr(value))
