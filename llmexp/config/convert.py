"""Turn plain values into the typed configuration: strict about keys, types and ranges.

`build` takes the mapping that Hydra composed, or that a run's config.yaml holds, and explains what
it refuses. Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from llmexp.config import parts
from llmexp.config.forms import look_through
from llmexp.config.sections import Config
from llmexp.config.values import (
    AUTO,
    NO_DEFAULT,
    NUMBER_OR_WORD,
    ConfigError,
    Knob,
    Plain,
    closest,
    did_you_mean,
    field_key,
    hint,
    nearest,
    refuse,
)
from llmexp.config.variables import VARIABLE, fill

_T = TypeVar("_T")


def build(mapping: Mapping[str, Any]) -> Config:
    """Return a `Config` from a plain mapping.

    Texts keep their variables of the environment; numbers, switches and choices take their values.
    Raises ConfigError for unknown or missing keys, types and ranges.
    """
    return convert_section(Config, mapping, "")


def checked_knob(key: str, value: Any) -> Any:
    """Return a value of the knob `key` of `parts` as its type. Raises ConfigError."""
    kind, knob = parts.arguments()[key]
    return convert_value(kind, value, key, knob)


def with_knobs(config: Config, **sections: Plain) -> Config:
    """Return the config with other values of knobs in some sections: train={"max_steps": 3}."""
    found: Plain = {}
    for name, values in sections.items():
        old = getattr(config, name)
        found[name] = old | values if isinstance(old, dict) else dataclasses.replace(old, **values)
    return dataclasses.replace(config, **found)


@functools.cache
def _types(cls: type) -> Plain:
    return typing.get_type_hints(cls)


def convert_section(cls: type[_T], mapping: Any, prefix: str) -> _T:
    """Return a closed section, whose keys begin with `prefix`. Raises ConfigError."""
    if not isinstance(mapping, Mapping):
        text = "a section of keys is needed here, not a plain value"
        raise refuse("wrong_type", prefix.rstrip("."), mapping, text)
    fields = {field_key(field): field for field in dataclasses.fields(typing.cast(Any, cls))}
    for key in mapping:
        if key not in fields:
            raise _unknown(f"{prefix}{key}", str(key), fields)
    hints, values = _types(typing.cast(type, cls)), {}
    for key, field in fields.items():
        knob, kind = field.metadata.get("knob", Knob("a section")), hints[field.name]
        if key in mapping or dataclasses.is_dataclass(kind):
            values[field.name] = convert_value(kind, mapping.get(key, {}), prefix + key, knob)
        elif knob.default is NO_DEFAULT:
            raise ConfigError("missing_value", f"{prefix}{key}: this key is missing ({knob.doc})")
    return cls(**values)


def _unknown(dotted: str, key: str, known: Mapping[str, Any]) -> ConfigError:
    own = f" A key of your own goes into the section user: +user.{key}=..."
    own = own if dotted.count(".") < 2 else ""
    section = dotted.removesuffix(key)
    near = did_you_mean([f"{section}{name}" for name in closest(key, known)])
    tail = f"{near}{own}" if near else f"{own}{hint(key, known)}"
    return ConfigError("unknown_key", f"{dotted}: there is no such key.{tail}")


def convert_value(kind: Any, value: Any, key: str, knob: Knob) -> Any:
    """Return a value of any field or argument as its type. Raises ConfigError."""
    if kind is Any:
        return value
    if knob.form is not None:
        in_list = typing.get_origin(kind) is list  # whose texts keep their variables
        return knob.form(value if in_list else fill(value, key))
    takes_text = not (knob.choices or knob.auto) and str in (kind, *typing.get_args(kind))
    if not takes_text and isinstance(value, str) and VARIABLE.search(value):
        return _from_environment(kind, value, key, knob)
    if knob.auto and value == AUTO:
        return value
    if typing.get_origin(kind) is types.UnionType:
        kinds = typing.get_args(kind)
        if value is None and type(None) in kinds:
            return None
        kind = next(arg for arg in kinds if arg is not type(None))
    if dataclasses.is_dataclass(kind):
        return convert_section(typing.cast(type, kind), value, f"{key}.")
    if typing.get_origin(kind) is dict:
        return _open_section(value, key)
    if typing.get_origin(kind) is list:
        return _entries(typing.get_args(kind)[0], value, key, knob)
    found = _scalar(kind, value, key, knob)
    check_range(value, key, knob)
    return found


def _open_section(value: Any, key: str) -> Plain:
    if not isinstance(value, Mapping):
        needed = "" if key == "user" or "." in key else ", with `_target_` naming a function"
        raise refuse("wrong_type", key, value, f"a section of keys is needed here{needed}")
    look_through(value, key)
    return dict(value)


def _entries(kind: type, value: Any, key: str, knob: Knob) -> list[Any]:
    """Return a list of texts, or of sections of the class `kind`."""
    several = isinstance(value, (list, tuple))
    if kind is str:
        wrong = next((e for e in value if not isinstance(e, str)), "") if several else ""
        if not several or wrong != "":
            raise refuse(
                "wrong_type",
                key,
                value,
                f"a list of texts is needed{_unquoted(wrong)}",
                "[one,two]",
            )
        return list(value)
    if not several or not all(isinstance(entry, Mapping) for entry in value):
        raise refuse("wrong_type", key, value, "a list of sections is needed", knob.example)
    pairs = enumerate(value)
    return [convert_section(kind, entry, f"{key}.{number}.") for number, entry in pairs]


def _from_environment(kind: Any, value: str, key: str, knob: Knob) -> Any:
    found = fill(value, key)
    try:
        return convert_value(kind, found, key, knob)
    except ConfigError as error:  # its text has what was found
        text = f"what the environment holds does not fit ({knob.doc})"
        raise refuse(error.kind, key, value, text, knob.example) from None


def _unquoted(value: Any) -> str:
    """Return what to do about a number or a switch in the place of a text; empty for others."""
    if not isinstance(value, (bool, int, float)):
        return ""
    what = "a switch (as are off, no, on and yes)" if isinstance(value, bool) else "a number"
    return f", and without quotes this is {what}: put quotes around what you wrote"


def _scalar(kind: type, value: Any, key: str, knob: Knob) -> Any:
    """Return `value` as `kind`, without guessing: 2.5 is no int, "1e-3x" no float."""
    a_switch, example, needed = isinstance(value, bool), knob.example, ""
    if kind is bool and not a_switch:
        needed, example = "true, false or auto" if knob.auto else "true or false", "true"
    elif kind is str and not isinstance(value, str):
        text = f"a text is needed{_unquoted(value)}"
        raise refuse("wrong_type", key, value, text, example)
    elif kind in (int, float):
        a_number = isinstance(value, (int, float)) and not a_switch
        finite = a_number and abs(value) <= sys.float_info.max
        whole = finite and value == int(value)  # 1e6 is meant as an int
        if kind is int and not whole:
            needed = "a whole number"
        elif not finite:
            needed = "a finite number" if a_number else "a number"
    if needed:
        auto = ", or auto" if knob.auto and kind is not bool else ""
        raise _misfit(value, key, needed, auto, example)
    return kind(value) if kind in (int, float) else value


def _misfit(value: Any, key: str, needed: str, auto: str, example: Any) -> ConfigError:
    if isinstance(value, str) and NUMBER_OR_WORD.fullmatch(value):
        text = f"is a text, as it has quotes or leading zeros; {needed} is needed"
        return refuse("wrong_type", key, repr(value), text, value.lstrip("0_") or "0")
    return refuse("wrong_type", key, value, f"{needed} is needed{auto}", example)


def check_range(value: Any, key: str, knob: Knob) -> None:
    """Raise ConfigError for a value outside of what a knob takes."""
    if knob.choices and value not in knob.choices:
        near = nearest(str(value), knob.choices)
        raise refuse(
            "unknown_option", key, value, f"must be one of {', '.join(knob.choices)}.{near}"
        )
    if isinstance(value, str):
        return
    for word, limit, inside in (
        ("at least", knob.at_least, operator.ge), ("at most", knob.at_most, operator.le),
        ("above", knob.above, operator.gt), ("below", knob.below, operator.lt),
    ):  # fmt: skip
        if limit is not None and not inside(value, limit):
            raise refuse(
                "out_of_range", key, value, f"must be {word} {limit} ({knob.doc})", knob.example
            )
