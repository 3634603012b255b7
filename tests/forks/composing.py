"""What composing a config takes, once for all commands: each of the suite composes one, which was a
quarter of what the suite cost.

The private names of Hydra and OmegaConf here make no result; where one is gone, the tests fail at
their start."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONF = Path(__file__).resolve().parents[2] / "conf"


def remember() -> None:
    """Have Hydra and OmegaConf parse a text once."""
    import yaml
    from hydra._internal import defaults_list
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import _utils, base, omegaconf

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

    parse_rule, mapped = OverridesParser.parse_rule, defaults_list._create_interpolation_map

    @functools.lru_cache(4096)
    def parsed_override(text: str, rule: str) -> Any:
        return parse_rule(OverridesParser.create(), text, rule)

    def copied(_: OverridesParser, s: str, rule_name: str) -> Any:
        return copy.deepcopy(parsed_override(s, rule_name))

    def needed(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        """Return the map for the entries with an interpolation, of which most lists have none."""
        if any(each.is_interpolation() for each in defaults):
            return mapped(overrides, defaults, self_added)
        return None

    OverridesParser.parse_rule = copied
    defaults_list._create_interpolation_map = needed
    _utils.parse = base.parse = functools.lru_cache(4096)(base.parse)
