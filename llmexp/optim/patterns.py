"""Match parameters by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from llmexp.config.values import refuse

# what torch's wrappers put into the names of a model's parameters
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_names(names: Iterable[str]) -> list[str]:
    """Return parameter names as they are on a single device, without what wrappers add.

    These are torch.compile, recomputation, and DDP, which puts `module.` before all names.
    """
    found = [".".join(p for p in name.split(".") if p not in _WRAPPERS) for name in names]
    wrapped = all(name.startswith("module.") for name in found)
    return [name.removeprefix("module.") for name in found] if wrapped else found


def first_matches(names: Iterable[str], patterns: Sequence[str], key: str) -> list[int | None]:
    """Return for each parameter the place of the first pattern that matches its name, else None.

    A pattern is one of a shell (`*`, `?`, `[01]`) and has to match the whole name on a single
    device, such as blocks.0.attention.q_proj.weight; a leading `*.` also matches no module at all:
    `*.token_embedding.*` takes token_embedding.weight. Raises ConfigError for a pattern of the knob
    `key` that takes no parameter, with the names that there are.
    """
    plain = plain_names(names)
    found = [next((i for i, p in enumerate(patterns) if _matches(n, p)), None) for n in plain]
    for i, pattern in enumerate(patterns):
        if i in found:
            continue
        if any(_matches(name, pattern) for name in plain):
            text = "takes no parameter, as the patterns before it take everything that it matches"
            raise refuse("idle_knob", f"{key}.{i}.match", pattern, f"{text}; put it first")
        known = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in plain))
        text = f"matches no parameter of the model; their names are {known}"
        raise refuse("unknown_option", f"{key}.{i}.match", pattern, text)
    return found


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)
