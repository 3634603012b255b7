"""Find where each value of a composed config comes from, and refuse knobs that do nothing.

The files count in the order in which they are merged, then the command line.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from llmexp.compose.forking import OPTION, PREFIX
from llmexp.compose.overrides import key_of, parsed, typed_in
from llmexp.settings.config import OPEN_SECTIONS, Config, conf_dir, plain
from llmexp.settings.knobs import dead, defaults, fields
from llmexp.settings.values import ConfigError, flatten, pasteable, refuse

COMMAND_LINE = "the command line"
CONFIG_NAME = "config"


@dataclass(frozen=True)
class Layer:
    """A file or an override with what it sets, by dotted keys."""

    source: str
    values: dict[str, Any]


def loader() -> Any:
    """Return what finds the files of configs, of the Hydra that is running."""
    return GlobalHydra.instance().config_loader()


def layers(overrides: Sequence[str], name: str = CONFIG_NAME) -> list[Layer]:
    """Return all that sets values, the last word last; `name`: of the config to begin with."""
    found, there = [], loader()
    for default in there.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults:
        path, package = default.config_path, default.package or ""
        if path is None or path.startswith("hydra/") or package.startswith("hydra"):
            continue
        source, values, _ = file_at(path)
        below = f"{package}." if package else ""
        found.append(Layer(source, {f"{below}{key}": v for key, v in values.items()}))
    for override in OverridesParser.create(config_loader=there).parse_overrides(list(overrides)):
        key = override.get_key_element().lstrip("+~")
        if not there.repository.group_exists(key) and not override.is_delete():
            value = override.value()
            values = flatten({key: value}) if isinstance(value, dict) else {key: value}
            found.append(Layer(COMMAND_LINE, values))
    return found


def file_at(path: str) -> tuple[str, dict[str, Any], list[str]]:
    """Return what the config file at `path`, such as clip/norm, sets.

    That is (the file's name for a user, the values by its own dotted keys, the paths of the files
    in conf/base that it begins with)."""
    return _read(loader(), path)


@functools.lru_cache(maxsize=512)
def _read(there: Any, path: str) -> tuple[str, dict[str, Any], list[str]]:
    """Return what `file_at` does; a refusal asks for each option several times."""
    loaded = there.repository.load_config(path)
    if loaded is None:
        return path, {}, []
    folder = Path(str(loaded.path).partition("://")[2])
    where = "conf" if folder.resolve() == conf_dir().resolve() else os.path.relpath(folder)
    name = f"{where}/{path}.yaml"
    tree: Any = OmegaConf.to_container(loaded.config, resolve=False)
    begins = [str(getattr(default, "path", "")) for default in loaded.defaults_list or []]
    bases = [f"base/{p.rpartition('/')[2]}" for p in begins if p.startswith("/base/")]
    if path.startswith("base/"):
        bases = [f"base/{p}" for p in begins if p != "_self_"]
    if folder.name.startswith(PREFIX):
        name = "the parent's config.yaml"
    empty = {key: value for key, value in (tree or {}).items() if value == {}}
    return name, flatten(tree or {}) | empty, bases


def option(path: str) -> dict[str, Any]:
    """Return what the option at `path` sets by its own dotted keys, with what it begins with."""
    _, values, bases = file_at(path)
    below: dict[str, Any] = {}
    for base in bases:
        below |= option(base)
    return below | values


def options_of(group: str) -> list[str]:
    """Return the options that a user can choose from, without those that hold a fork's parent."""
    there = loader().get_group_options(group)
    return [name for name in there if re.fullmatch(rf"{OPTION}(_\d+)?", name) is None]


def refuse_dead(cfg: DictConfig, config: Config, chosen: bool) -> None:
    """Raise ConfigError for a knob that does nothing where it is set.

    That is on the command line to any value but null, and in a file to a value of its own. What
    was not `chosen` now, but is the config of an earlier run, is let be."""
    flat = flatten(plain(config))
    given = typed_keys(typed_in(cfg))
    for key, (why, instead) in dead(flat).items():
        set_now = key in given or (chosen and not is_default(cfg, key, flat))
        if flat[key] is not None and set_now:
            file = None if key in given else origin(cfg, key)
            out = f"it is set in {file}: take it out with ~{key}" if file else "leave it out"
            raise refuse("idle_knob", key, flat[key], f"{why}; {out}, or {instead}")


# Keys that act in a sweep only, and keys that act in a single run only, with what to do instead.
SWEEP_ONLY = (
    "sweep.", "hydra/launcher", "hydra/sweeper", "hydra.launcher.", "hydra.sweeper.",
    "hydra.sweep.",
)  # fmt: skip
RUN_ONLY = {
    "hydra.run.dir": (
        "names the folder of a single run; that of a sweep is",
        "hydra.sweep.dir",
    ),
    "train.stop_step": (
        "does nothing in a sweep, whose points train to their end; leave it out, or for shorter "
        "points give",
        "train.max_steps",
    ),
}


def refuse_unused(overrides: Sequence[str], multirun: bool) -> None:
    """Raise ConfigError for an override that acts in a sweep only, or in a single run only."""
    if multirun and "sweep.resume" in map(key_of, overrides):
        return  # its command was accepted when it began
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if (section := key.partition(".")[0]) in ("plan", "prepare") and section != key:
            raise refuse(
                "idle_knob", key, value, f"does nothing but in llmexp {section}; leave it out"
            )
        if not multirun and key.startswith(SWEEP_ONLY):
            text = "does nothing without -m, which makes the command a sweep"
            raise refuse("idle_knob", key, value, f"{text}; add -m, or leave it out")
        if multirun and key in RUN_ONLY and value != "null":
            text, instead = RUN_ONLY[key]
            word = pasteable(f"{instead}={value.partition(',')[0]}")
            raise refuse("idle_knob", key, value, f"{text} {word}")


def typed_keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys of overrides; those of a value that is a whole section one by one."""
    found = set()
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        section = parsed([override])[0].value() if value[:1] == "{" else None
        found |= set(flatten({key: section})) if isinstance(section, dict) else {key}
    return found


def refuse_unplaced(tree: dict[str, Any], cfg: DictConfig) -> None:
    """Raise ConfigError for an experiment whose settings are under `experiment`.

    Nothing reads them there."""
    if isinstance(tree.get("experiment"), dict):
        choice = cfg.hydra.runtime.choices.get("experiment")
        source, *_ = file_at(f"experiment/{choice}")
        text = "without it all that it sets is put under `experiment`, where nothing reads it"
        line = "must begin with the line `# @package _global_`"
        raise ConfigError("idle_knob", f"experiment={choice}: {source} {line}; {text}")


def is_default(cfg: DictConfig, key: str, flat: dict[str, Any]) -> bool:
    """Return whether the value of a knob that does nothing was not chosen.

    It is then the default, or that of the chosen option."""
    value, (section, _, name) = flat[key], key.partition(".")
    if value is None or value == defaults().get(key, dataclasses.MISSING):
        return True
    choice = cfg.hydra.runtime.choices.get(section)
    if choice is None:
        return False
    chosen = flatten({section: option(f"{section}/{choice}")})
    if chosen.get(key, dataclasses.MISSING) == value and key not in dead(chosen):
        return True
    shipped = sorted((conf_dir() / section).glob("*.yaml")) if section in OPEN_SECTIONS else ()
    return any(option(f"{section}/{file.stem}").get(name) == value for file in shipped)


def origin(cfg: DictConfig, key: str) -> str | None:
    """Return the file in which a value was set last; None where the command line did that."""
    found = layers(typed_in(cfg), cfg.hydra.job.config_name)
    sources = [layer.source for layer in found if key in layer.values]
    return sources[-1] if sources and sources[-1] != COMMAND_LINE else None


def not_in_option(choices: dict[str, Any], key: str, value: str, flat: dict[str, Any]) -> str:
    """Return the refusal of a key that is a knob, but not of the chosen option.

    Empty for other keys. `flat`: the config without the override."""
    section, _, name = key.partition(".")
    if key in fields() and key in (idle := dead(flat | {key: value})):
        return str(refuse("idle_knob", key, value, "{}; leave it out, or {}".format(*idle[key])))
    if section not in choices or "." in name:
        return ""
    having = [o for o in options_of(section) if name in option(f"{section}/{o}")]
    if not having:
        return ""
    if (chosen := choices[section]) == OPTION:
        text = f"the {section} that the run folder has takes no such knob"
    else:
        text = f"the option {section}={chosen} has no such knob"
    example = f"; for example {section}={having[0]} {pasteable(f'{key}={value}')}" if value else ""
    return f"{key}: {text}; these have it: {', '.join(having)}{example}"
