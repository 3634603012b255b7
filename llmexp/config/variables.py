"""Variables of the environment: which hold secrets, and how a config names them.

A composed or saved config has `${oc.env:NAME}`, never the value; `fill` puts the value in where it
is used. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from llmexp.config.knobs import takes_text
from llmexp.config.values import nested, refuse

# Names of variables that hold a secret, and names that often do: of these the value decides.
SECRET = re.compile(
    r"(?:^|_)(?:API_?KEY|SECRET|PASSWORD|PASSWD)S?(?:_ID)?$|SECRET_|PASSWORD$", re.I
)
MAYBE_SECRET = re.compile(r"(?:^|_)(?:KEYS?|TOKEN)(?:_ID)?$", re.I)
SHORTEST_TOKEN = 16  # characters
# A variable of the environment in a composed or saved config, which never holds its value.
VARIABLE = re.compile(r"\$\{oc\.env:([^{},]+)\}")
NUMBER = re.compile(r"[-+]?(\d+|(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?)")
NAMED_VARIABLES: set[str] = set()  # that runs of this process use: no message has their values


def is_secret(name: str) -> bool:
    """Return whether a variable of the environment holds a secret.

    The name decides; where one such as SORT_KEY says too little, a long value that is no number.
    """
    if SECRET.search(name):
        return True
    value = os.environ.get(name, "")
    long = len(value) >= SHORTEST_TOKEN and not NUMBER.fullmatch(value)
    return MAYBE_SECRET.search(name) is not None and long


def remember_names(node: Any) -> None:
    """Remember the variables that a run of this process names: no message has their values."""
    if isinstance(node, str):
        NAMED_VARIABLES.update(VARIABLE.findall(node))
    for _, child in nested(node):
        remember_names(child)


def fill(value: Any, key: str) -> Any:
    """Return `value` with the values of its variables ${oc.env:NAME}, at any depth.

    A lone variable that reads as a number, true, false or null is one, as on a command line; one
    with the name of a secret, or for a key of text, stays text. To be called once: a value may look
    like a variable itself. Raises ConfigError naming the key and a variable that is not set.
    """
    if isinstance(value, Mapping):
        return {k: fill(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [fill(v, key) for v in value]
    if not isinstance(value, str) or not (names := VARIABLE.findall(value)):
        return value
    return _filled(value, names, key)


def _filled(value: str, names: list[str], key: str) -> Any:
    """Return a text with the values of the variables that it names."""
    for name in names:
        if name not in os.environ:
            text = f"the environment variable {name} is not set"
            raise refuse(
                "missing_value",
                key,
                value,
                f"{text}; set it where the run starts, such as with export {name}=...",
            )
    NAMED_VARIABLES.update(names)
    text = VARIABLE.sub(lambda found: os.environ[found[1]], value)
    if not VARIABLE.fullmatch(value) or is_secret(names[0]) or takes_text(key):
        return text
    if NUMBER.fullmatch(text):
        try:
            return int(text) if text.lstrip("+-").isdecimal() else float(text)
        except ValueError:  # Python reads no more than some thousand digits
            raise refuse(
                "out_of_range",
                key,
                value,
                f"the environment variable {names[0]} has {len(text):,} digits",
            ) from None
    return {"true": True, "false": False, "null": None}.get(text.lower(), text)
