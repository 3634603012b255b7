"""llmexp: Hydra-configured language-model pretraining experiments in plain PyTorch.

A program gets `load`, `train`, `compare` and `Run` from here (docs/python.md). Nothing slow is
imported before one of them is used.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from llmexp import compare, train

__version__ = "0.1.0"

_IN_PROGRAM = ("load", "Answer", "Run", "RunFailed")


class _Called(ModuleType):
    """A package that is a function of `program` too: llmexp.train([...]), llmexp.compare(...)."""

    def __call__(self, *args: Any, **more: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("llmexp.program"), name)(*args, **more)


for _package in (compare, train):
    _package.__class__ = _Called


def __getattr__(name: str) -> Any:
    if name in _IN_PROGRAM:
        return getattr(importlib.import_module("llmexp.program"), name)
    if name == "ConfigError":
        return importlib.import_module("llmexp.values").ConfigError
    raise AttributeError(f"module 'llmexp' has no attribute {name!r}")
