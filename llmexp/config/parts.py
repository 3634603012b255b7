"""Find the knobs that the parts of a section share: models, sources, optimizers, schedules.

They stand beside the parts, in modules that import the standard library alone. A function takes
them by these names: `def sgd(model, lr: Knobs.lr)`. An argument of one function only is declared
there, with `Annotated` and `knob`. Among the shared ones are knobs that llmexp itself reads beside
the function (`COMMON`), and those of which resume, sweep and compare need to know more than that
another value changes the result.
"""

from __future__ import annotations

import functools
import importlib
import typing
from typing import Any

from llmexp.config.values import Knob

# Knobs that llmexp reads itself: no arguments of the functions.
COMMON = {
    "model": ("init_from", "init_grow", "size", "depth", "shape_rule"),
    "data": ("shuffle", "ignore_id"),
    "optimizer": ("rule", "reference", "exponents", "groups"),
}


# The module by section whose `Knobs` the parts of a section share.
SECTIONS = {
    "model": "llmexp.models.settings",
    "data": "llmexp.data.sources.settings",
    "tokenizer": "llmexp.data.tokenizers.settings",
    "optimizer": "llmexp.optim.optimizers.settings",
    "schedule": "llmexp.optim.schedule",
}


def declared(kind: Any) -> tuple[Any, Knob] | None:
    """Return (type, knob) of an argument that is declared with `Annotated`, else None."""
    for field in getattr(kind, "__metadata__", ()):
        if isinstance(found := getattr(field, "metadata", {}).get("knob"), Knob):
            return typing.get_args(kind)[0], found
    return None


@functools.cache
def arguments() -> dict[str, tuple[Any, Knob]]:
    """Return (type, knob) of the arguments in SECTIONS, by their dotted keys."""
    found = {}
    for section, module in SECTIONS.items():
        for name, kind in vars(importlib.import_module(module).Knobs).items():
            if (one := declared(kind)) is not None:
                found[f"{section}.{name}"] = one
    return found
