"""Call the function of a command from a program."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from llmexp.cli.running import function_of, read_line
from llmexp.config.arguments import annotated, call, flag_of, words_of
from llmexp.config.values import NUMBER_OR_WORD, ConfigError
from llmexp.system.child import REFUSED


def called(command: str) -> Callable[..., Any]:
    """Return the function that does what a command does, with its arguments as Python has them.

    It returns the answer. What is refused raises ConfigError, which names arguments, not flags.
    """
    function = function_of(command)

    @functools.wraps(function)
    def in_program(*given: Any, **flags: Any) -> Any:
        words = words_of(function, given, flags)
        try:
            with allowed_in_a_call():
                found = call(function, read_line(command, function, words))
        except ConfigError as error:
            text = str(error).partition("; see llmexp ")[0].removeprefix("argument ")
            for parameter, *_ in annotated(function):
                text = _in_python(text, flag_of(parameter), parameter.name)
            raise ConfigError(error.kind, text, error.key) from None
        if getattr(found, "exit_code", 0) == REFUSED:
            raise ConfigError(found.refused[0].kind, "\n".join(found.data["refused"]))
        return found

    return in_program


def _in_python(text: str, flag: str, name: str) -> str:
    """Return a refusal of a flag with its name and its value as a program has them."""

    def assigned(found: re.Match[str]) -> str:
        value = found[1] if NUMBER_OR_WORD.fullmatch(found[1]) else repr(found[1])
        return f"{name}={value}"

    why, example, way = text.partition("for example")
    why = re.sub(rf"{flag} ([^\s;:]+)(?=[:;]|$)", assigned, why).replace(f"{flag}:", f"{name}:")
    way = re.sub(rf"{flag} (\S+)", assigned, way)
    return f"{why}{example}{way}".replace(flag, f"{name}=")


@contextlib.contextmanager
def allowed_in_a_call() -> Iterator[None]:
    """Take back at the end what --allow allows: a command ends its process, a program goes on."""
    path, before = list(sys.path), {k: os.environ.get(k) for k in ("LLMEXP_ALLOW", "PYTHONPATH")}
    try:
        yield
    finally:
        sys.path[:] = path
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
