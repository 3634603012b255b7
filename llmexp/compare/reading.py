"""Paths in, runs out. Nothing that a folder holds is trusted; what cannot be read is said and
passed over."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import math
import multiprocessing
import os
import re
import reprlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from llmexp import ending, rundir
from llmexp.compare.figures import number
from llmexp.compare.records import Record
from llmexp.compare.rows import Columns
from llmexp.config import ConfigError
from llmexp.redact import clean
from llmexp.rundir import ends_early

LEDGER, LEDGER_FORMAT = "sweep.json", 1
STATES = ("queued", "running", "finished", "failed", "preempted")
DEPTH = 4  # outputs/<name>/<stamp>/<number>-<label>
_FILES = (rundir.CONFIG, rundir.RUN, rundir.STATUS, rundir.METRICS, rundir.LOG, LEDGER)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast
_LARGE = 200 * 2**20  # bytes of rows from which a second process is worth its start


@dataclass(frozen=True)
class Sweep:
    """The ledger of a sweep, as far as it is legible."""

    path: Path
    swept: tuple[str, ...] = ()
    points: dict[str, dict[str, Any]] = field(default_factory=dict)  # by folder
    negligible: float | None = None  # nats below which a difference does not matter
    # points still to train by setting, less the seed
    planned: dict[frozenset[str], int] = field(default_factory=dict)


def clean_name(path: Path) -> str:
    return clean(path.name) or clean(path.resolve().name) or "run"


def looks_like_run(path: Path) -> bool:
    """Return a config or rows, and a record beside them: a config.yaml alone may be anybody's."""
    first, *rest = (
        (rundir.CONFIG, rundir.METRICS) if (path / rundir.CONFIG).is_file() else (rundir.METRICS,)
    )
    return (path / first).is_file() and any(
        (path / n).is_file() for n in (rundir.STATUS, rundir.RUN, *rest)
    )


def find(paths: Sequence[str | Path]) -> tuple[list[tuple[Path, Sweep | None]], list[str]]:
    """Return the run folders under paths and globs, each once, in the order given; and a line for
    what held none."""
    found: dict[Path, tuple[Path, Sweep | None]] = {}
    problems: list[str] = []
    sweeps: dict[Path, Sweep | None] = {}
    for given in paths:
        path = Path(given)
        matches = (
            [path]
            if os.path.lexists(path)
            else [Path(p) for p in sorted(glob.glob(str(given), recursive=True))]
        )
        if not matches:
            problems.append(
                f"{clean(given)}: there is nothing of that name; a run looks like "
                "outputs/default/..."
            )
        runs = 0
        for match in matches:
            where = match.parent if match.name in _FILES and match.is_file() else match
            for run in _under(where, DEPTH):
                runs += 1
                try:
                    rundir.check_plain(run)
                except ConfigError as error:
                    problems.append(f"{clean(error)}; this run is left out")
                    continue
                parent = run.resolve().parent
                if parent not in sweeps:
                    sweeps[parent] = _sweep(run.parent, problems)
                found.setdefault(run.resolve(), (run, sweeps[parent]))
        if matches and not runs:
            shown = clean(given) or "."
            problems.append(
                f"{shown}: is no run, and there is none below (a run folder has a {rundir.CONFIG})"
            )
    return list(found.values()), problems


def _under(path: Path, depth: int) -> list[Path]:
    """Return the folder itself where it is a run, else the runs below it; a sweep's points by their
    number."""
    if looks_like_run(path):
        return [path]
    try:
        inner = [p for p in path.iterdir() if depth and not p.name.startswith(".") and p.is_dir()]
    except OSError:
        return []
    inner = [
        p for p in inner if p.name != rundir.CHECKPOINTS and not (depth < DEPTH and p.is_symlink())
    ]
    return [run for p in sorted(inner, key=_natural) for run in _under(p, depth - 1)]


def _natural(path: Path) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d{1,18})", path.name)
    return [(0, int(p), "") if p.isdecimal() and p.isascii() else (1, 0, p) for p in parts if p]


def _sweep(path: Path, problems: list[str]) -> Sweep | None:
    """Return the sweep whose folder this is; None where it is none."""
    where = path / LEDGER
    if not where.is_file():
        return Sweep(path) if (path / "multirun.yaml").is_file() else None
    tree = _json(where, problems)
    known = tree.get("format")
    if tree and known != LEDGER_FORMAT:
        problems.append(
            f"{where}: has format {clean(known)}, known is {LEDGER_FORMAT}; the runs speak for "
            "themselves"
        )
        return Sweep(path)
    points, swept = tree.get("points"), tree.get("swept")
    if tree and not (isinstance(points, list) and isinstance(swept, list)):
        problems.append(f"{where}: is damaged (no points or swept); the runs speak for themselves")
    points = [p for p in points if isinstance(p, dict)] if isinstance(points, list) else []
    refused = [p for p in points if p.get("state") == "infeasible"]
    for p in refused[:10]:
        problems.append(
            f"{where}: {clean(p.get('label'))} could not run: {clean(p.get('error'))[:200]}"
        )
    keys = tuple(k for k in swept if isinstance(k, str)) if isinstance(swept, list) else ()
    by_folder = {p["folder"]: p for p in points if isinstance(p.get("folder"), str)}
    planned = Counter(setting for p in points if (setting := _setting(p)) and _is_to_train(path, p))
    return Sweep(path, keys, by_folder, number(tree.get("negligible")), planned)


def _setting(point: dict[str, Any]) -> frozenset[str]:
    """Return the overrides of a sweep's point less its seed; empty where they are not known."""
    overrides = point.get("overrides")
    overrides = [o for o in overrides if isinstance(o, str)] if isinstance(overrides, list) else []
    return frozenset(o for o in overrides if not o.startswith("train.seed="))


def _is_to_train(sweep: Path, point: dict[str, Any]) -> bool:
    """Tell whether resuming the sweep would train the point, by its run where the ledger is
    behind."""
    if (
        point.get("state") not in ("queued", "running", "preempted")
        or point.get("rung") is not None
    ):
        return False
    return read_status(sweep / str(point.get("folder"))).get("state") not in ("finished", "failed")


def read(found: Sequence[tuple[Path, Sweep | None]], whole: bool = False) -> list[Record]:
    """Return the runs as records, with names that are unique. `whole`: all their columns will be
    needed."""
    records = [
        _record(path, sweep, columns)
        for (path, sweep), columns in zip(found, _columns(found, whole), strict=True)
    ]
    for levels in (1, 2, 20):  # of parent folders in front
        names = [r.name for r in records]
        twice = {name for name in names if names.count(name) > 1}
        records = [_named(r, levels) if r.name in twice else r for r in records]
    seen: dict[str, int] = {}
    for i, r in enumerate(records):
        seen[r.name] = seen.get(r.name, 0) + 1
        if seen[r.name] > 1:
            records[i] = dataclasses.replace(r, name=f"{r.name} ({seen[r.name]})")
    return records


def _named(record: Record, levels: int) -> Record:
    parts = record.path.resolve().parts[-levels - 1 :]
    return dataclasses.replace(record, name=clean("/".join(parts)))


def _columns(found: Sequence[tuple[Path, Sweep | None]], whole: bool) -> list[Columns]:
    paths = [path / rundir.METRICS for path, _ in found]
    size = sum(p.stat().st_size for p in paths if p.is_file())
    processes = min(
        4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if size > _LARGE and processes > 1:
        with contextlib.suppress(BrokenProcessPool, OSError):
            with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
                return list(pool.map(_whole if whole else Columns, paths, chunksize=4))
    return [Columns(path) for path in paths]


def _whole(path: Path) -> Columns:
    return Columns(path).load()


def _record(path: Path, sweep: Sweep | None, columns: Columns) -> Record:
    problems = list(columns.problems)
    facts = _json(path / rundir.RUN, problems)
    status = _json(path / rundir.STATUS, problems)
    point = sweep.points.get(os.path.relpath(path, sweep.path), {}) if sweep else {}
    rung = point.get("rung")
    config = _config(path / rundir.CONFIG, problems)
    if lost := ends_early(status, facts, config.get("train.log_every"), columns["step"]):
        problems.append(f"{path / rundir.METRICS}: the run {lost}; it is not compared")
    return Record(
        path=path,
        name=clean_name(path),
        sweep=sweep.path if sweep else None,
        state=state_of(path, status),
        config=config,
        facts=facts,
        status=status,
        columns=columns,
        problems=tuple(clean(p) for p in problems),
        swept=sweep.swept if sweep else (),
        negligible=sweep.negligible if sweep else None,
        rung=float(rung) if isinstance(rung, (int, float)) and math.isfinite(rung) else None,
        planned=sweep.planned.get(_setting(point), 0) if sweep else 0,
        lost=lost,
    )


def state_of(path: Path, status: dict[str, Any]) -> str:
    """Return the state by status.json, but `cut` for a running one whose lock nobody holds, also
    after that was mended there; queued where nothing is said."""
    state = "cut" if status.get("error") == ending.CUT else ending.state_now(path, status)
    if state == "cut" or state in STATES:
        return state
    return "cut" if (path / rundir.METRICS).exists() else "queued"  # a status that was lost


def read_status(path: Path) -> dict[str, Any]:
    return _json(path / rundir.STATUS, [])


def read_facts(path: Path) -> dict[str, Any]:
    return _json(path / rundir.RUN, [])


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return an object of a JSON file with its texts cleaned; empty, and said, where there is
    none."""
    try:
        tree = _cleaned(json.loads(path.read_bytes().decode()))
    except FileNotFoundError:
        problems.append(f"{path}: is missing")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path}: cannot be read: {clean(error)[:120]}")
        return {}
    if not isinstance(tree, dict):
        problems.append(f"{path}: holds no object")
        return {}
    return tree


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(v) for v in value]
    return {clean(k): _cleaned(v) for k, v in value.items()} if isinstance(value, dict) else value


def _config(path: Path, problems: list[str]) -> dict[str, Any]:
    """config.yaml with dotted keys; empty, and said, where there is none."""
    try:
        # a safe loader: plain values only
        tree = yaml.load(path.read_bytes().decode(), Loader=_LOADER)
    except FileNotFoundError:
        problems.append(f"{path}: is missing")
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problems.append(f"{path}: cannot be read: {clean(error)[:120]}")
        return {}
    if not isinstance(tree, dict):
        problems.append(f"{path}: holds no config")
        return {}
    flat: dict[str, Any] = {}
    if not _flatten(tree, "", flat, 0):
        problems.append(
            f"{path}: is deeper or longer than a config is; what could be read is shown"
        )
    return flat


def _flatten(tree: dict[Any, Any], prefix: str, flat: dict[str, Any], depth: int) -> bool:
    """Into `flat`; whether it all fitted. Aliases can make a short YAML file endless."""
    whole = True
    for key, value in tree.items():
        name = f"{prefix}{clean(key)}"[:200]
        if len(flat) >= 5000 or depth > 20:
            return False
        if isinstance(value, dict) and value:
            whole &= _flatten(value, name + ".", flat, depth + 1)
        elif isinstance(value, (bool, int, float, type(None))):
            flat[name] = (
                value if not isinstance(value, int) or abs(value) < 10**18 else reprlib.repr(value)
            )
        elif (
            isinstance(value, list)
            and len(value) <= 50
            and all(isinstance(v, (str, int, float)) for v in value)
        ):
            flat[name] = [clean(v) if isinstance(v, str) else v for v in value]
        else:
            flat[name] = (
                clean(value)[:400] if isinstance(value, str) else clean(reprlib.repr(value))
            )
    return whole
