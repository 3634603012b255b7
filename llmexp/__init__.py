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

# The module of each name.
_PLACES = {
    "Answer": "program.judging",
    "ConfigError": "settings.values",
    "Evaluation": "program.judging",
    "Run": "program.folder",
    "RunFailed": "program.work",
    "average": "program.work",
    "compare": "program.judging",
    "evaluate": "program.judging",
    "export": "program.work",
    "fit": "program.judging",
    "load": "program.folder",
    "next_step": "program.judging",
    "plan": "program.work",
    "prepare": "program.work",
    "tokenizer": "program.work",
    "train": "program.work",
}
__all__ = list(_PLACES)


def _of_program(name: str) -> Any:
    return getattr(importlib.import_module(f"llmexp.{_PLACES[name]}"), name)


class _Called(ModuleType):
    """A package that is a function of `program` too: llmexp.train([...]), llmexp.compare(...)."""

    def __call__(self, *args: Any, **more: Any) -> Any:
        return _of_program(self.__name__.rpartition(".")[2])(*args, **more)


for _package in (compare, evaluate, train):
    _package.__class__ = _Called


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return _of_program(name)
    raise AttributeError(f"module 'llmexp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
