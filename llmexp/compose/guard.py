"""Refuse a config that would have Hydra run code.

Hydra calls what a config names: callbacks, logging, sweeper, launcher. Under `hydra` a config may
choose a mode, folders, values to sweep over and one of our launchers with plain values; everything
that Hydra would call besides has to be what it is without any config.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_repository import ConfigRepository
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from llmexp.compose.overrides import key_of, parsed
from llmexp.runs.door import config_text
from llmexp.settings.kinds import Kind
from llmexp.settings.targets import RESERVED, inside_allowed, refuse_calls
from llmexp.settings.values import ConfigError, refuse

SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
# Knobs of launchers: shell lines, options of sbatch and of Ray, the address of a cluster.
BY_HAND = ("setup", "additional_parameters", "init", "address")
NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
# Keys under `hydra` that have to stay as they are: the values that mean so, and what to do.
RUN_NO_CODE = "a config file must not run code; {}"
KEEP_ENVIRONMENT = "a config does not change the environment; export it in your shell"
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "callbacks": ((None, {}), RUN_NO_CODE.format("for your own functions use hooks=[...]")),
    "job.env_set": ((None, {}), KEEP_ENVIRONMENT),
    "job.env_copy": ((None, []), KEEP_ENVIRONMENT),
    "hydra_logging": ((None, NO_LOGGING), RUN_NO_CODE.format("leave it at none")),
    "job_logging": ((None, NO_LOGGING), RUN_NO_CODE.format("leave it at none")),
}


class _Sized(ConfigRepository):
    """Take no file of the user's that is larger than a config: its aliases could make it endless.

    Hydra copies its repository to add the folders of hydra.searchpath, and the copy is one too.
    """

    def load_config(self, config_path: str) -> Any:
        source = next((one for one in self.sources if one.is_config(config_path)), None)
        if source is not None and source.provider not in ("main", "hydra", "schema"):
            folder = files(source.path) if source.scheme() == "pkg" else Path(source.path)
            with as_file(folder / f"{config_path.removesuffix('.yaml')}.yaml") as file:
                config_text(file)
        return super().load_config(config_path)


def guard(loader: Any) -> None:
    """Have `refuse_code` check each config that Hydra composes, before Hydra uses it."""
    load, loader.repository.__class__ = loader.load_configuration, _Sized

    def looked_at(
        config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
    ) -> DictConfig:
        # Hydra takes a key that is null for one that is not there: ~model.d_ff deletes it as well
        first = [f"{o[1:]}=0" for o in overrides if re.fullmatch(r"~(?!hydra)\w+(\.\w+)+", o)]
        cfg: DictConfig = load(config_name, [*first, *overrides], *args, **kwargs)
        del cfg.hydra.overrides.task[: len(first)]
        given: dict[str, list[str]] = {"task": [], "hydra": []}
        for override in overrides:
            of_hydra = key_of(override).startswith(("hydra.", "hydra/"))
            given["hydra" if of_hydra else "task"].append(override)
        if _plain(cfg.hydra).get("overrides") != given:
            text = "is what a command line says; a config file must not set it"
            raise ConfigError("not_allowed", f"hydra.overrides: {text}")
        refuse_code(cfg)
        return cfg

    loader.load_configuration = looked_at


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=False)


def refuse_code(cfg: DictConfig) -> None:
    """Raise ConfigError for what would have Hydra run code, or change the environment."""
    own = _plain(cfg)["hydra"]
    for key, (harmless, why) in FIXED.items():
        if _below(own, key) not in harmless:
            raise ConfigError("not_allowed", f"hydra.{key}: {why}")
    if _below(own, "sweeper") is not None:
        _check_sweeper(_resolved(cfg.hydra, "sweeper", "hydra.sweeper"))
    if _below(own, "launcher") is not None:
        _check_launcher(_resolved(cfg.hydra, "launcher", "hydra.launcher"), own)


def _check_launcher(launcher: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise ConfigError for a knob of a launcher that is no plain value, unless it was typed."""
    typed = _typed((own.get("overrides") or {}).get("hydra") or [])
    for key, value in launcher.items():
        if key in BY_HAND and value and own["launcher"][key] != typed.get(key):
            text = "runs what it says elsewhere, so it is taken from a command line, not from a "
            text += f"config file or a sweep.json; set it by hydra.launcher.{key}=..."
            raise ConfigError("not_allowed", f"hydra.launcher.{key}: {text}")
        if key not in BY_HAND and isinstance(value, (dict, list)):
            raise refuse("wrong_type", f"hydra.launcher.{key}", value, "a plain value is needed")
    refuse_calls("hydra.launcher", {k: v for k, v in launcher.items() if k != "_target_"})


def _below(own: Any, key: str) -> Any:
    """Return the value at a dotted key; of what an interpolation brings, its text."""
    for name in key.split("."):
        if not isinstance(own, dict):
            return own
        own = own.get(name)
    return own


def kind_of_config(error: Exception) -> Kind:
    """Return the kind of what OmegaConf and YAML refuse."""
    if isinstance(error, InterpolationKeyError):
        return "unknown_key"
    if isinstance(error, (InterpolationToMissingValueError, MissingMandatoryValue)):
        return "missing_value"
    return "damaged_file" if isinstance(error, yaml.YAMLError) else "wrong_type"


def _resolved(parent: Any, key: Any, name: str) -> Any:
    """Return the plain values that Hydra gets to see.

    Raises ConfigError for sections and lists that an interpolation brings from elsewhere, where
    nothing has checked them, and for values that are not there yet."""
    try:
        value = "???" if OmegaConf.is_missing(parent, key) else parent[key]
    except OmegaConfBaseException as error:
        raise ConfigError(kind_of_config(error), f"{name}: {str(error).splitlines()[0]}") from None
    if OmegaConf.is_interpolation(parent, key) and (
        key in RESERVED or OmegaConf.is_config(value) or isinstance(value, (dict, list))
    ):
        text = "may only bring a text or a number from elsewhere in the config; write it out here"
        raise refuse("not_allowed", name, _plain(parent)[key], text)
    if isinstance(value, DictConfig):
        return {k: _resolved(value, k, f"{name}.{k!s}") for k in value}
    if isinstance(value, ListConfig):
        return [_resolved(value, number, f"{name}.{number}") for number in range(len(value))]
    return value


def _typed(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what a command line says of those knobs of `hydra.launcher` that it alone may set."""
    whole = OmegaConf.create({"hydra": {"launcher": {}}})
    keys = tuple(f"hydra.launcher.{key}" for key in BY_HAND)
    for override in parsed(o for o in overrides if o.lstrip("+").startswith(keys)):
        OmegaConf.update(whole, override.key_or_group, override.value(), merge=True, force_add=True)
    return _plain(whole.hydra.launcher)


def _check_sweeper(sweeper: dict[str, Any]) -> None:
    """Raise ConfigError for another sweeper than Hydra's own, and for one that calls anything."""
    rest = dict(sweeper)
    if (target := rest.pop("_target_", None)) not in (None, SWEEPER):
        text = "is not used; a grid needs none, and a search is sweep.search.trials=30"
        raise ConfigError("not_allowed", f"hydra.sweeper._target_={target}: {text}")
    refuse_calls("hydra.sweeper", rest)


def refuse_search_path(config_dir: str | None, overrides: Sequence[str]) -> None:
    """Raise ConfigError for folders of configs that Hydra would find by importing a package.

    A package that is allowed is taken."""
    own = Path(config_dir or "", "config.yaml")
    if config_dir and own.exists():
        text = f"{own.name} there would take the place of ours; your own files are options of the "
        text += "groups: DIR/experiment/mine.yaml, then experiment=mine"
        raise ConfigError("not_allowed", f"--config-dir {config_dir}: {text}")
    for override in parsed(o for o in overrides if key_of(o).startswith("hydra.searchpath")):
        paths = override.value()
        for path in paths if isinstance(paths, list) else ():
            scheme, _, package = str(path).partition("://")
            if scheme == "pkg" and not inside_allowed(package.replace("/", ".")):
                text = "is imported; allow it with --allow"
                raise refuse("not_allowed", "hydra.searchpath", path, text, "file://conf")
