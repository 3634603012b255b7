"""Load a config: Hydra puts files and options together, values are put in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.default_element import ResultDefault
from hydra.errors import MissingConfigException
from omegaconf import DictConfig

from llmexp.compose import forking
from llmexp.compose.overrides import (
    choices_in,
    chooses,
    file_at,
    key_of,
    loader,
    note_overrides,
    options_of,
    parsed,
)
from llmexp.compose.putting import put
from llmexp.compose.security import KEPT_BACK, refuse_code, refuse_files
from llmexp.config.kinds import Kind
from llmexp.config.sections import conf_dir
from llmexp.config.values import ConfigError, hint


class Loader(ConfigLoaderImpl):
    """Have Hydra put files together; put what else stands on a command line into them.

    So is each config that Hydra composes, also by itself, and nothing in it runs code. `files` has
    the files of each, by its name and what is chosen of groups: Hydra takes long to find them.
    `command`, `typed`: what was typed; `beneath`: the run whose config stands for config.yaml.
    """

    command: str
    typed: list[str]
    beneath: Path | None
    files: dict[tuple[str | None, ...], Sequence[ResultDefault]]

    def load_configuration(
        self, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
    ) -> DictConfig:
        load, asked = super().load_configuration, parsed(overrides)
        choices = choices_in(asked)
        if self.beneath or any(key_of(o) == "fork.run" for o in overrides):
            config_name = forking.root_of(self.beneath, overrides) or config_name
        lines = [str(o.input_line) for o in choices]
        try:
            cfg = load(config_name, lines, *args, **kwargs)
        except (ConfigError, yaml.YAMLError):
            raise
        except Exception as error:
            raise _misfit(
                error, lines, lambda words: load(config_name, words, *args, **kwargs)
            ) from None
        self.files[config_name, *lines] = self._last
        refuse_code(cfg)
        values = [o for o in asked if o not in choices and not o.is_sweep_override()]
        swept = [o for o in asked if o.is_sweep_override() and not chooses(o)]
        by_hand = [o for o in values if o.key_or_group.startswith(KEPT_BACK)]
        put(cfg, [o for o in values if o not in by_hand], swept)
        refuse_files(cfg, choices)
        put(cfg, by_hand)
        note_overrides(cfg, asked)
        cfg.hydra.job.config_name = config_name  # whatever an override said
        refuse_code(cfg)
        return cfg

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: Any
    ) -> DictConfig:
        self._last = defaults
        return super()._compose_config_from_defaults_list(defaults, repo)


def _misfit(error: Exception, lines: list[str], load: Callable[[list[str]], object]) -> ConfigError:
    """Return the refusal of options that Hydra does not put together."""
    missing = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
    if missing:
        group, _, word = missing.rpartition("/")
        text = f"{group}={word}: there is no such option.{hint(word, options_of(group))}"
        return ConfigError("unknown_option", text, group)
    line = "conf/config.yaml"
    for line in lines:  # that without which the others go together
        with suppress(Exception):
            load([other for other in lines if other != line])
            break
    key, _, word = line.lstrip("+~").partition("=")
    source, _, begins = file_at(f"{key}/{word}")
    groups = [g for g in loader().list_groups("") if (conf_dir() / g).exists()]
    for group in (key, *(str(getattr(d, "group", None) or key).lstrip("/") for d in begins)):
        if group.partition("/")[0] not in groups:
            text = f"{line}: there is no group {group} to choose from.{hint(group, groups)}"
            return ConfigError("unknown_option", text, key)
    kind: Kind = "unknown_option"
    if line[0] in "+~":
        text = f"{key} has one option; another is chosen by {key}=..., and ~{key} leaves it out"
    elif source == f"{key}/{word}":
        text = f"an option of the group is needed. Known: {', '.join(options_of(key))}."
    elif isinstance(error, RecursionError):
        kind = "conflict"
        text = f"{source} chooses itself in its `defaults`, or a file that chooses it"
    else:
        kind = "wrong_type"
        text = f"{source} has a section in the place of a list or a value of the files before it, "
        text += "or the other way round, or chooses a group again in its `defaults`"
    return ConfigError(kind, f"{line}: {text}", key)
