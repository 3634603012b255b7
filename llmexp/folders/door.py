"""Check what the folder of a run or a sweep holds, once, where it is read.

Each file is a plain one and is read in linear time, and its values are of the kinds and in the
ranges that we write. Other files are refused by name and line, or passed over and named where runs
are compared. Whoever gets the values trusts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import reprlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import yaml

from llmexp import features
from llmexp.config.kinds import kind_of_error
from llmexp.config.values import MAX_DEPTH, MAX_VALUES, ConfigError, Plain
from llmexp.metrics.keys import ROW_KEYS
from llmexp.run import Run
from llmexp.run.layout import Layout
from llmexp.system.fileio import JSON, check_format, open_plain, read_json, read_text

RUN_FORMAT = 1  # of run.json
CONFIG_BYTES = 2**20
ROW_BYTES = 2**24
_LARGEST = sys.float_info.max
_NUMBERS = {int, float, bool}
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast
TEXT_KEYS = {key.name: key.text for key in ROW_KEYS.values() if key.text}
_ENDLESS = re.compile(r"[-+0-9a-fA-FxXo_:.]{300,}")  # a number whose digits take long


class _Unique(_LOADER):
    """Load plain values; no key of a section is there twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            raise ValueError(f"line {node.start_mark.line + 1}: a section has a key twice")
        return found


class _Dumper(yaml.SafeDumper):
    """Put what `_Unique` would take for a number into quotes, where it is a text."""


# YAML 1.1 takes 1e-3 for a text; for Hydra and for whoever writes it, it is a number.
for one in (_Unique, _Dumper):
    number = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+")
    one.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))


def config_yaml(tree: Plain) -> str:
    """Return a plain config as the YAML that `read_yaml` reads."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False))


def read_yaml(path: Path) -> Plain:
    """Return the section of plain values in a YAML file. Raises ConfigError, with the line."""
    text = config_text(path)
    with _named(path):
        found = yaml.load(text, _Unique)
        if not isinstance(found, dict):
            raise ValueError("holds no config")
        json.dumps(found)  # raises for other values, such as dates, and for numbers without end
    return found


def config_text(path: Path) -> str:
    """Return the YAML of a config. Raises ConfigError where it is larger or deeper than one."""
    with _named(path):
        text = read_text(path, CONFIG_BYTES)
        _check_yaml(text)
    return text


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in what is raised for it."""
    try:
        yield
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            kind_of_error(error, "damaged_file"),
            f"{path}: cannot be read: {' '.join(str(error).split())}",
        ) from None


def _check_yaml(text: str) -> None:
    """Raise ValueError with the line at which YAML has more values or levels than a config has.

    Values that aliases repeat count each time, without being repeated: a short text can stand for
    an endless one.
    """
    known: dict[str | None, tuple[int, int]] = {}  # the values and levels of each anchor
    within: list[tuple[str | None, int, int]] = [(None, 0, 0)]  # likewise of each open section
    for event in yaml.parse(text, _LOADER):
        values, levels, wrong = 0, 0, ""
        match event:
            case yaml.CollectionStartEvent():
                within.append((event.anchor, 0, 0))
            case yaml.CollectionEndEvent():
                anchor, values, levels = within.pop()
                known[anchor] = values, levels = values + 1, levels + 1
            case yaml.AliasEvent() if event.anchor not in known:
                wrong = f"*{event.anchor} is inside of what it stands for"
            case yaml.AliasEvent():
                values, levels = known[event.anchor]
            case yaml.ScalarEvent():
                known[event.anchor] = values, levels = 1, 0
                if event.implicit[0] and _ENDLESS.fullmatch(event.value):
                    wrong = "a number has too many digits"
        anchor, before, deepest = within.pop()
        within.append((anchor, before + values, max(deepest, levels)))
        if within[-1][1] > MAX_VALUES:
            wrong = f"has more than {MAX_VALUES:,} values, counting what YAML aliases repeat"
        elif len(within) + within[-1][2] > MAX_DEPTH:
            wrong = f"is nested deeper than {MAX_DEPTH} levels"
        if wrong:
            raise ValueError(f"line {event.start_mark.line + 1}: {wrong}")


def scan_rows(path: Path, by_module: bool = False) -> Iterator[tuple[int, int, Plain | ValueError]]:
    """Yield the number and the end of each finished line, and its row or why it holds none.

    `by_module`: figures of modules stand by their names. One line is in memory at a time. Raises
    OSError.
    """
    with open_plain(path) as file:
        number = 0
        while line := file.readline(ROW_BYTES):
            number, rest = number + 1, line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(ROW_BYTES)
            if not rest:  # it was never finished
                return
            yield number, file.tell(), row_in(line if rest is line else b"", by_module)


def row_in(line: bytes, by_module: bool = False) -> Plain | ValueError:
    """Return the row that a line of metrics.jsonl holds, or why it holds none."""
    if not line:
        return ValueError(f"is longer than {ROW_BYTES / 2**20:g} MiB")
    try:
        row = _decoded(line)
    except (ValueError, RecursionError) as error:
        return ValueError(str(error))
    step = row.get("step") if isinstance(row, dict) else None
    if type(step) is not int or not 0 <= step < 2**53:
        return ValueError("has no step")
    values = row.values()
    if {*map(type, values)} <= _NUMBERS and max(map(abs, values)) <= _LARGEST:
        return row
    for key, value in row.items():
        named = value if by_module and isinstance(value, dict) else {key: value}
        for name, figure in named.items():
            text = TEXT_KEYS.get(name, "(?!)")
            if not _is_number(figure) and not re.fullmatch(text, str(figure)):
                return ValueError(f"{name}={reprlib.repr(figure)}: a finite number is needed")
    return row


def _decoded(line: bytes) -> Any:
    """Return the value of a line of JSON. Raises ValueError or RecursionError.

    orjson is five times as fast as json, but takes the last value of a key that is there twice: in
    an object with two quotes for each of its keys none is, and no value is a text or has keys.
    """
    import orjson

    with contextlib.suppress(orjson.JSONDecodeError):
        found = orjson.loads(line)
        if isinstance(found, dict) and line.count(b'"') == 2 * len(found):
            return found
    return JSON.decode(line.decode())


def _is_number(figure: Any) -> bool:
    return type(figure) in _NUMBERS and abs(figure) <= _LARGEST


class _Clip(TypedDict, total=False):
    """Hold what a run tells of its clipping, or of one of the `measures` there."""

    steps: float
    share: float | None
    quantiles: dict[str, float]
    table: list[dict[str, float]]
    measures: dict[str, _Clip]


class _Status(TypedDict, total=False):
    state: str
    updated: float
    started: float | None
    ended: float | None
    pid: int
    host: str | None
    error: str | None
    kind: str  # of the error
    exit_code: int | None
    summary: dict[str, float | None]
    clip: _Clip


class _Facts(TypedDict, total=False):
    """Hold the keys of run.json that `Run` does not have."""

    format: int
    dp_size: int
    world_size: int
    overrides: list[str] | None
    swept: list[str] | None
    place: list[str] | None
    label: str | None
    group: str | None
    environment: dict[str, str]
    data_fingerprint: dict[str, object]
    data_files: dict[str, int]
    better: dict[str, str]
    val_texts: dict[str, object]
    total_flops: float | None


def kinds_of(*described: Any) -> Plain:
    """Return the kinds of the keys that classes describe."""
    return {key: kind for one in described for key, kind in typing.get_type_hints(one).items()}


# The files that hold an object, and the kinds of its keys, as far as they are looked into.
OBJECTS = {
    "run.json": kinds_of(Layout, Run, _Facts),
    "status.json": kinds_of(_Status, *features.offered("config", "Status")),
}


def object_in(path: Path, kinds: Mapping[str, Any] | None = None) -> Plain:
    """Return the object in a file, one of OBJECTS or with these kinds of its keys.

    Raises ConfigError, also for a key of another kind and for another `format`."""
    found, kinds = read_json(path), OBJECTS[path.name] if kinds is None else kinds
    if not isinstance(found, dict):
        raise ConfigError("damaged_file", f"{path}: holds no object")
    if "format" in kinds.keys() & found:
        check_format(path, found["format"], RUN_FORMAT)
    for key in found:
        if not fits(kinds.get(key, Any), found[key]):
            raise ConfigError(
                "damaged_file",
                f"{path}: {key}={reprlib.repr(found[key])}: is not a value of this key",
            )
    return found


def fits(kind: Any, value: Any) -> bool:
    """Return whether a value of JSON is of a kind: a number in range, a text, or made of these."""
    of, inner = typing.get_origin(kind), typing.get_args(kind)
    if of in (types.UnionType, typing.Union):
        return any(fits(one, value) for one in inner)
    if of is dict:
        return isinstance(value, dict) and all(fits(inner[1], one) for one in value.values())
    if of in (list, tuple):
        return isinstance(value, list) and all(fits(inner[0], one) for one in value)
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        kinds, needed = kinds_of(kind), set[str]()
        if not isinstance(value, dict):
            return False
        if dataclasses.is_dataclass(kind):
            needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
            needed |= value.keys() - kinds.keys()  # it has no other
        known = kinds.keys() & value
        return needed <= known and all(fits(kinds[key], value[key]) for key in known)
    if kind is int:  # a count, or -1
        return type(value) is int and -1 <= value < 2**53
    if kind is float:
        return type(value) in (int, float) and abs(value) <= _LARGEST
    return kind is Any or isinstance(value, kind)
