"""Composing a config at a third of what it takes: each command of the tests composes one, which was
a quarter of what they all cost.

A text is parsed once, a config is read once as long as its file is the same, and the same configs
are merged once; overrides are applied, checked and refused as ever. Where a name of Hydra or
OmegaConf here is gone, the tests do not start."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import _utils, base, omegaconf

CONF = Path(__file__).resolve().parents[2] / "conf"
KEPT = 64  # merged configs, of half a megabyte


def remember() -> None:
    _texts()
    _configs()
    _merged_configs()


def _texts() -> None:
    @functools.cache
    def parsed(text: str, loader: type) -> Any:
        return yaml.load(text, loader)

    def load(source: Any, Loader: type) -> Any:
        text = source if isinstance(source, str) else source.read()
        try:
            return parsed(text, Loader)
        except yaml.YAMLError:
            if text is not source:
                source.seek(0)
            return yaml.load(source, Loader)  # the error names the file

    _utils.get_yaml_loader = functools.cache(_utils.get_yaml_loader)
    omegaconf.yaml = SimpleNamespace(**{**vars(yaml), "load": load})
    for path in CONF.rglob("*.yaml"):
        parsed(path.read_text(encoding="utf-8"), _utils.get_yaml_loader())
    _utils.parse = base.parse = functools.lru_cache(4096)(base.parse)
    parse_rule = OverridesParser.parse_rule

    @functools.lru_cache(4096)
    def parsed_override(text: str, rule: str) -> Any:
        return parse_rule(OverridesParser.create(), text, rule)

    def copied(_: OverridesParser, s: str, rule_name: str) -> Any:
        return copy.deepcopy(parsed_override(s, rule_name))

    OverridesParser.parse_rule = copied


def _configs() -> None:
    """A config gets the key by which it is known."""
    read, configs = ConfigRepository.load_config, {}
    mapped = defaults_list._create_interpolation_map

    def known(self: ConfigRepository, config_path: str) -> Any:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.scheme() not in ("file", "pkg"):
            return read(self, config_path)
        if source.scheme() == "pkg" and source.provider != "hydra":  # its file may change
            found = read(self, config_path)
            found.key = object()
            return found
        key: tuple[str, ...] = (source.provider, source.path, config_path)
        if source.scheme() == "file":
            path = Path(source.path, source._normalize_file_name(config_path))
            key = (*key, path.read_text(encoding="utf-8"))
        if key not in configs:
            configs[key] = read(self, config_path)
            configs[key].key = key
        found = copy.copy(configs[key])
        found.config = copy.deepcopy(found.config)
        return found

    def needed(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        """Return the map for the entries with an interpolation, of which most lists have none."""
        if any(each.is_interpolation() for each in defaults):
            return mapped(overrides, defaults, self_added)
        return None

    ConfigRepository.load_config = known
    defaults_list._create_interpolation_map = needed


def _merged_configs() -> None:
    merge, kept = ConfigLoaderImpl._compose_config_from_defaults_list, {}

    def merged(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
        keys = (getattr(repo.load_config(d.config_path), "key", d.config_path) for d in defaults)
        key = (repr(defaults), *keys)
        if key not in kept:
            if len(kept) == KEPT:
                kept.clear()
            kept[key] = merge(self, defaults, repo)
        return copy.deepcopy(kept[key])

    ConfigLoaderImpl._compose_config_from_defaults_list = merged
