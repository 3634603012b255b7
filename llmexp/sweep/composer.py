"""Compose the points of a sweep: what they share is composed once."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict

from llmexp.compose.overrides import is_group, loader, note_overrides, parsed, unresolved

_PLAIN = re.compile(r"(?!fork\.run\.)(\w+\.)+")  # a key, and a dot


class Composer:
    """From the overrides of a point to its config.

    Hydra composes the first of the points that differ in plain values alone (numbers, texts,
    switches); of the others these values are put into that config, with the same words of
    OmegaConf's as Hydra has for them.
    """

    def __init__(self, base: DictConfig) -> None:
        self._loader, self.base = loader(), base
        self._of_hydra = parsed(unresolved(base.hydra.overrides)["hydra"])
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str], name: str) -> DictConfig:
        """Return the config of the point with this name, which the next call may change.

        Raises Hydra's exceptions.
        """
        asked = parsed(overrides)
        plain = self._plain(asked)
        shape = tuple(o.key_or_group if o in plain else str(o.input_line) for o in asked)
        cfg = self._composed.get(shape)
        if cfg is None:
            cfg = self._loader.load_sweep_config(self.base, list(overrides))
            self._composed[shape] = cfg
        else:
            for override in plain:
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
            note_overrides(cfg, [*self._of_hydra, *asked])
        with open_dict(cfg):
            cfg.hydra.job.name = name
            cfg.hydra.job.id = cfg.hydra.job.num = "???"
        return cfg

    def _plain(self, asked: Sequence[Override]) -> list[Override]:
        """Return the overrides that do no more than put a value in the place of another one.

        No other override is for the same key, a section of it or one in it.
        """
        keys = [f"{o.key_or_group}." for o in asked if not is_group(self._loader, o.key_or_group)]
        found = []
        for o in asked:
            own, kind = f"{o.key_or_group}.", (o.type, o.package, o.is_hydra_override())
            alone = [key for key in keys if key.startswith(own) or own.startswith(key)] == [own]
            # fork.run decides what the others are put over
            if alone and kind == (OverrideType.CHANGE, None, False) and _PLAIN.fullmatch(own):
                value = o.value()
                scalar = value is None or isinstance(value, (bool, int, float, str))
                if scalar and "$" not in str(value):
                    found.append(o)
        return found
