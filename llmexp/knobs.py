"""What a knob changes: the one place that all lists of keys come from. Standard library only.

Resuming, telling the points of a sweep apart and comparing ask here; the answers stand beside the fields in `config`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from llmexp.config import OPEN_AFFECTS, Config, key_of


@functools.cache
def fields() -> Mapping[str, Mapping[str, Any]]:
    """The metadata of each knob of the closed sections, by its dotted key."""
    hints = typing.get_type_hints(Config)
    found: dict[str, Mapping[str, Any]] = {}
    for outer in dataclasses.fields(Config):
        section = hints[outer.name]
        if dataclasses.is_dataclass(section):
            default = getattr(section, "AFFECTS", "result")
            for f in dataclasses.fields(section):
                meta = dict(f.metadata)
                found[f"{key_of(outer)}.{key_of(f)}"] = meta | {"affects": meta["affects"] or default}
        elif outer.metadata:
            found[key_of(outer)] = dict(outer.metadata) | {"affects": outer.metadata["affects"] or "result"}
    return found


def affects(key: str) -> str:
    """What another value of the key changes: the `result`, its `rounding`, or `nothing`. Unknown keys: the result."""
    return OPEN_AFFECTS.get(key) or fields().get(key, {}).get("affects", "result")


def is_record(key: str) -> bool:
    """Whether the key names, records or times a run and changes no bit of its result."""
    return affects(key) == "nothing"


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value. What hooks do, and read in the
    section user, is up to the user; a twin is one from its start."""
    return key.partition(".")[0] in ("hooks", "user") or (affects(key) != "result" and key != "train.twin")
