"""Values that a user gives: how they are refused, and the variables of the environment in them.
Standard library."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Names in the environment.
SECRET = re.compile(
    r"(?:^|_)(?:API)?(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)S?(?:_ID)?$|SECRET_|PASSWORD$", re.I
)
# A variable of the environment in a composed or saved config, which never holds its value.
VARIABLE = re.compile(r"\$\{oc\.env:([^{},]+)\}")
NUMBER = re.compile(r"[-+]?(\d+|(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?)")
NAMED: set[str] = set()  # variables that the configs of this process name


class ConfigError(ValueError):
    """Something that the user asked for is refused before training starts; the text is for the
    user."""


def nearest(word: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> str:
    """' Did you mean ...?' for the closest known words, or the empty string where none is close."""
    close = difflib.get_close_matches(word, list(known), n=n, cutoff=cutoff)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def hint(word: str, known: Iterable[str]) -> str:
    """Return the closest known word, or all of them where none is close."""
    known = list(known)
    return nearest(word, known) or f" Known: {', '.join(known)}."


def refuse(key: str, value: Any, why: str, example: Any = None) -> ConfigError:
    """Return the one form of a refusal: key, value, reason, a valid example."""
    shown = "null" if value is None else value
    tail = f"; for example {key}={example}" if example is not None else ""
    return ConfigError(f"{key}={shown}: {why}{tail}")


def fill(value: Any, key: str) -> Any:
    """Return `value` with what the environment holds in place of its ${oc.env:NAME}, at any depth.

    A lone variable that reads as a number, true, false or null is one, as on a command line; one
    with the name of a secret stays text. To be called once: a value may look like a variable
    itself. Raises ConfigError naming the key and a variable that is not set.
    """
    if isinstance(value, Mapping):
        return {k: fill(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [fill(v, key) for v in value]
    if not isinstance(value, str) or not (names := VARIABLE.findall(value)):
        return value
    for name in names:
        if name not in os.environ:
            text = f"the environment variable {name} is not set"
            raise refuse(
                key, value, f"{text}; set it where the run starts, such as with export {name}=..."
            )
    NAMED.update(names)
    text = VARIABLE.sub(lambda found: os.environ[found[1]], value)
    if not VARIABLE.fullmatch(value) or SECRET.search(names[0]):
        return text
    if NUMBER.fullmatch(text):
        try:
            return int(text) if text.lstrip("+-").isdecimal() else float(text)
        except ValueError:  # Python reads no more than some thousand digits
            raise refuse(
                key, value, f"the environment variable {names[0]} has {len(text):,} digits"
            ) from None
    return {"true": True, "false": False, "null": None}.get(text.lower(), text)
