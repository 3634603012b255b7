"""Read tables of runs that llmexp did not train: CSV, JSON lines, Parquet, data frames.

A wide table has a line a run, a long one a line for each look at a run.
"""

from __future__ import annotations

import csv
import importlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmexp.compare.strangers import Asked, OtherRun, Row, axis_in, names_seed, of_figures, state_of
from llmexp.config.commands import how_to_install
from llmexp.config.kinds import kind_of_error
from llmexp.config.labels import parse_value
from llmexp.config.values import ConfigError, flatten
from llmexp.folders.find import FILES
from llmexp.system.redact import clean
from llmexp.system.text import listed

_FILES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
_NAMES = ("run", "run_name", "run_id", "name", "id", "experiment", "index", "")
_NOTHING = ("", "na", "n/a", "<na>", "none", "null", "nan", "nat", "-")


def is_table(given: Any) -> bool:
    """Tell whether a path is that of a table, or a value is a data frame."""
    if isinstance(given, Path):  # files of a run stand for it
        return given.suffix.lower() in _FILES and given.name not in FILES and not given.is_dir()
    return hasattr(given, "columns")


def runs_of(given: Any, asked: Asked) -> list[OtherRun]:
    """Return the runs of a table. Raises ConfigError for one that cannot be read."""
    where, rows = given if isinstance(given, Path) else "the frame", _rows(given)
    named, state = (
        next((k for name in names for k in rows[0] if k.lower() == name), None)
        for names in (_NAMES, ("state", "status"))
    )
    groups = _groups(rows, named, asked)
    if len({one[0].get(named) for one in groups.values()}) < len(groups):
        named = None  # runs share it: it is a setting
    found = []
    for name, one in groups.items():
        ended = state_of(one[-1].get(state))
        looks = [{k: v for k, v in row.items() if k not in (named, state)} for row in one]
        values = {k: v for k, v in looks[-1].items() if all(row[k] == v for row in looks)}
        found.append(OtherRun(clean(name), values, ended, looks, Path(f"{where}:{name}")))
    if asked.curves:
        curves = {run.name: run.rows for run in runs_of(Path(asked.curves), Asked())}
        if curves.keys().isdisjoint(run.name for run in found):
            text = f"its runs are {listed([*curves], 5)}, those of {where} {listed([*groups], 5)}; "
            text += "both need a column run that names them alike"
            raise ConfigError("bad_data", f"--curves {asked.curves}: {text}")
        for run in found:
            run.rows = curves.get(run.name, run.rows)
    return found


def _groups(rows: Sequence[Row], named: str | None, asked: Asked) -> dict[str, list[Row]]:
    """Return the rows of each run by its name: one, or several of a long table.

    These are of unlike steps or tokens, but for what was logged twice, and of one value of each
    setting and seed. Raises ConfigError for rows of one run or of several.
    """
    axis = next((k for k in rows[0] if axis_in(k) and k not in asked.by), None)
    seed = asked.seed or next(filter(names_seed, rows[0]), None)
    own = fixed = [k for k in rows[0] if k in (*asked.by, seed)]
    others = [k for k in rows[0] if not (k == asked.figure or axis_in(k) or of_figures(k))]
    if not asked.by:
        few = {k for k in others if len({row[k] for row in rows}) <= len(rows) / 2}
        own = [k for k in rows[0] if k in few or k in fixed]
    for by in (own,) if named is None else ([named], own):
        groups = defaultdict[str, list[Row]](list)
        for row in rows:
            pairs = (f"{k}=" * (by is own) + str(row[k]) for k in by)
            groups[" ".join(pairs)].append(row)
        if (by != own or len(groups) < len(rows)) and all(
            (len(one) == 1 or 2 * len({row.get(axis) for row in one}) > len(one))
            and all(row[k] == one[0][k] for row in one for k in fixed)
            for one in groups.values()
        ):
            if not by and any(row[k] != rows[0][k] for row in rows for k in others):
                text = f"does each line hold a run, or one {axis} of a run? Name the runs in a "
                raise ConfigError(
                    "missing_value", f"{text}column run, or settings: --by {others[0]}"
                )
            return groups
    return {f"line {i}": [row] for i, row in enumerate(rows, 2)}


def _rows(given: Any) -> list[Row]:
    """Return the lines of a table, all with the same keys. Raises ConfigError for what is none."""
    where = given if isinstance(given, Path) else "the frame"
    try:
        lines = _lines(given) if isinstance(given, Path) else _of_frame(given)
    except OSError as error:
        text = f"{where}: cannot be read: {error.strerror or error}"
        raise ConfigError(kind_of_error(error), text) from None
    except ConfigError as error:
        raise ConfigError(error.kind, f"{where}: {error}") from None
    except Exception as error:  # those of packages, too
        text = (
            f"is no table in UTF-8 ({clean(error)[:200]}); a first line of CSV is lr,seed,val_loss"
        )
        raise ConfigError("bad_data", f"{where}: {text}") from None
    flat = list[Row]()
    for i, line in enumerate(lines, 1):
        if not isinstance(line, Mapping):
            text = f'line {i}: is no object; for example {{"lr": 0.1}}'
            raise ConfigError("bad_data", f"{where}: {text}")
        flat.append({str(k).strip(): _plain(v) for k, v in flatten(line).items()})
    if not (keys := dict.fromkeys(k for row in flat for k in row)):
        text = "has no line; a first line names the columns: lr,seed,val_loss"
        raise ConfigError("bad_data", f"{where}: {text}")
    return [{k: row.get(k) for k in keys} for row in flat]


def _lines(path: Path) -> list[Any]:
    """Return the lines of a file, each by column."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        for name, read in (("pyarrow.parquet", "read_table"), ("polars", "read_parquet")):
            with suppress(ImportError):
                return _of_frame(getattr(importlib.import_module(name), read)(path))
        text = "a Parquet file needs the package pyarrow or polars, and neither is installed"
        raise ConfigError("missing_package", f"{text}; {how_to_install('pyarrow')}")
    with open(path, newline="", encoding="utf-8-sig") as file:
        if kind not in (".csv", ".tsv"):
            text = file.read()
            whole = json.loads(text) if kind == ".json" else None
            return whole if isinstance(whole, list) else [*map(json.loads, text.splitlines())]
        sign = max(",;\t", key=file.readline().count)
        file.seek(0)
        lines = [*filter(None, csv.reader(file, delimiter=sign, skipinitialspace=True))]
    heads, *rest = lines or [[]]
    _once(heads)
    for i, line in enumerate(rest, 2):
        if len(line) != len(heads):
            text = f"has {len(line)} values, and there are {len(heads)} columns"
            raise ConfigError("bad_data", f"line {i}: {text}; a decimal sign is a point: 2.9")
    return [dict(zip(heads, line, strict=True)) for line in rest]


def _once(heads: list[Any]) -> None:
    if twice := [h for h in heads if heads.count(h) > 1]:
        raise ConfigError("bad_data", f"has the column {twice[0]!r} twice; leave one out")


def _of_frame(frame: Any) -> list[Any]:
    """Return the lines of a data frame of polars or pandas, or a table of Arrow, by column."""
    for name in ("to_dicts", "to_pylist"):
        if hasattr(frame, name):
            return list(getattr(frame, name)())
    _once(list(frame.columns))
    return list(frame.to_dict("records"))


def _plain(value: Any) -> Any:
    """Return a value as a setting or a figure: a number, a truth, a text, None for nothing."""
    if value is None or isinstance(value, (bool, int, float)):
        return None if value != value else value  # NaN
    text = " ".join(str(value).split())
    return None if text.lower() in _NOTHING else parse_value(text)
