"""Commands to paste: the one place that writes `llmexp ...`, and what installs a missing package.

Standard library only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmexp.config.targets import allowed_packages, inside
from llmexp.config.values import ConfigError, flatten, is_ours, nested, override_value, pasteable

# They take no --allow, as they open no part of the user's.
_READS = ("compare", "next", "fit", "runs", "sync")
# The packages that Python imports, by the extra of llmexp that has them.
EXTRAS = {
    "data": "aiohttp datasets fsspec huggingface_hub pyarrow zstandard",
    "eval": "accelerate lm_eval",
    "hf": "transformers",
    "optimizers": "pytorch_optimizer schedulefree torchao",
    "tokenizers": "sentencepiece tokenizers",
    "workspaces": "wandb_workspaces",
}  # the others are called as their package is


def command(name: str, *given: object, parts: Iterable[str] = ()) -> str:
    """Return `llmexp NAME ...` as a shell takes it; see `command_words`."""
    return " ".join(["llmexp", *map(pasteable, command_words(name, *given, parts=parts))])


def command_words(name: str, *given: object, parts: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the words of a command after `llmexp`, with --allow where it is needed.

    A pair is the override KEY=VALUE, a path never looks like a flag; other words stand as they are.
    Allowed is what this process allows, and the packages of `parts`, such as `own_parts` finds.
    """
    words = [name]
    for word in given:
        if isinstance(word, tuple):
            word = f"{word[0]}={override_value(word[1])}"
        elif isinstance(word, Path) and str(word).startswith("-"):
            word = f"./{word}"
        words.append(str(word))
    allowed = allowed_packages("")
    for part in parts:
        if not inside(part, allowed):
            allowed.append(part.partition(".")[0])
    if allowed and name not in _READS:
        words += ["--allow", ",".join(dict.fromkeys(allowed))]
    return tuple(words)


def own_parts(config: Mapping[str, Any]) -> list[str]:
    """Return the functions of the user's own that a config names, nested or with dotted keys."""
    flat = flatten(config)
    named = [value for key, value in flat.items() if key.endswith("._target_")]
    for _, hook in nested(flat.get("hooks")):
        named.append(hook.get("_target_") if isinstance(hook, Mapping) else hook)
    return [name for name in dict.fromkeys(map(str, named)) if not is_ours(name)]


def how_to_install(package: str) -> str:
    """Return the command that installs a package, by the extra of llmexp that has it."""
    name = package.partition(".")[0]
    extra = next((extra for extra, has in EXTRAS.items() if name in has.split()), name)
    return f"pip install 'llmexp[{extra}]'"


def need_package(package: str, key: str, what: str) -> Any:
    """Import an optional package. Raise ConfigError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        why = f"{what} needs the package {package}, which is not installed"
        raise ConfigError("missing_package", f"{key}: {why}; {how_to_install(package)}") from None
