"""Find the secrets of this machine, and keep them out of whatever is written.

Standard library only.
"""

from __future__ import annotations

import json
import netrc
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmexp.config.variables import NAMED_VARIABLES, is_secret

# characters; anything shorter is found in too many texts that have nothing to do with it
SHORTEST = 8


def secrets() -> dict[str, str]:
    """Return where each secret is from ($NAME, or the host of a .netrc entry), and its value."""
    found = {f"${name}": value for name, value in os.environ.items() if is_secret(name)}
    for host, password in netrc_passwords().items():
        found[f"the password of {host} in .netrc"] = password
    return {name: value for name, value in found.items() if len(value) >= SHORTEST}


def netrc_passwords() -> dict[str, str]:
    """Return the password of each host in the user's .netrc files that can be read."""
    found: dict[str, str] = {}
    for file in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            hosts = netrc.netrc(Path(file).expanduser()).hosts if file else {}
        except (OSError, RuntimeError, UnicodeDecodeError, netrc.NetrcParseError):
            continue
        found |= {host: login[2] for host, login in hosts.items() if login[2]}
    return found


def redacted(text: str) -> str:
    """Return `text` with the names of secrets in place of their values.

    The variables that a config names count as secrets here.
    """
    return _replaced(text, _replacements())


def _replacements() -> list[tuple[str, str]]:
    """Return pairs of a value and its replacement, the longest values first.

    A value may be a part of another.
    """
    known = {value: f"<{name}>" for name, value in secrets().items()}
    for name in NAMED_VARIABLES:
        if len(value := os.environ.get(name, "")) >= SHORTEST:
            known.setdefault(value, f"${{oc.env:{name}}}")
    forms = {
        form: name
        for value, name in known.items()
        for form in (value, repr(value)[1:-1], json.dumps(value)[1:-1])
    }
    return sorted(forms.items(), key=lambda pair: len(pair[0]), reverse=True)


def _replaced(text: str, replacements: list[tuple[str, str]]) -> str:
    for form, name in replacements:
        text = text.replace(form, name)
    return text


def warn(text: str) -> None:
    """Print a line about the command itself on standard error, without the values of secrets."""
    print(f"llmexp: {redacted(text)}", file=sys.stderr, flush=True)


def concealed(node: Any) -> Any:
    """Plain values with every text redacted."""
    replacements = _replacements()
    return _changed(node, lambda text: _replaced(text, replacements))


def _changed(node: Any, change: Callable[[str], str]) -> Any:
    """Return plain values with each text changed, those of keys too."""
    if isinstance(node, dict):
        return {_changed(k, change): _changed(v, change) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [_changed(value, change) for value in node]
    return change(node) if isinstance(node, str) else node


def as_recorded(node: Any) -> Any:
    """Return plain values as they come back from a JSON file that holds them redacted."""
    return json.loads(json.dumps(concealed(node)))


def clean(text: object) -> str:
    """Return one line without control characters: a log or a label must not drive the terminal."""
    text = str(text)
    if text.isascii() and text.isprintable():
        return text.strip()
    # colours go whole
    shown = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", text.encode("utf-8", "replace").decode())
    return re.sub(
        r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+", " ", shown
    ).strip()


def cleaned(value: Any) -> Any:
    """Return a value of JSON with all its texts cleaned, keys included."""
    return _changed(value, clean)
