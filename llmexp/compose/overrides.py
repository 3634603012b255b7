"""Overrides of a command line: read, checked against the config that they change, put into it.

Also where each value of a composed config comes from. The files count in the order in which they
are merged, then the command line.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from llmexp.config.knobs import takes_text
from llmexp.config.sections import conf_dir
from llmexp.config.values import (
    NO_DEFAULT,
    NUMBER_OR_WORD,
    Plain,
    flatten,
    nested,
    quoted,
)

COMMAND_LINE = "the command line"
PARENT = "parent"  # begins the names of options that hold what a run beneath has


def key_of(override: str) -> str:
    """Return the key of an override, also of one that adds or removes it."""
    return override.lstrip("+~").partition("=")[0]


# Texts in quotes, words, and the signs between them.
_PARTS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\\.|[^][{},()'"\\])+|.""", re.S)


@functools.lru_cache(maxsize=4096)
def as_text(override: str) -> str:
    """Return an override with quotes around what a knob of text takes, and Hydra takes for more.

    So a text is what was typed: Hydra reads the short commit 695e0514 as infinity, 1_000 as 1000,
    and no letter beyond ASCII. In lists, sections and sweeps each value has them; null stays what
    it is.
    """
    key, equals, value = override.partition("=")
    found, keys = key + equals, [key.lstrip("+~")]  # of what is open here, the inmost last
    for part in _PARTS.findall(value):
        is_quoted = part[0] in "'\""
        if ":" in part and not is_quoted and len({*keys[-2:]}) == 2:  # in a section
            name, colon, part = part.partition(":")
            keys[-1], found = f"{keys[-2]}.{name.strip()}", found + name + colon
        word = part.strip()
        if part in ("[", "{"):
            keys.append(keys[-1] + "." * (part == "{"))
        elif part in ("]", "}"):
            keys[1:] = keys[1:-1]
        elif NUMBER_OR_WORD.fullmatch(word) or not (is_quoted or word.isascii()):
            part = quoted(word) if takes_text(keys[-1]) and word.lower() != "null" else part
        found += part
    try:
        parsed([found])  # a function such as range takes numbers alone
    except HydraException:
        return override
    return found


def typed_in(cfg: DictConfig) -> list[str]:
    """Return the overrides that a config was composed with, as they were typed."""
    given = unresolved(cfg.hydra.overrides)
    return [*given["hydra"], *given["task"]]


def parsed(overrides: Iterable[str]) -> list[Override]:
    """Return the overrides as Hydra reads them. Raises HydraException."""
    return [_parsed(loader(), override) for override in overrides]


@functools.lru_cache(maxsize=4096)  # the grammar is slow, and each line is asked for several times
def _parsed(there: Any, override: str) -> Override:
    found: Override = OverridesParser.create(there).parse_overrides([override])[0]
    return found


def written(overrides: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of each key as they are written, those of a sweep one by one.

    A glob or an interval is one value. Raises HydraException.
    """
    found = {}
    for o in parsed(overrides):
        listed = o.is_discrete_sweep() and o.value_type != ValueType.GLOB_CHOICE_SWEEP
        whole = str(o.input_line).partition("=")[2]
        found[o.key_or_group] = list(o.sweep_string_iterator()) if listed else [whole]
    return found


def loader() -> Any:
    """Return what finds the files of configs, of the Hydra that is running; None without one."""
    running = GlobalHydra.instance()
    return running.config_loader() if running.is_initialized() else None


def unresolved(node: Any) -> Any:
    """Return what a config holds as plain values, with the texts of interpolations."""
    return OmegaConf.to_container(node, resolve=False)


# Where values come from.


@dataclass(frozen=True)
class Layer:
    """A file or an override with what it sets, by dotted keys."""

    source: str
    values: Plain


def layers(cfg: DictConfig) -> list[Layer]:
    """Return all that sets values in a composed config, the last word last."""
    found, typed = [], parsed(typed_in(cfg))
    lines = [str(o.input_line) for o in choices_in(typed)]
    for default in loader().files[cfg.hydra.job.config_name, *lines]:
        path, package = default.config_path, default.package or ""
        if path is None or path.startswith("hydra/") or package.startswith("hydra"):
            continue
        source, values, _ = file_at(path)
        below = f"{package}." if package else ""
        found.append(Layer(source, {f"{below}{key}": v for key, v in values.items()}))
    return found + [Layer(COMMAND_LINE, set_by(o)) for o in typed]


def set_by(override: Override) -> Plain:
    """Return what an override sets by dotted keys: nothing where it takes a key out or is swept."""
    if override.is_delete() or override.is_sweep_override() or chooses(override):
        return {}
    return flatten({override.key_or_group: override.value()})


@functools.lru_cache(maxsize=512)  # of the Hydra that is running; a refusal asks several times
def file_at(path: str) -> tuple[str, Plain, list[Any]]:
    """Return what the config file at `path`, such as clip/norm, sets.

    That is (the file's name for a user, the values by its own dotted keys, its defaults list); the
    name is the path where there is no such file."""
    loaded = loader().repository.load_config(path)
    if loaded is None:
        return path, {}, []
    folder = Path(str(loaded.path).partition("://")[2])
    where = "conf" if folder.resolve() == conf_dir().resolve() else os.path.relpath(folder)
    name = "the parent's config.yaml" if loaded.provider == PARENT else f"{where}/{path}.yaml"
    tree: Any = unresolved(loaded.config)
    tree = tree if isinstance(tree, dict) else {}
    empty = {key: value for key, value in tree.items() if value == {}}
    return name, flatten(tree) | empty, loaded.defaults_list or []


def option(path: str) -> Plain:
    """Return what the option at `path` sets by its own dotted keys, with what it begins with."""
    _, values, begins = file_at(path)
    below: Plain = {}
    for default in begins:
        base = str(getattr(default, "path", "")).rpartition("/")[2]
        below |= option(f"base/{base}") if (conf_dir() / f"base/{base}.yaml").exists() else {}
    return below | values


def options_of(group: str) -> list[str]:
    """Return the options that a user can choose from, without those that hold a fork's parent."""
    there = loader().get_group_options(group)
    return [name for name in there if re.fullmatch(rf"{PARENT}(_\d+)?", name) is None]


def origin(cfg: DictConfig, key: str) -> str | None:
    """Return the file in which a value was set last; None where the command line did that."""
    sources = [layer.source for layer in layers(cfg) if key in layer.values]
    return sources[-1] if sources and sources[-1] != COMMAND_LINE else None


# Overrides on their way into a config.


def chooses(override: Override) -> bool:
    """Return whether an override chooses or leaves out an option of a group."""
    group, value = override.key_or_group, override.value()
    return group != "hydra" and is_group(loader(), group) and not isinstance(value, dict)


@functools.lru_cache(maxsize=512)
def is_group(there: Any, name: str) -> bool:
    """Return whether a loader knows options of a group."""
    return bool(there.repository.group_exists(name))


def choices_in(overrides: Sequence[Override]) -> list[Override]:
    """Return those that choose, without sweeps: Hydra's own first, as configs note them."""
    found = [o for o in overrides if chooses(o) and not o.is_sweep_override()]
    return sorted(found, key=lambda o: not o.is_hydra_override())


def note_overrides(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """Note in a config the overrides that it is composed with, where Hydra does."""
    task = [o for o in overrides if not o.is_hydra_override()]
    own = [o.input_line for o in overrides if o.is_hydra_override()]
    cfg.hydra.overrides.hydra, cfg.hydra.overrides.task = own, [o.input_line for o in task]
    style = cfg.hydra.job.config.override_dirname
    cfg.hydra.job.override_dirname = get_overrides_dirname(
        task, style.exclude_keys, style.item_sep, style.kv_sep
    )


def at(tree: Any, key: str) -> Any:
    """Return the value at a dotted key of plain values, NO_DEFAULT where there is none."""
    for name in key.split("."):
        here = {str(k): value for k, value in nested(tree)}
        tree = here.get(name, NO_DEFAULT)
    return tree
