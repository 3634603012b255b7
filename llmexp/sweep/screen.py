"""Make the points of a screen: a fraction of all combinations of keys with two values each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from llmexp.compare.screening import design
from llmexp.settings.knobs import SEED
from llmexp.settings.values import ConfigError, refuse
from llmexp.sweep.points import asked_of, grid_of
from llmexp.sweep.settings import Sweep

SIZES = (8, 16, 32)


def screened(
    hydra: Any, cfg: DictConfig, overrides: Sequence[str], runs: int | str
) -> list[list[str]]:
    """Return the overrides of each point, all with every seed that is given. Raises ConfigError."""
    asked = asked_of(hydra, cfg, overrides)
    swept = {o.get_key_element(): o for o in asked if o.is_sweep_override()}
    values: dict[str, list[str]] = {}
    for key, o in swept.items():
        values[key] = list(o.sweep_string_iterator()) if o.is_discrete_sweep() else []
        if key != SEED and len(values[key]) != 2:
            text = "a screen takes two values of each key"
            raise ConfigError(f"{o.input_line}: {text}; for example {key}=1e-3,3e-3", key)
    seeds = [f"{SEED}={seed}" for seed in values.pop(SEED, [])]
    given = grid_of([o for o in asked if not o.is_sweep_override()])[0]
    levels = [[f"{key}={value}" for value in two] for key, two in values.items()]
    found = []
    for row in design(len(levels), size_of(len(levels), runs)):
        point = [*given, *(two[level] for two, level in zip(levels, row, strict=True))]
        found += [[*point, seed] for seed in seeds] if seeds else [point]
    return found


def size_of(keys: int, runs: int | str) -> int:
    """Return 16 runs for up to 8 keys, 32 for more: none is confounded with a pair up to 16 keys.

    Three keys have 8 combinations. A number that is given is only checked. Raises ConfigError.
    """
    if keys < 3:
        text = f"needs three keys or more with two values each, and has {keys}; "
        text += "train all combinations"
        raise refuse("sweep.screen", runs, text, "null")
    if runs == "auto":
        runs = 8 if keys == 3 else 16 if keys <= 8 else 32
    if runs not in SIZES:
        raise refuse("sweep.screen", runs, "must be 8, 16, 32 or auto", 16)
    if not int(runs).bit_length() - 1 <= keys < int(runs):
        fits = [n for n in SIZES if n.bit_length() - 1 <= keys < n]
        text = f"does not fit {keys} keys, which take {' or '.join(map(str, fits))} runs"
        raise refuse("sweep.screen", runs, text if fits else f"takes 31 keys at most, not {keys}",
                     fits[0] if fits else "32 with fewer keys")  # fmt: skip
    return int(runs)


def refuse_beside(settings: Sweep) -> None:
    """Raise ConfigError for knobs that a screen does not go with."""
    for name in ("decide", "halving", "twins"):
        if value := getattr(settings, name):
            text = "does not go with a screen, which trains each of its runs once; leave it out"
            raise refuse(f"sweep.{name}", value, text)
    if settings.search.trials is not None:
        text = "does not go with a screen; leave one of them out"
        raise refuse("sweep.search.trials", settings.search.trials, text)
