"""Read tables of runs that llmexp did not train: CSV, JSON lines, Parquet, data frames.

A wide table has a line a run, a long one a line for each look at a run.
"""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.strangers import Asked, OtherRun, axis_in, names_seed, of_figures, state_of
from llmexp.config.commands import how_to_install
from llmexp.config.kinds import kind_of_error
from llmexp.config.labels import parse_value
from llmexp.config.values import ConfigError, flatten
from llmexp.system.redact import clean
from llmexp.system.text import listed, number

_FILES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
Table = dict[str, list[Any]]  # plain values by column
_NAMES = ("run", "run_name", "run_id", "name", "id", "experiment", "index", "")
_STATES = ("state", "status")
_NOTHING = ("", "na", "n/a", "none", "null", "nan", "nat", "-")


def is_table(given: Any) -> bool:
    """Tell whether a path is that of a table, or a value is a data frame."""
    if isinstance(given, (str, Path)):
        path = Path(given)
        return path.suffix.lower() in _FILES and not path.is_dir() and path.name not in _OURS
    return hasattr(given, "columns")


_OURS = ("run.json", "status.json", "sweep.json", "metrics.jsonl")  # files of a run stand for it


def runs_of(given: Any, asked: Asked) -> list[OtherRun]:
    """Return the runs of a table. Raises ConfigError for one that cannot be read."""
    is_file = isinstance(given, (str, Path))
    where = str(given) if is_file else "the frame"
    table = read_table(Path(given)) if is_file else _of_frame(given)
    count = len(next(iter(table.values()), ()))
    if not count:
        raise ConfigError(
            "bad_data", f"{where}: has no line; a first line names the columns: lr,seed,val_loss"
        )
    curves = _curves(asked.curves) if asked.curves else {}
    named = next((k for name in _NAMES for k in table if k.strip().lower() == name), None)
    groups = _long(table, named, asked)
    if named is not None and not groups and len(set(table[named])) < count:
        named = None  # runs share it: it is a setting
    names = list(groups) or [f"line {i + 2}" for i in range(count)]
    if named is not None and not groups:
        names = list(map(str, table[named]))
    state = next((k for k in table if k.strip().lower() in _STATES), None)
    found = []
    for name, lines in zip(names, groups.values() or [[i] for i in range(count)], strict=True):
        first = {k: v[lines[0]] for k, v in table.items() if k not in (named, state)}
        curve = curves.pop(name, None)
        if groups:
            varies = {k for k in first if any(table[k][i] != first[k] for i in lines)}
            curve = {k: _numbers([table[k][i] for i in lines]) for k in first}
            first = {k: v for k, v in first.items() if k not in varies}
        ended = state_of(table[state][lines[-1]]) if state else ""
        path = Path(f"{where}:{name}") if is_file else Path(name)
        found.append(OtherRun(clean(name), first, ended, curve, path))
    if asked.curves and all(run.curve is None for run in found):
        text = f"its runs are {listed(list(curves), 5)}, those of {where} {listed(names, 5)}"
        raise ConfigError(
            "bad_data", f"--curves {asked.curves}: {text}; a column run must name both alike"
        )
    return found


def _long(table: Table, named: str | None, asked: Asked) -> dict[str, list[int]]:
    """Return the lines of each run of a long table; nothing for a table with a line a run.

    A run has several lines, of unlike steps or tokens, and one value of each setting and seed.
    """
    axes = [k for k in table if axis_in(k) and k not in asked.by]
    count = len(next(iter(table.values())))
    fixed = [k for k in table if k in (*asked.by, asked.seed) or (not asked.seed and names_seed(k))]
    keys = fixed
    if not asked.by:
        others = (k for k in table if k not in (*axes, *fixed, asked.figure) and not of_figures(k))
        keys = [*fixed, *(k for k in others if len(set(table[k])) <= count / 2)]
    for by in ([named], keys) if axes else ():
        groups: dict[str, list[int]] = {}
        for i in range(count):
            pairs = [f"{k}={table[k][i]}" for k in by if k is not None]
            name = str(table[named][i]) if by == [named] and named else " ".join(pairs)
            groups.setdefault(name or "the run", []).append(i)
        if len(groups) == count or (by == [named] and named is None):
            continue
        each = groups.values()
        told = all(len({table[axes[0]][i] for i in lines}) == len(lines) for lines in each)
        if told and all(len({table[k][i] for i in lines}) == 1 for lines in each for k in fixed):
            return groups
    return {}


def _curves(given: str | Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the curve of each run of a file with the columns run, step or tokens, and figures."""
    table = read_table(Path(given))
    named = next((k for name in _NAMES for k in table if k.strip().lower() == name), None)
    if named is None or not any(map(axis_in, table)):
        raise ConfigError(
            "bad_data",
            f"--curves {given}: needs a column run, and step or tokens; its columns are "
            f"{listed(list(table), 20)}; for example a first line run,step,val_loss",
        )
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(table[named]):
        groups.setdefault(str(name), []).append(i)
    columns = {k: _numbers(v) for k, v in table.items() if k != named}
    return {name: {k: v[lines] for k, v in columns.items()} for name, lines in groups.items()}


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """Return values as float64, NaN for what is no number."""
    return np.array([np.nan if (x := number(v)) is None else x for v in values], dtype=float)


def read_table(path: Path) -> Table:
    """Return a table in a file by column. Raises ConfigError for one that cannot be read."""
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            return _of_frame(_parquet(path))
        with open(path, newline="", encoding="utf-8-sig") as file:
            if kind in (".csv", ".tsv"):
                return _of_csv(path, file)
            text = file.read()
            whole = json.loads(text) if kind == ".json" else None
            lines = whole if isinstance(whole, list) else map(json.loads, text.splitlines())
            return _of_rows(path, list(lines))
    except OSError as error:
        raise ConfigError(
            kind_of_error(error), f"{path}: cannot be read: {error.strerror or error}"
        ) from None
    except (UnicodeDecodeError, ValueError, csv.Error) as error:
        if isinstance(error, ConfigError):
            raise
        example = {".csv": "a first line lr,seed,val_loss"}.get(kind, 'lines such as {"lr": 0.1}')
        raise ConfigError(
            "bad_data", f"{path}: is no table in UTF-8 ({clean(error)[:200]}); {example}"
        ) from None


def _of_csv(path: Path, file: Any) -> Table:
    first = file.readline()
    file.seek(0)
    sign = max(",;\t", key=first.count)
    lines = [line for line in csv.reader(file, delimiter=sign, skipinitialspace=True) if line]
    heads, *rest = lines or [[]]
    heads = [head.strip() for head in heads]
    if twice := [h for h in heads if heads.count(h) > 1]:
        raise ConfigError("bad_data", f"{path}: has the column {twice[0]!r} twice; leave one out")
    for i, line in enumerate(rest, 2):
        if len(line) != len(heads):
            text = f"has {len(line)} values, and there are {len(heads)} columns"
            raise ConfigError(
                "bad_data", f"{path}: line {i}: {text}; a decimal sign is a point: 2.9"
            )
    return {h: list(map(_plain, values)) for h, *values in zip(heads, *rest, strict=True)}


def _of_rows(path: Path, rows: Sequence[Any]) -> Table:
    flat: list[dict[str, Any]] = []
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError(
                "bad_data", f'{path}: line {i}: is no object; for example {{"lr": 0.1}}'
            )
        flat.append(flatten(row))
    return {
        k: [_plain(row.get(k)) for row in flat] for k in dict.fromkeys(k for r in flat for k in r)
    }


def _parquet(path: Path) -> Any:
    """Return a Parquet file as pyarrow, else polars, has it."""
    for name, read in (("pyarrow.parquet", "read_table"), ("polars", "read_parquet")):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        try:
            return getattr(module, read)(path)
        except Exception as error:  # those of either package
            if isinstance(error, OSError):
                raise
            text = f"is no Parquet file ({clean(error)[:200]})"
            raise ConfigError("damaged_file", f"{path}: {text}") from None
    text = "a Parquet file needs the package pyarrow or polars, and neither is installed"
    raise ConfigError("missing_package", f"{path}: {text}; {how_to_install('pyarrow')}")


def _of_frame(frame: Any) -> Table:
    """Return a data frame of pandas or polars, or a table of Arrow, by column."""
    if hasattr(frame, "to_pydict"):
        found = frame.to_pydict()
    elif hasattr(frame, "iter_columns"):
        found = frame.to_dict(as_series=False)
    else:
        found = {k: frame[k].tolist() for k in frame.columns}
    nested = [k for k, v in found.items() if any(isinstance(x, Mapping) for x in v)]
    if nested:
        rows = [dict(zip(found, line, strict=True)) for line in zip(*found.values(), strict=True)]
        return _of_rows(Path("the frame"), rows)
    return {str(k): list(map(_plain, v)) for k, v in found.items()}


def _plain(value: Any) -> Any:
    """Return a value as a setting or a figure: a number, a truth, a text, None for nothing."""
    if isinstance(value, str):
        text = value.strip()
        value = None if text.lower() in _NOTHING else parse_value(text)
    if value is None or isinstance(value, (str, bool, int, float)):
        return None if value != value else value  # NaN
    if hasattr(value, "item"):
        return _plain(value.item())
    text = str(value)
    return None if text.lower() in _NOTHING else clean(re.sub(r"\s+", " ", text))[:400]
