"""Where each value of a composed config comes from: the files in the order in which they are merged, then the command
line; and the refusal of knobs that are set and do nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from llmexp.config import OPEN_SECTIONS, Config, ConfigError, conf_dir, flatten, plain, refuse
from llmexp.knobs import dead, fields

COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Layer:
    """A file or an override with what it sets, by dotted keys."""

    source: str
    values: dict[str, Any]


def layers(loader: Any, name: str, overrides: Sequence[str]) -> list[Layer]:
    """All that sets values, the last word last."""
    found = []
    for default in loader.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults:
        path, package = default.config_path, default.package or ""
        if path is None or path.startswith("hydra/") or package.startswith("hydra"):
            continue
        source, values = option(loader, path)
        found.append(Layer(source, {f"{package}.{key}" if package else key: v for key, v in values.items()}))
    for override in OverridesParser.create(config_loader=loader).parse_overrides(list(overrides)):
        key = override.get_key_element().lstrip("+~")
        if not loader.repository.group_exists(key) and not override.is_delete():
            value = override.value()
            values = flatten({key: value}) if isinstance(value, dict) else {key: value}
            found.append(Layer(COMMAND_LINE, values))
    return found


def option(loader: Any, path: str) -> tuple[str, dict[str, Any]]:
    """(the file's name for a user, what it sets by its own dotted keys) of the config at `path`, such as clip/norm."""
    loaded = loader.repository.load_config(path)
    if loaded is None:
        return path, {}
    folder = Path(str(loaded.path).partition("://")[2])
    where = "conf" if folder.resolve() == conf_dir().resolve() else os.path.relpath(folder)
    tree: Any = OmegaConf.to_container(loaded.config, resolve=False)
    return f"{where}/{path}.yaml", flatten(tree or {})


def refuse_dead(cfg: DictConfig, config: Config) -> None:
    """Raises ConfigError for a knob that is set to a value of its own where it does nothing."""
    flat = flatten(plain(config))
    for key, (why, instead) in dead(flat).items():
        if not is_default(cfg, key, flat):
            file = origin(cfg, key)
            out = f"it is set in {file}: take it out with ~{key}" if file else "leave it out"
            raise refuse(key, flat[key], f"{why}; {out}, or {instead}")


def refuse_given(config: Config, given: Sequence[str]) -> None:
    """The same for keys of a command line that changes a run's own config."""
    flat = flatten(plain(config))
    for key, (why, instead) in dead(flat).items():
        if key in given and flat[key] not in (None, fields().get(key, {}).get("default")):
            raise refuse(key, flat[key], f"{why}; leave it out, or {instead}")


def refuse_unplaced(tree: dict[str, Any], cfg: DictConfig) -> None:
    """Raises ConfigError for an experiment whose settings are under `experiment`, where nobody reads them."""
    if isinstance(tree.get("experiment"), dict):
        choice = cfg.hydra.runtime.choices.get("experiment")
        source, _ = option(GlobalHydra.instance().config_loader(), f"experiment/{choice}")
        raise ConfigError(
            f"experiment={choice}: {source} must begin with the line `# @package _global_`; without it all that it "
            "sets is put under `experiment`, where nothing reads it"
        )


def is_default(cfg: DictConfig, key: str, flat: dict[str, Any]) -> bool:
    """Whether the value of a knob that does nothing is nobody's wish: its default, or that of the chosen option."""
    value, (section, _, name) = flat[key], key.partition(".")
    if value is None or value == fields().get(key, {}).get("default", dataclasses.MISSING):
        return True
    choice = cfg.hydra.runtime.choices.get(section)
    if choice is None:
        return False
    loader = GlobalHydra.instance().config_loader()
    chosen = flatten({section: dict(option(loader, f"{section}/{choice}")[1])})
    if chosen.get(key, dataclasses.MISSING) == value and key not in dead(chosen):
        return True
    shipped = sorted((conf_dir() / section).glob("*.yaml")) if section in OPEN_SECTIONS else ()
    return any(option(loader, f"{section}/{file.stem}")[1].get(name) == value for file in shipped)


def origin(cfg: DictConfig, key: str) -> str | None:
    """The file in which a value was set last; None where the command line did that."""
    from llmexp.hints import CONFIG_NAME

    loader = GlobalHydra.instance().config_loader()
    given = [str(o) for o in (*cfg.hydra.overrides.hydra, *cfg.hydra.overrides.task)]
    sources = [layer.source for layer in layers(loader, CONFIG_NAME, given) if key in layer.values]
    return sources[-1] if sources and sources[-1] != COMMAND_LINE else None


def not_in_option(loader: Any, choices: dict[str, Any], key: str, value: str, flat: dict[str, Any]) -> str:
    """The refusal of an override whose key the chosen option does not list though it is a knob; empty for other keys.
    `flat`: the config without the override."""
    section, _, name = key.partition(".")
    if key in fields() and key in (idle := dead(flat | {key: value})):
        return str(refuse(key, value, "{}; leave it out, or {}".format(*idle[key])))
    if section not in choices or "." in name:
        return ""
    having = [o for o in loader.get_group_options(section) if name in option(loader, f"{section}/{o}")[1]]
    if not having:
        return ""
    return f"{key}: the option {section}={choices[section]} has no such knob; these have it: {', '.join(having)}"
