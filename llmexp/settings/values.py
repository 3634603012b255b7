"""Values that a user gives: how a knob describes them, how they are refused, and the variables of
the environment in them. Standard library."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Names of variables that hold a secret, and names that often do: of these the value decides.
SECRET = re.compile(
    r"(?:^|_)(?:API_?KEY|SECRET|PASSWORD|PASSWD)S?(?:_ID)?$|SECRET_|PASSWORD$", re.I
)
MAYBE_SECRET = re.compile(r"(?:^|_)(?:KEYS?|TOKEN)(?:_ID)?$", re.I)
SHORTEST_TOKEN = 16  # characters
# A variable of the environment in a composed or saved config, which never holds its value.
VARIABLE = re.compile(r"\$\{oc\.env:([^{},]+)\}")
NUMBER = re.compile(r"[-+]?(\d+|(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?)")
NAMED: set[str] = set()  # variables that the configs of this process's own runs name


class ConfigError(ValueError):
    """Something that the user asked for is refused before training starts; the text is for the
    user."""


def nearest(word: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> str:
    """' Did you mean ...?' for the closest known words, or the empty string where none is close."""
    close = difflib.get_close_matches(word, list(known), n=n, cutoff=cutoff)
    return f" Did you mean {' or '.join(close)}?" if close else ""


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


def written(value: object) -> str:
    """Return any plain value as an override has it: {factor: 8.0, kind: null}."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {written(one)}' for key, one in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(written, value))}]"
    if value is None or isinstance(value, (bool, int, float)):
        return str(shown(value))
    return quoted(str(value))


def typed(key: str, value: object) -> str:
    """Return KEY=VALUE as it is pasted into a shell, such as a path with spaces or a mapping."""
    return pasteable(f"{key}={written(value)}")


def pasteable(word: str) -> str:
    """Return a word as a shell takes it; in double quotes where it has single ones and may be."""
    if "'" in word and not re.search(r'["$`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)


def shown(value: Any) -> Any:
    """Return a value as YAML and a command line write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else value


def refuse(key: str, value: Any, why: str, example: Any = None) -> ConfigError:
    """Return the one form of a refusal: key, value, reason, a valid example."""
    tail = ""
    if isinstance(example, str):  # a value as it is written, or that and further words
        text = f"{key}={example}"
        tail = f"; for example {text if ' ' in text else pasteable(text)}"
    elif example is not None:
        tail = f"; for example {typed(key, example)}"
    return ConfigError(f"{key}={shown(value)}: {why}{tail}")


def is_secret(name: str) -> bool:
    """Return whether a variable of the environment holds a secret: by its name, or, where a name
    such as SORT_KEY says too little, as its value is long and no number."""
    if SECRET.search(name):
        return True
    value = os.environ.get(name, "")
    long = len(value) >= SHORTEST_TOKEN and not NUMBER.fullmatch(value)
    return MAYBE_SECRET.search(name) is not None and long


def remember_variables(node: Any) -> None:
    """Remember the variables that a run of this process names, whose values no message shows."""
    if isinstance(node, str):
        NAMED.update(VARIABLE.findall(node))
    for _, child in children(node):
        remember_variables(child)


def fill(value: Any, key: str) -> Any:
    """Return `value` with what the environment holds in place of its ${oc.env:NAME}, at any depth.

    A lone variable that reads as a number, true, false or null is one, as on a command line; one
    with the name of a secret stays text. To be called once: a value may look like a variable
    itself. Raises ConfigError naming the key and a variable that is not set.
    """
    if isinstance(value, Mapping):
        return {k: fill(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [fill(v, key) for v in value]
    if not isinstance(value, str) or not (names := VARIABLE.findall(value)):
        return value
    for name in names:
        if name not in os.environ:
            text = f"the environment variable {name} is not set"
            raise refuse(
                key, value, f"{text}; set it where the run starts, such as with export {name}=..."
            )
    text = VARIABLE.sub(lambda found: os.environ[found[1]], value)
    if not VARIABLE.fullmatch(value) or is_secret(names[0]):
        return text
    if NUMBER.fullmatch(text):
        try:
            return int(text) if text.lstrip("+-").isdecimal() else float(text)
        except ValueError:  # Python reads no more than some thousand digits
            raise refuse(
                key, value, f"the environment variable {names[0]} has {len(text):,} digits"
            ) from None
    return {"true": True, "false": False, "null": None}.get(text.lower(), text)


AUTO = "auto"  # of a knob that takes the word
NO_DEFAULT = object()  # of a knob that every config has to list


@dataclass(frozen=True)
class Knob:
    """A knob's `doc` with its unit, a valid `example`, and the range that is checked.

    `affects` says what another value changes: the `result`, its last digits (`rounding`), or
    `nothing` but names, records and time; empty: as the section's AFFECTS, else `result`.
    `default` is the value of a knob that some options do not list, because it does nothing there
    (`knobs.ACTS`), or that the config of an older run does not have yet.
    """

    doc: str
    example: Any = None
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    auto: bool = False  # the word auto is valid as well: chosen at the start
    affects: str = ""
    default: Any = NO_DEFAULT

    @property
    def meaning(self) -> str:
        """Return `doc` with the values that are valid."""
        words = (AUTO,) if self.at_least is not None else (AUTO, "true", "false")
        choices = words if self.auto else self.choices
        limits = [" | ".join(choices)] if choices else []
        bounds = {"from": self.at_least, "above": self.above, "to": self.at_most}
        limits += [f"{word} {limit:,}" for word, limit in bounds.items() if limit is not None]
        return f"{self.doc} ({', '.join(limits)})" if limits else self.doc


def knob(doc: str, example: Any = None, **more: Any) -> Any:
    """Return a dataclass field that `Knob` describes."""
    found = Knob(doc, example, **more)
    if found.default in ({}, []):
        return dataclasses.field(default_factory=type(found.default), metadata={"knob": found})
    default = dataclasses.MISSING if found.default is NO_DEFAULT else found.default
    return dataclasses.field(default=default, metadata={"knob": found})


def choice(doc: str, words: str, **more: Any) -> Any:
    """Return the field of a knob that takes one of the words, which ` | ` separates."""
    choices = tuple(words.split(" | "))
    return knob(doc, choices[0], choices=choices, **more)


def count(doc: str, example: int, **more: Any) -> Any:
    """Return the field of a knob that counts from 1."""
    return knob(doc, example, at_least=1, **more)


def seconds(doc: str, example: float, **more: Any) -> Any:
    """Return the field of a time limit, which is its own default where it is not listed."""
    return knob(f"seconds {doc}", example, above=0, at_most=1_000_000, default=example, **more)


def children(node: Any) -> Iterable[tuple[Any, Any]]:
    """Return the (key, value) pairs in a section, (number, value) in a list, none in a value."""
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, (list, tuple)) else ()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def key_of(field: dataclasses.Field) -> str:
    """Return a field's name in files and on the command line."""
    return field.name.removesuffix("_")  # `async` is a word of Python's


def knobs_of(section: type) -> dict[str, Knob]:
    """Return the knobs of a closed section by their keys."""
    fields = [field for field in dataclasses.fields(section) if field.metadata]
    return {key_of(field): field.metadata["knob"] for field in fields}
