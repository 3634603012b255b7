"""`_target_`: from a dotted name in a config to a function, and its arguments checked against its signature.

Only our own parts and callables under packages that the user named with --allow or LLMEXP_ALLOW are found: a config
file alone cannot run arbitrary code.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

from llmexp.config import ConfigError, nearest, refuse

# Where our own parts of a section are. Not all of llmexp: it has functions that write files and start processes.
OWN = {
    "model": "llmexp.models",
    "data": "llmexp.data.sources",
    "tokenizer": "llmexp.data.tokenizers",
    "optimizer": "llmexp.optim",
    "schedule": "llmexp.schedule",
    "hooks": "llmexp.verify.record",
}
RESERVED = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")  # Hydra's words for calling functions


def allowed_packages(section: str) -> list[str]:
    """Our own parts of the section and the user's packages from LLMEXP_ALLOW (comma-separated; --allow adds to it)."""
    extra = [name.strip() for name in os.environ.get("LLMEXP_ALLOW", "").split(",")]
    return [name for name in (OWN.get(section, ""), *extra) if name]


def _inside(module: str, packages: list[str]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def inside_allowed(module: str) -> bool:
    """Whether a module is in a package that the user allowed."""
    return _inside(module, allowed_packages(""))


def _defined_in(found: Any) -> str:
    """The module that a function or class is really from, whatever it says of itself; empty for anything else.

    Of a function it is the module whose globals it uses, beneath partial and wraps. A class must be found again in the
    module that it names. Builtins, bound methods and other objects that can be called have none.
    """
    while True:
        if isinstance(found, functools.partial):
            found = found.func
        elif callable(found) and getattr(found, "__wrapped__", None) is not None and not isinstance(found, type):
            found = found.__wrapped__
        else:
            break
    module = str(getattr(found, "__module__", None))
    if isinstance(found, types.FunctionType):
        return module if module == found.__globals__.get("__name__") else ""
    if isinstance(found, type) and module in sys.modules:
        holder: Any = sys.modules[module]
        for part in found.__qualname__.split("."):
            holder = getattr(holder, part, None)
        return module if holder is found else ""
    return ""


def locate(key: str, dotted: Any) -> Callable[..., Any]:
    """The callable that `dotted` names. Raises ConfigError for anything outside the allowed packages."""
    if not isinstance(dotted, str) or "." not in dotted.strip("."):
        raise refuse(key, dotted, "the dotted name of a function is needed", "llmexp.optim.adamw")
    packages = allowed_packages(key.partition(".")[0])
    module_name, _, name = dotted.rpartition(".")
    not_allowed = refuse(
        key,
        dotted,
        f"is outside the allowed packages ({', '.join(packages) or 'none'}); a package of your own is allowed by its "
        "name on the command line: --allow mypackage",
    )
    if not _inside(module_name, packages):
        raise not_allowed
    try:
        found = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(f"{key}={dotted}: importing {module_name} failed: {error}") from error
        raise refuse(
            key, dotted, f"there is no module {error.name} on the path (looked in the current folder too)"
        ) from None
    except AttributeError:
        known = [n for n in dir(importlib.import_module(module_name)) if not n.startswith("_")]
        raise refuse(key, dotted, f"{module_name} has no {name}.{nearest(name, known)}") from None
    # Decided on what was found, not on its name: llmexp.x.os.system is still os.system.
    if not callable(found) or not _inside(_defined_in(found), packages):
        raise not_allowed
    return cast(Callable[..., Any], found)


def refuse_calls(key: str, value: Any) -> None:
    """Raises ConfigError for a section inside `value` that would have Hydra call something."""
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        if name in RESERVED:
            raise ConfigError(
                f"{key}.{name}={child}: nothing is called from inside a section; give plain values, and call what you "
                "need in your own function"
            )
        refuse_calls(f"{key}.{name}", child)


def bind(section: str, values: Mapping[str, Any], offered: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of further arguments, bound to the section's knobs and to those of `offered` that it accepts.

    Variables of the environment are filled in before (`llmexp.assemble.filled`).
    Raises ConfigError for knobs that the signature does not have (with the nearest one) or that are missing.
    """
    if "_target_" not in values:
        raise ConfigError(
            f"{section}._target_: this key is missing; it names the function, for example "
            f"{section}._target_=llmexp.optim.adamw"
        )
    refuse_calls(section, {k: v for k, v in values.items() if k != "_target_"})
    target = locate(f"{section}._target_", values["_target_"])
    knobs = {k: v for k, v in values.items() if k != "_target_"}
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in knobs:
        if name not in parameters and not takes_any:
            names = [n for n in parameters if n not in offered]
            raise ConfigError(
                f"{section}.{name}: {values['_target_']} has no such argument.{nearest(name, names)} "
                f"Known: {', '.join(names)}"
            )
    extra = {k: v for k, v in offered.items() if k in parameters and k not in knobs}

    def call(*args: Any) -> Any:
        try:
            inspect.signature(target).bind(*args, **knobs, **extra)
        except TypeError as error:
            raise ConfigError(f"{section}: {values['_target_']}: {error}") from None
        try:
            return target(*args, **knobs, **extra)
        except ConfigError:
            raise
        except ValueError as error:
            named = f"{section}." in str(error) or f"{section}=" in str(error)
            raise ConfigError(str(error) if named else f"{section}: {error}") from error

    return call
