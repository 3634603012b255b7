"""Commands to paste: the one place that writes `llmexp ...`, and what installs a missing package.

Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llmexp.settings.values import is_ours, nested, override_value, pasteable

# They take no --allow, as they open no part of the user's.
_READS = ("compare", "next", "fit", "runs", "sync")
# The extra of llmexp that has a package, by the name that Python imports.
EXTRAS = {
    "accelerate": "eval", "aiohttp": "data", "datasets": "data", "fsspec": "data",
    "huggingface_hub": "data", "lm_eval": "eval", "mlflow": "mlflow", "optuna": "optuna",
    "pyarrow": "data", "pytorch_optimizer": "optimizers", "ray": "ray",
    "schedulefree": "optimizers", "sentencepiece": "tokenizers", "tensorboard": "tensorboard",
    "tokenizers": "tokenizers",
    "torchao": "optimizers", "trackio": "trackio", "transformers": "hf",
    "wandb_workspaces": "workspaces", "zstandard": "data",
}  # fmt: skip


def command(name: str, *given: object, parts: Iterable[str] = ()) -> str:
    """Return `llmexp NAME ...` as a shell takes it; see `command_words`."""
    return " ".join(["llmexp", *map(pasteable, command_words(name, *given, parts=parts))])


def command_words(name: str, *given: object, parts: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the words of a command after `llmexp`, with --allow where it is needed.

    A pair is the override KEY=VALUE, a path never looks like a flag; other words stand as they are.
    Allowed is what this process allows, and the packages of `parts`, such as `own_parts` finds.
    """
    words, allowed = [name], list[str]()
    rest = iter(given)
    for word in rest:
        if isinstance(word, tuple):
            key, value = word
            words.append(f"{key}={override_value(value)}")
        elif isinstance(word, Path):
            words.append(f"./{word}" if str(word).startswith("-") else str(word))
        elif str(word) == "--allow":
            allowed += str(next(rest, "")).split(",")
        elif str(word).startswith("--allow="):
            allowed += str(word).partition("=")[2].split(",")
        else:
            words.append(str(word))
    allowed += os.environ.get("LLMEXP_ALLOW", "").split(",")
    allowed = [package.strip() for package in allowed if package.strip()]
    for part in parts:
        if not any(f"{part}.".startswith(f"{package}.") for package in allowed):
            allowed.append(part.partition(".")[0])
    if allowed and name not in _READS:
        words += ["--allow", ",".join(dict.fromkeys(allowed))]
    return tuple(words)


def own_parts(config: Any) -> list[str]:
    """Return the functions of the user's own that a config names, nested or with dotted keys."""
    return list(dict.fromkeys(name for name in _targets(config) if not is_ours(name)))


def _targets(node: Any, inside: bool = False) -> Iterator[str]:
    """Yield each `_target_` of a config, and the names in its list of hooks."""
    for key, child in nested(node):
        if isinstance(child, str) and (inside or str(key).rpartition(".")[2] == "_target_"):
            yield child
        yield from _targets(child, key == "hooks")


def how_to_install(package: str) -> str:
    """Return the command that installs a package, by the extra of llmexp that has it."""
    extra = EXTRAS.get(package.partition(".")[0])
    return f"pip install 'llmexp[{extra}]'" if extra else f"pip install {package}"
