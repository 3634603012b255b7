"""From the dotted name in a section's `_target_` to a function with checked arguments.

Only our own parts and callables of packages that the user named with --allow or LLMEXP_ALLOW are
found: a config file alone cannot run arbitrary code.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

from llmexp.config.convert import checked_knob, convert_value
from llmexp.config.parts import COMMON, declared
from llmexp.config.values import (
    NO_DEFAULT,
    ConfigError,
    Knob,
    Plain,
    hint,
    is_ours,
    nearest,
    nested,
    refuse,
)
from llmexp.config.variables import fill

# The modules of our own parts, by section. Not all of llmexp: it has functions that write files and
# start processes.
OWN = {
    "model": ("llmexp.models",),
    "data": ("llmexp.data.sources",),
    "tokenizer": ("llmexp.data.tokenizers",),
    "optimizer": ("llmexp.optim.optimizers",),
    "schedule": ("llmexp.optim.schedule",),
    "hooks": ("llmexp.verify.record",),
}
MOST_FRAMES = 12  # of the user's code, that an error shows
_OTHER = "resume a run of another version with that version"
_EXAMPLES = {"hooks": "mymodel.watch"}  # of a `_target_`
# Hydra's words for calling functions
RESERVED = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")


def allowed_packages(section: str) -> list[str]:
    """Return the modules of our parts of a section, and the packages that the user allowed.

    Those stand in LLMEXP_ALLOW, separated by commas; --allow adds to it.
    """
    extra = [name.strip() for name in os.environ.get("LLMEXP_ALLOW", "").split(",")]
    return [name for name in (*OWN.get(section, ()), *extra) if name]


def inside(module: str, packages: list[str]) -> bool:
    """Return whether a module is one of the packages, or in one of them."""
    return any(module == p or module.startswith(p + ".") for p in packages)


def inside_allowed(module: str) -> bool:
    """Return whether a module is in a package that the user allowed."""
    return inside(module, allowed_packages(""))


def _defined_in(found: Any) -> str:
    """Return the module that a function or class is really from, whatever it says of itself.

    For a function this is the module whose globals it uses, beneath partial and wraps. A class must
    be found again in the module that it names. Other callables have none: the empty string.
    """
    while callable(found) and not isinstance(found, type):
        is_partial = isinstance(found, functools.partial)
        inner = found.func if is_partial else getattr(found, "__wrapped__", None)
        if inner is None:
            break
        found = inner
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
    """Return the callable that `dotted` names.

    Raises ConfigError for anything outside the allowed packages.
    """
    if not isinstance(dotted, str) or "." not in dotted.strip("."):
        example = "[mymodel.watch]" if key == "hooks" else "llmexp.optim.optimizers.adamw.adamw"
        raise refuse("wrong_type", key, dotted, "the dotted name of a function is needed", example)
    packages = allowed_packages(key.partition(".")[0])
    module_name, _, name = dotted.rpartition(".")
    found, defined = None, module_name
    if inside(module_name, packages):
        found = getattr(_imported(key, dotted, module_name), name, NO_DEFAULT)
        if found is NO_DEFAULT:
            known = [n for n in dir(sys.modules[module_name]) if not n.startswith("_")]
            text = f"{module_name} has no {name}.{nearest(name, known)}"
            text += f"; {_OTHER}" if is_ours(module_name) else ""
            raise refuse("unknown_option", key, dotted, text)
        # Decided on what was found, not on its name: llmexp.x.os.system is still os.system.
        defined = _defined_in(found)
    if not callable(found) or not inside(defined, packages):
        way = "to allow a package of yours: --allow mypackage"
        text = f"is outside the allowed packages ({', '.join(packages) or 'none'})"
        raise refuse("not_allowed", key, dotted, f"{text}; {_OTHER if is_ours(dotted) else way}")
    return cast(Callable[..., Any], found)


def _imported(key: str, dotted: str, name: str) -> types.ModuleType:
    """Return a module that may hold a part. Raises ConfigError."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and (name == absent or name.startswith(absent + ".")):
            text = f"there is no module {absent} on the path (looked in the current folder too)"
            raise refuse("missing_package", key, dotted, text) from None
        text = f"importing {name} failed: {described(error)}"
        raise refuse("bad_own_part", key, dotted, text) from error


def described(error: BaseException) -> str:
    """Return an exception of the user's code in words, and below them the lines that led to it.

    Only lines of the user's own files are shown, the last one last.
    """
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:  # it has no frame in the file
        return f"{text}\n" + "".join(traceback.format_exception_only(error)[:-1]).rstrip("\n")
    frames = _own_frames(error)
    return f"{text}\n" + "".join(frames.format()).rstrip("\n") if frames else text


def own_line(error: BaseException, *, or_any: bool = True) -> str:
    """Return FILE:LINE of the user's own code where an exception came from.

    Where it came from other code: the place there, or without `or_any` the empty string.
    """
    frames = _own_frames(error) or (traceback.extract_tb(error.__traceback__) if or_any else [])
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _own_frames(error: BaseException) -> traceback.StackSummary:
    """Return the frames of an exception, or of its cause, that are in allowed packages."""
    frames = [
        pair for pair in traceback.walk_tb(error.__traceback__)
        if inside_allowed(str(pair[0].f_globals.get("__name__")))
    ]  # fmt: skip
    if not frames and error.__cause__ is not None:
        return _own_frames(error.__cause__)
    return traceback.StackSummary.extract(iter(frames[-MOST_FRAMES:]))


def place(found: Any) -> str:
    """Return " (FILE:LINE)" of a function or class, or the empty string if it is not known."""
    found = inspect.unwrap(found.func if isinstance(found, functools.partial) else found)
    try:
        file, (_, line) = inspect.getsourcefile(found), inspect.getsourcelines(found)
    except (OSError, TypeError):
        return ""
    return f" ({os.path.abspath(file)}:{line})" if file else ""


def refuse_calls(key: str, value: Any) -> None:
    """Raise ConfigError for a section inside `value` that would have Hydra call something."""
    for name, child in nested(value):
        if name in RESERVED:
            way = "give plain values, and call what you need in your own function"
            text = f"nothing is called from inside a section; {way}"
            raise ConfigError("not_allowed", f"{key}.{name}={child}: {text}")
        refuse_calls(f"{key}.{name}", child)


def bind(
    section: str,
    values: Mapping[str, Any],
    offered: Mapping[str, Any],
    finish: Callable[[Any], Any] = lambda found: found,
) -> Callable[..., Any]:
    """Return the section's function, bound to its knobs and to what it takes of `offered`.

    `finish` makes the result of what it returns.

    Raises ConfigError for knobs that the signature does not have (with the nearest one), that do
    not fit or that are missing; and, when it is called, for an exception of the user's own code.
    """
    target, knobs = resolve(section, values, tuple(offered))
    signature = inspect.signature(target)
    extra = {k: v for k, v in offered.items() if k in signature.parameters and k not in knobs}

    def call(*args: Any) -> Any:
        try:
            return finish(target(*args, **knobs, **extra))
        except (ConfigError, MemoryError):
            raise
        except Exception as error:
            try:
                signature.bind(*args, **knobs, **extra)
            except TypeError as misfit:
                text = f"{section}: {values['_target_']}: {misfit}"
                raise ConfigError("missing_value", text) from None
            if (refused := _refused(section, values["_target_"], target, error)) is None:
                raise
            raise refused from error

    return call


def _refused(section: str, dotted: str, target: Any, error: Exception) -> ConfigError | None:
    """Return the refusal of knobs with which a section's function fails; None: it is our fault."""
    text, is_value = str(error), isinstance(error, ValueError)
    named = is_value and (f"{section}." in text or f"{section}=" in text)
    if type(error).__name__ == "OutOfMemoryError":  # torch's
        return None
    if not named and (inside_allowed(_defined_in(target)) or _own_frames(error)):
        return ConfigError("bad_own_part", f"{section}: {dotted} failed: {described(error)}")
    if not is_value:
        return None
    return ConfigError("out_of_range", text if named else f"{section}: {text}")


def resolve(
    section: str, values: Mapping[str, Any], offered: tuple[str, ...]
) -> tuple[Callable[..., Any], Plain]:
    """Return the callable that a section names, and the arguments that its knobs are.

    Variables of the environment are filled in here. `offered` are arguments that are no knobs.
    Raises ConfigError for knobs that the callable does not have, with the nearest one, and for
    values that do not fit their declaration.
    """
    values = fill(values, section)
    if "_target_" not in values:
        raise _nameless(section)
    common = COMMON.get(section, ())
    for name in common:
        if name in values:
            checked_knob(f"{section}.{name}", values[name])
    knobs = {str(k): v for k, v in values.items() if k != "_target_" and k not in common}
    refuse_calls(section, knobs)
    target = locate(f"{section}._target_", values["_target_"])
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in knobs:
        if name not in parameters and not takes_any:
            names = list(arguments_of(target)) or [n for n in parameters if n not in offered]
            text = f"{values['_target_']} has no such argument.{hint(name, names)}"
            raise ConfigError("unknown_key", f"{section}.{name}: {text}")
    for name, kind in _hints(target).items():
        if name not in knobs:
            continue
        if (known := declared(kind)) is not None:
            knobs[name] = convert_value(known[0], knobs[name], f"{section}.{name}", known[1])
        elif kind in (str, str | None) and isinstance(knobs[name], (bool, int, float)):
            convert_value(str, knobs[name], f"{section}.{name}", Knob(""))  # refuses a number
    return target, knobs


def _nameless(section: str) -> ConfigError:
    """Return the error for a section that does not say which function it is for."""
    example = _EXAMPLES.get(section.partition(".")[0], "llmexp.optim.optimizers.adamw.adamw")
    text = f"it names the function, for example {section}._target_={example}"
    return ConfigError("missing_value", f"{section}._target_: this key is missing; {text}")


def arguments_of(target: Callable[..., Any]) -> dict[str, tuple[Any, Knob]]:
    """Return (type, knob) of each argument that a function or a class declares as a knob."""
    found = {name: declared(kind) for name, kind in _hints(target).items()}
    return {name: one for name, one in found.items() if one is not None}


def _hints(target: Callable[..., Any]) -> Plain:
    """Return the annotations of the arguments of a function or a class."""
    is_plain = isinstance(target, type) and not dataclasses.is_dataclass(target)
    try:
        function = target.__init__ if is_plain else target
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # of the user's code, such as a name that only type checkers import
        return {}


def hook(entry: Any, number: int) -> tuple[str, Callable[..., Any]]:
    """Return the name of an entry of `hooks`, and its function of (event, context).

    A class, which is a feature of the user's, gets the `train.step.Setup` in their place. An entry
    is a name, or a section with arguments. Raises ConfigError.
    """
    key = f"hooks.{number}"
    if isinstance(entry, Mapping):
        found, knobs = resolve(key, entry, ("event", "context", "setup"))
        name = str(entry["_target_"])
    else:
        name = str(fill(entry, "hooks"))
        found, knobs = locate("hooks", name), {}
    gets = ("setup",) if is_class(found) else ("event", "context")
    try:
        inspect.signature(found).bind(*gets, **knobs)
    except TypeError as error:
        arguments = ", ".join([*gets, *(f"{knob}=..." for knob in knobs)])
        raise ConfigError(
            "bad_own_part",
            f"hooks={name}: cannot be called as ({arguments}): {error}{place(found)}",
        ) from None
    better = getattr(found, "better", {})
    if not isinstance(better, Mapping) or any(
        v not in ("lower", "higher") for v in better.values()
    ):
        raise ConfigError(
            "bad_own_part",
            f"hooks={name}: its attribute better={better!r} must name lower or higher by key, for "
            f"example {{'mine/norm': 'lower'}}{place(found)}",
        )
    return name, functools.partial(found, **knobs) if knobs else found


def is_class(hook: Callable[..., Any]) -> bool:
    """Return whether an entry of `hooks` is a class, with or without knobs."""
    return isinstance(getattr(hook, "func", hook), type)


def better_of(hook: Callable[..., Any]) -> dict[str, str]:
    """Return which figures of a hook are better lower or higher: its attribute `better`."""
    return dict(getattr(getattr(hook, "func", hook), "better", {}))
