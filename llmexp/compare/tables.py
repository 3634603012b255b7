"""Read tables of runs that llmexp did not train: CSV, JSON lines, Parquet, data frames.

A wide table has a line a run, a long one a line for each look at a run.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmexp.compare.strangers import (
    RUN_NAMES,
    Asked,
    OtherRun,
    Row,
    axis_in,
    names_seed,
    of_figures,
    said_by,
    state_of,
)
from llmexp.config.commands import how_to_install
from llmexp.config.kinds import kind_of_error
from llmexp.config.labels import parse_value
from llmexp.config.values import ConfigError, flatten
from llmexp.folders.find import FILES
from llmexp.system.fileio import open_plain
from llmexp.system.redact import clean
from llmexp.system.text import listed, number

_FILES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
_NOT_FINITE = re.compile(r"[+-]?(nan|inf(inity)?)", re.I)
_NOTHING = ("", "na", "n/a", "<na>", "none", "null", "nan", "nat", "-")


def is_table(given: Any) -> bool:
    """Tell whether a path is that of a table, or a value is a data frame."""
    if isinstance(given, Path):  # files of a run stand for it
        return given.suffix.lower() in _FILES and given.name not in FILES and not given.is_dir()
    return hasattr(type(given), "columns")


def runs_of(given: Any, asked: Asked) -> list[OtherRun]:
    """Return the runs of a table. Raises ConfigError for one that cannot be read."""
    where, rows = given if isinstance(given, Path) else "the frame", _rows(given, asked.figure)
    keys = next(iter(rows.values()))
    named, state = (
        next((k for name in names for k in keys if k.lower() == name), None)
        for names in (RUN_NAMES, ("state", "status"))
    )
    groups = _groups(rows, named, asked)
    if len({one[0].get(named) for one in groups.values()}) < len(groups):
        named = None  # runs share it: it is a setting
    found = []
    for name, one in groups.items():
        ended = state_of(one[-1].get(state))
        looks = [{k: v for k, v in row.items() if k not in (named, state)} for row in one]
        values = {k: v for k, v in looks[-1].items() if all(row[k] == v for row in looks)}
        values |= {named: one[0][named]} if named is not None else {}
        path = Path(f"{where}:{name}")
        if not name:  # the log of one run
            path, name = Path(where), Path(where).stem
            values |= said_by(path.with_suffix(""))
        found.append(OtherRun(clean(name), values, ended, looks, path))
    if asked.curves:
        of_curves = runs_of(Path(asked.curves), Asked(figure=asked.figure))
        curves = {run.name: run.rows for run in of_curves}
        if curves.keys().isdisjoint(run.name for run in found):
            text = f"its runs are {listed([*curves], 5)}, those of {where} {listed([*groups], 5)}; "
            text += "both need a column run that names them alike"
            raise ConfigError("bad_data", f"--curves {asked.curves}: {text}")
        for run in found:
            run.rows = curves.get(run.name, run.rows)
    return found


def _groups(rows: dict[int, Row], named: str | None, asked: Asked) -> dict[str, list[Row]]:
    """Return the rows of each run by its name: one, or several of a long table.

    These are of unlike steps or tokens, but for what was logged twice, and of one value of each
    setting and seed. Raises ConfigError for rows of one run or of several.
    """
    several = {k: {row[k] for row in rows.values()} for k in next(iter(rows.values()))}
    axis = next((k for k in several if axis_in(k) and k not in asked.by), None)
    seeds = [asked.seed] if asked.seed else [*filter(names_seed, several)]
    own = fixed = [k for k in several if k in (*asked.by, *seeds)]
    others = [k for k in several if not (k == asked.figure or axis_in(k) or of_figures(k))]
    if not asked.by:
        few = {k for k in others if len(several[k]) <= len(rows) / 2}
        own = [k for k in several if k in few or k in fixed]
    for by in [[named]] * (named is not None) + [own] * (not asked.ends):
        groups = defaultdict[str, list[Row]](list)
        for row in rows.values():
            pairs = (f"{k}=" * (by is own) + str(row[k]) for k in by)
            groups[" ".join(pairs)].append(row)
        if (by is own and len(groups) == len(rows)) or not all(
            len(one) == 1 or 2 * len({row.get(axis) for row in one}) > len(one)
            for one in groups.values()
        ):
            continue
        moved = {k for one in groups.values() for row in one for k in fixed if row[k] != one[0][k]}
        if bad := moved & {*asked.by}:
            text = "has several values in one run; a setting has one, in a column of its own"
            raise ConfigError("bad_data", f"--by {bad.pop()}: {text}")
        if not moved:
            guess = by is own and not fixed
            if guess and any(len(several[k]) > 1 for k in others):
                text = f"does each line hold a run, or one {axis} of a run? Name the runs in a "
                raise ConfigError(
                    "missing_value", f"{text}column run, or settings: --by {others[0]}"
                )
            return groups
    return {f"line {i}": [row] for i, row in rows.items()}


def _rows(given: Any, figure: str | None) -> dict[int, Row]:
    """Return the lines of a table by number, all with the same keys.

    Raises ConfigError for what is no table.
    """
    where = given if isinstance(given, Path) else "the frame"
    try:
        lines = _lines(given) if isinstance(given, Path) else _of_frame(given)
    except OSError as error:
        text = f"{where}: cannot be read: {error.strerror or error}"
        raise ConfigError(kind_of_error(error), text) from None
    except ConfigError as error:
        raise ConfigError(error.kind, f"{where}: {error}") from None
    except Exception as error:  # those of packages, too
        text = f"{where}: is not a table in UTF-8 ({clean(error)[:200]}); a first line of CSV is "
        raise ConfigError("damaged_file", f"{text}lr,seed,val_loss") from None
    flat = {}
    for i, line in ((i, line) for i, line in enumerate(lines, 1) if line is not None):
        if not isinstance(line, Mapping):
            text = f'line {i}: is not an object; for example {{"lr": 0.1}}'
            raise ConfigError("bad_data", f"{where}: {text}")
        named = ((clean(k), v) for k, v in flatten(line).items())
        flat[i] = {k: _plain(v, k == figure or of_figures(k)) for k, v in named}
    if not (keys := dict.fromkeys(k for row in flat.values() for k in row)):
        text = "has no line; a first line names the columns: lr,seed,val_loss"
        raise ConfigError("bad_data", f"{where}: {text}")
    for key in filter(axis_in, keys):
        texts = [i for i, row in flat.items() if isinstance(row.get(key), str)]
        if texts and any(number(row.get(key)) is not None for row in flat.values()):
            text = f"line {texts[0]}: {key} is {flat[texts[0]][key]!r}, a number elsewhere"
            raise ConfigError("bad_data", f"{where}: {text}; mend it, or take the line out")
    return {i: {k: row.get(k) for k in keys} for i, row in flat.items()}


def _lines(path: Path) -> list[Any]:
    """Return the lines of a file, each by column; None for those that hold none."""
    kind = path.suffix.lower()
    with open_plain(path) as file:  # a pipe has no end
        data = file.read()
    if kind == ".parquet":
        for name, read in (("pyarrow.parquet", "read_table"), ("polars", "read_parquet")):
            with suppress(ImportError):
                return _of_frame(getattr(importlib.import_module(name), read)(io.BytesIO(data)))
        text = "a Parquet file needs the package pyarrow or polars, and neither is installed"
        raise ConfigError("missing_package", f"{text}; {how_to_install('pyarrow')}")
    text = data.decode("utf-8-sig").lstrip("\r\n")
    if kind in (".csv", ".tsv"):
        sign = max(",;\t", key=text.partition("\n")[0].count)
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=sign, skipinitialspace=True)
        return _of_lines([*lines])
    if kind == ".json" and isinstance(whole := json.loads(text, parse_constant=str), list):
        return whole
    return [_from_line(i, line) for i, line in enumerate(text.splitlines(), 1)]


def _from_line(place: int, line: str) -> Any:
    """Return the value of a line of JSON; None of an empty one. Raises ConfigError."""
    try:
        return json.loads(line, parse_constant=str) if line.strip() else None
    except (ValueError, RecursionError) as error:
        text = f"line {place}: is no JSON ({clean(error)}); an object is needed, such as "
        raise ConfigError("damaged_file", text + '{"lr": 0.1}') from None


def _of_lines(lines: list[list[str]]) -> list[Any]:
    """Return the lines below the names of the columns, each by column."""
    heads = [head.strip() for head in next(iter(lines), [])]
    _once(heads)
    for i, line in enumerate(lines, 1):
        if line and len(line) != len(heads):
            text = f"has {len(line)} values, and there are {len(heads)} columns"
            raise ConfigError("bad_data", f"line {i}: {text}; a decimal sign is a point: 2.9")
    return [dict(zip(heads, x, strict=True)) if x and i else None for i, x in enumerate(lines)]


def _once(heads: list[Any]) -> None:
    if twice := [h for h in heads if heads.count(h) > 1]:
        raise ConfigError("bad_data", f"has the column {twice[0]!r} twice; leave one out")


def _of_frame(frame: Any) -> list[Any]:
    """Return the lines of a data frame of polars or pandas, or a table of Arrow, by column."""
    if hasattr(type(frame), "collect"):  # a LazyFrame of polars
        frame = frame.collect()
    for name in ("to_dicts", "to_pylist"):
        if hasattr(type(frame), name):  # not a column of this name
            return list(getattr(frame, name)())
    _once(list(frame.columns))
    return list(frame.to_dict("records"))


def _plain(value: Any, figure: bool) -> Any:
    """Return a value as a setting or a figure: a number, a truth, a text, None for nothing.

    The nan of a file is one of a figure; that of a data frame stands for nothing.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return None if value != value else value  # NaN
    text = " ".join(str(value).split())
    if figure and (bad := _NOT_FINITE.fullmatch(text)):
        return float(bad[0])
    found = None if text.lower() in _NOTHING else parse_value(text)
    return text if isinstance(found, str) else found  # its quotes and \ are its own
