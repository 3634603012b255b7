"""Values that a user gives: how a knob is declared, and how a value is refused.

Standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmexp.config.kinds import Kind, kind_of_error

Plain = dict[str, Any]  # plain values by key: a section of a config, a row, what JSON holds


class ConfigError(ValueError):
    """Refuse what the user asked for, before training starts; the text is for the user.

    `kind` is for programs; `key` is the knob that is refused, where it is one.
    """

    def __init__(self, kind: Kind, text: str, key: str | None = None) -> None:
        super().__init__(text)
        self.kind, self.key = kind, key


def error_record(error: BaseException) -> Plain:
    """Return an error as `--json` prints it; its `code` is its kind."""
    key = getattr(error, "key", None)
    return {"code": kind_of_error(error), "message": str(error), "key": key}


def refusal(described: Mapping[str, Any]) -> ConfigError:
    """Return the refusal that another process has described."""
    return ConfigError(described["code"], described["message"], described["key"])


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the known word that is spelled most alike, in a list, or an empty one."""
    known = list(known)
    same = [one for one in known if one.casefold() == word.casefold()]
    return same[:1] or difflib.get_close_matches(word, known, n=1, cutoff=cutoff)


def did_you_mean(words: Sequence[str]) -> str:
    """Return ' Did you mean ...?' for some words, or the empty string for none."""
    return f" Did you mean {' or '.join(words)}?" if words else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ' Did you mean ...?' for the closest known word, or the empty string."""
    return did_you_mean(closest(word, known))


def hint(word: str, known: Iterable[str]) -> str:
    """Return the closest known word, or all of them where none is close."""
    known = list(known)
    return nearest(word, known) or f" Known: {', '.join(known)}."


NUMBER_OR_WORD = re.compile(
    r"[+-]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)(e[+-]?\d[\d_]*)?|[+-]?(inf|nan)|true|false|null", re.I
)


def quoted(text: str) -> str:
    """Return `text` as the value of an override: in quotes where Hydra's grammar needs them."""
    plain = re.fullmatch(r"[A-Za-z0-9_./@-]+( [A-Za-z0-9_./@-]+)*", text)
    if plain and not NUMBER_OR_WORD.fullmatch(text):
        return text
    # backslashes stand for themselves, but before a quote
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def override_value(value: object) -> str:
    """Return any plain value as an override has it: {factor: 8.0, kind: null}."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {override_value(one)}' for key, one in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(override_value, value))}]"
    if value is None or isinstance(value, (bool, int, float)):
        return str(as_yaml(value))
    return quoted(str(value))


def typed(key: str, value: object) -> str:
    """Return KEY=VALUE as it is pasted into a shell, such as a path with spaces or a mapping."""
    return pasteable(f"{key}={override_value(value)}")


def pasteable(word: str) -> str:
    """Return a word as a shell takes it; in double quotes where it has single ones and may be."""
    if "'" in word and not re.search(r'["$`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)


def as_yaml(value: Any) -> Any:
    """Return a value as YAML and a command line write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else value


def refuse(kind: Kind, key: str, value: Any, why: str, example: Any = None) -> ConfigError:
    """Return the one form of a refusal: key, value, reason, a valid example."""
    tail = ""
    if isinstance(example, str):  # a value as it is written, or that and further words
        text = f"{key}={example}"
        tail = f"; for example {text if ' ' in text else pasteable(text)}"
    elif example is not None:
        tail = f"; for example {typed(key, example)}"
    shown = str(as_yaml(value))
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
    text = f"{key}={shown}: {why}{tail}"
    text = text.replace(f"{key}=", f"{key} ") if key[:2] == "--" else text
    return ConfigError(kind, text, key)


def is_ours(target: object) -> bool:
    """Return whether a `_target_` names a function of llmexp, not one of the user's."""
    return str(target).startswith("llmexp.")


MAX_VALUES, MAX_DEPTH = 10_000, 50  # of a config
MAX_SHOWN = 1000  # characters of a value in a refusal
AUTO = "auto"  # of a knob that takes the word
TINY = 1e-37  # what keeps a division from 0 / 0: fp32 takes less as 0, on some devices at least
NO_DEFAULT = object()  # of a knob that every config has to list


@dataclass(frozen=True)
class Where:
    """Hold a condition: one of `keys` has one of `values`; without values, one of them is on.

    A key is on if it is not null, 0, false or empty. `words` say the condition where the keys alone
    would not be understood.
    """

    keys: tuple[str, ...]
    values: tuple[Any, ...] = ()
    words: str = ""

    def holds(self, flat: Mapping[str, Any]) -> bool:
        """Return whether a flat config meets the condition; one that has none of the keys does."""
        there = [flat[key] for key in self.keys if key in flat]
        if self.values:
            return not there or any(value in self.values for value in there)
        return not there or any(there)

    def why(self, flat: Mapping[str, Any]) -> tuple[str, str]:
        """Return (why a knob that needs the condition does nothing, what else could be done)."""
        key = " or ".join(self.keys)
        if not self.values:
            return f"does nothing without {key}", f"give {key} too"
        if self.values == (None,):
            return f"does nothing beside {key}={flat[key]}", f"leave {key} out"
        section, _, name = key.rpartition(".")
        shown = section if name == "kind" else key  # an option of the group, named as its kind
        return (
            f"does nothing with {shown}={as_yaml(flat[key])}",
            f"choose {shown}={' or '.join(str(as_yaml(v)) for v in self.values)}",
        )


def where(key: str, *values: Any, words: str = "") -> Where:
    """Return the condition that a key has one of the values, or without values that it is on."""
    return Where((key,), values, words)


@dataclass(frozen=True)
class Knob:
    """Describe a knob: its meaning (`doc`) with the unit, a valid example, and the range.

    `affects` says what another value changes: the `result`, its last digits (`rounding`), or
    `nothing` but names, records and time; empty: as the section's AFFECTS, else `result`. Where
    one of `acts` does not hold, the knob does nothing and is refused; where `decides` does not
    hold, it changes no result. `default` is the value in a config that does not list the knob.
    """

    doc: str
    example: Any = None
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    auto: bool = False  # the word auto is valid as well: chosen at the start
    affects: str = ""
    acts: tuple[Where, ...] = ()
    decides: Where | None = None
    default: Any = NO_DEFAULT
    a_step: bool = False  # it is a step of the run, which has to reach it
    form: Callable[[Any], Any] | None = None  # makes the value of what is given

    @property
    def meaning(self) -> str:
        """Return `doc` with the values that are valid."""
        words = (AUTO,) if self.at_least is not None else (AUTO, "true", "false")
        choices = words if self.auto else self.choices
        limits = [" | ".join(choices)] if choices else []
        bounds = {
            "from": self.at_least, "above": self.above, "to": self.at_most, "below": self.below,
        }  # fmt: skip
        limits += [f"{word} {limit:,}" for word, limit in bounds.items() if limit is not None]
        return f"{self.doc} ({', '.join(limits)})" if limits else self.doc


def knob(doc: str, example: Any = None, **more: Any) -> Any:
    """Return a field that `Knob` describes: of a dataclass, or of an argument in `Annotated`."""
    acts = more.pop("acts", ())
    found = Knob(doc, example, acts=(acts,) if isinstance(acts, Where) else acts, **more)
    if found.default in ({}, []):
        return dataclasses.field(default_factory=type(found.default), metadata={"knob": found})
    default = dataclasses.MISSING if found.default is NO_DEFAULT else found.default
    return dataclasses.field(default=default, metadata={"knob": found})


def optional(doc: str, example: Any = None, **more: Any) -> Any:
    """Return the field of a knob that is null where a config does not list it."""
    return knob(doc, example, default=None, **more)


def usual(doc: str, example: Any, **more: Any) -> Any:
    """Return the field of a knob that has its example where a config does not list it."""
    return knob(doc, example, default=example, **more)


def choice(doc: str, words: str, **more: Any) -> Any:
    """Return the field of a knob that takes one of the words, which ` | ` separates."""
    choices = tuple(words.split(" | "))
    return knob(doc, choices[0], choices=choices, **more)


def count(doc: str, example: int, **more: Any) -> Any:
    """Return the field of a knob that counts from 1."""
    return knob(doc, example, at_least=1, **more)


def time_limit(doc: str, example: float, **more: Any) -> Any:
    """Return the field of a time limit, which is its own default where it is not listed."""
    return usual(f"seconds {doc}", example, above=0, at_most=1_000_000, **more)


def nested(node: Any) -> Iterable[tuple[Any, Any]]:
    """Return the (key, value) pairs in a section, (number, value) in a list, none in a value."""
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, (list, tuple)) else ()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Plain:
    """Return nested mappings as one with dotted keys."""
    flat: Plain = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def field_key(field: dataclasses.Field) -> str:
    """Return a field's name in files and on the command line."""
    return field.name.removesuffix("_")  # `async` is a word of Python's


def section_knobs(section: type) -> dict[str, Knob]:
    """Return the knobs of a closed section by their keys, those of sections in it dotted."""
    found: dict[str, Knob] = {}
    for field in dataclasses.fields(section):
        if field.metadata:
            found[field_key(field)] = field.metadata["knob"]
        elif dataclasses.is_dataclass(inner := typing.get_type_hints(section)[field.name]):
            below = section_knobs(typing.cast(type, inner))
            found |= {f"{field.name}.{key}": knob for key, knob in below.items()}
    return found
