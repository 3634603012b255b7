"""llmexp: Hydra-configured language-model pretraining experiments in plain PyTorch.

A program gets the names in `__all__` from here (docs/python.md). Nothing slow is imported before
one of them is used.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from llmexp import compare, evaluate, train

__version__ = "0.1.0"

# The module of each name; the others are functions of commands.
_PLACES = {
    "Answer": "cli.compare",
    "ConfigError": "config.values",
    "Evaluation": "cli.evaluate",
    "Run": "api.folder",
    "RunFailed": "api.training",
    "load": "api.folder",
    "train": "api.training",
}
_COMMANDS = {
    name.replace("next", "next_step"): name
    for name in ("average", "compare", "evaluate", "explain", "export", "fit", "next", "plan",
                 "prepare", "replay", "tokenizer")
}  # fmt: skip
__all__ = sorted([*_PLACES, *_COMMANDS])


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"llmexp.{_PLACES[name]}"), name)
    if name in _COMMANDS:
        return importlib.import_module("llmexp.api.calling").called(_COMMANDS[name])
    raise AttributeError(f"module 'llmexp' has no attribute {name!r}")


class _Called(ModuleType):
    """A package that is a function of `api` too: llmexp.train([...]), llmexp.compare(...)."""

    def __call__(self, *args: Any, **more: Any) -> Any:
        return __getattr__(self.__name__.rpartition(".")[2])(*args, **more)


for _package in (compare, evaluate, train):
    _package.__class__ = _Called


def __dir__() -> list[str]:
    return __all__
