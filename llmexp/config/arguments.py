"""Make the command line of a function from its annotated arguments: names, types, help, ranges.

`steps: Annotated[int | None, "N", "optimizer steps"] = None` is the flag --steps N where it stands
after the `*`, else a word; several words where it is `*steps` or has a default. `count(...)` or
another knob in the place of the texts has its range checked too. Standard library only.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import types
import typing
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from llmexp.config.convert import convert_value
from llmexp.config.kinds import Kind
from llmexp.config.parts import declared
from llmexp.config.values import ConfigError, Knob, Plain, closest, did_you_mean

JSON_HELP = "print the answer as JSON"


class Parser(argparse.ArgumentParser):
    """Refuse a command line as everything else is refused, in place of ending the process.

    `--help` begins with the first paragraph of the function's docstring, and ends with the others.
    """

    def __init__(self, command: str, function: Callable[..., Any]) -> None:
        about, _, more = str(inspect.getdoc(function)).partition("\n\n")
        super().__init__(prog=command, description=about, epilog=more)
        add_arguments(self, function)

    def error(self, message: str) -> NoReturn:
        text = f"{message}; see {self.prog} --help.{near_flags(self, message)}".rstrip(".")
        raise ConfigError(kind_of_argparse(message), text)


def near_flags(parser: argparse.ArgumentParser, message: str) -> str:
    """Return a hint for flags that argparse does not recognize; empty where none is alike."""
    words = message.split() if message.startswith("unrecognized arguments") else []
    wrong = (word[2:].partition("=")[0] for word in words if word.startswith("--"))
    flags = [flag for action in parser._actions for flag in action.option_strings]
    known = [flag[2:] for flag in flags if flag.startswith("--")]
    near = [f"--{flag}" for word in wrong for flag in closest(word, known, cutoff=0.75)]
    return did_you_mean([" and ".join(near)] if near else [])


def kind_of_argparse(message: str) -> Kind:
    """Return the kind of what argparse refuses."""
    if message.startswith(("unrecognized arguments", "ambiguous option")):
        return "unknown_key"
    lacks = message.startswith("the following arguments are required") or ": expected" in message
    return "missing_value" if lacks else "wrong_type"


class Held(str):
    """A word that stands for a data frame, which a command line has not."""

    value: Any

    def __new__(cls, value: Any) -> Held:
        found = super().__new__(cls, "table")
        found.value = value
        return found


def annotated(
    function: Callable[..., Any],
) -> Iterator[tuple[inspect.Parameter, Any, Knob, str | None]]:
    """Yield the arguments that are annotated, each with its type, its knob, its value's name."""
    for parameter in inspect.signature(function).parameters.values():
        hint = parameter.annotation
        if isinstance(hint, str):  # of what the function returns nothing needs to be imported
            hint = eval(hint, function.__globals__)
        if (known := declared(hint)) is not None:
            yield parameter, *known, None
        elif texts := list(getattr(hint, "__metadata__", ())):
            kind = typing.get_args(hint)[0]
            yield parameter, kind, Knob(texts[-1]), texts[0] if texts[1:] else None


def flag_of(parameter: inspect.Parameter) -> str:
    """Return the flag of an argument: --no-check of one that is true by default."""
    name = parameter.name.removesuffix("_").replace("_", "-")
    return f"--no-{name}" if parameter.default is True else f"--{name}"


def add_arguments(
    parser: argparse.ArgumentParser, function: Callable[..., Any], words: bool = True
) -> None:
    """Add the annotated arguments of a function to a parser; without `words` its flags alone.

    A function that returns an answer takes --json; one that returns an exit code has printed all.
    """
    for parameter, kind, knob, metavar in annotated(function):
        is_flag, default = parameter.kind is parameter.KEYWORD_ONLY, parameter.default
        several = parameter.kind is parameter.VAR_POSITIONAL
        if typing.get_origin(kind) is types.UnionType:
            kind = typing.get_args(kind)[0]
        if typing.get_origin(kind) is Sequence:
            kind, several = typing.get_args(kind)[0], True
        if kind is Any:  # what is read otherwise
            kind, several = str, True
        text = knob.doc if knob.choices else knob.meaning
        if default not in (None, False, True, (), "", parameter.empty):
            text += f" (default: {default})"
        how: Plain = {"help": text.replace("%", "%%")}
        if kind is bool:
            how["action"] = "store_false" if default else "store_true"
        else:
            named = {int: "N", float: "X", Path: "FOLDER"}.get(kind)
            how["metavar"] = metavar or "|".join(knob.choices) or named
            filled = functools.partial(_filled, kind)
            how["type"] = _number if kind in (int, float) else None if default == "" else filled
            how["default"] = [] if several else None if default is parameter.empty else default
        if is_flag:
            if several:
                how["action"] = "append"
            how["required"] = default is parameter.empty
            parser.add_argument(flag_of(parameter), dest=parameter.name, **how)
        elif words:
            if several:
                how["nargs"] = "*"
            parser.add_argument(parameter.name, **how)
    if inspect.signature(function).return_annotation != "int":
        parser.add_argument("--json", action="store_true", help=JSON_HELP)


def _filled(kind: Callable[[str], Any], text: str) -> Any:
    """Return a text or a path that is not empty, as a variable that is not set is."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; maybe a variable of the shell is not set")
    return text if kind is str else kind(text)  # a `Held` stays one


def _number(text: str) -> Any:
    """Return a number; a text that is none is refused where its range is."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def call(function: Callable[..., Any], args: Namespace) -> Any:
    """Call a function with what was parsed. Raises ConfigError for a value out of its range."""
    words, flags, values = list[Any](), Plain(), dict(vars(args))
    for parameter, kind, knob, _ in annotated(function):
        if knob.example is not None or {int, float} & {kind, *typing.get_args(kind)}:
            is_flag = parameter.kind is parameter.KEYWORD_ONLY
            key = flag_of(parameter) if is_flag else parameter.name
            convert = functools.partial(convert_value, kind, key=key, knob=knob)
            given = values[parameter.name]
            several = isinstance(given, list)
            values[parameter.name] = list(map(convert, given)) if several else convert(given)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            words += values[name]
        elif parameter.kind is parameter.KEYWORD_ONLY:
            flags[name] = values[name]
        else:
            words.append(values[name])
    return function(*words, **flags)


def words_of(
    function: Callable[..., Any], given: Sequence[Any], flags: Mapping[str, Any]
) -> list[str]:
    """Return the command line of a call; what has None or its default is left out.

    Lists of words are taken apart. Raises TypeError for arguments that the function has not, and
    ConfigError for an empty list in the place of words.
    """
    bound, words = inspect.signature(function).bind(*given, **flags), list[str]()
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        several = value if isinstance(value, (list, tuple)) else [value]
        if parameter.kind is not parameter.KEYWORD_ONLY:
            nested = [one if isinstance(one, (list, tuple)) else [one] for one in several]
            flat = (one for part in nested for one in part)
            found = [Held(one) if hasattr(type(one), "columns") else os.fspath(one) for one in flat]
            if parameter.kind is parameter.VAR_POSITIONAL and several and not found:
                raise ConfigError("missing_value", f"{name}: the list is empty; give one at least")
            words += found
        elif isinstance(value, bool):
            words += [flag_of(parameter)] * (value is not parameter.default)
        elif value is not None:
            words += [f"{flag_of(parameter)}={one}" for one in several]
    return words
