"""Overrides of a command line: their keys as they are written, and what Hydra reads in them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from llmexp.settings.knobs import takes_text
from llmexp.settings.values import NUMBER_OR_WORD, quoted


def key_of(override: str) -> str:
    """Return the key of an override, also of one that adds or removes it."""
    return override.lstrip("+~").partition("=")[0]


# Texts in quotes, words, and the signs between them.
_PARTS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\\.|[^][{},()'"\\])+|.""", re.S)


@functools.lru_cache(maxsize=4096)
def as_text(override: str) -> str:
    """Return an override with quotes around what a knob of text takes, and Hydra takes for more.

    So a text is what was typed: Hydra reads the short commit 695e0514 as infinity, 1_000 as 1000,
    and no letter beyond ASCII. In lists, sections and sweeps each value has them; null stays what
    it is.
    """
    key, equals, value = override.partition("=")
    found, keys = key + equals, [key.lstrip("+~")]  # of what is open here, the inmost last
    for part in _PARTS.findall(value):
        is_quoted = part[0] in "'\""
        if ":" in part and not is_quoted and len({*keys[-2:]}) == 2:  # in a section
            name, colon, part = part.partition(":")
            keys[-1], found = f"{keys[-2]}.{name.strip()}", found + name + colon
        word = part.strip()
        if part in ("[", "{"):
            keys.append(keys[-1] + "." * (part == "{"))
        elif part in ("]", "}"):
            keys[1:] = keys[1:-1]
        elif NUMBER_OR_WORD.fullmatch(word) or not (is_quoted or word.isascii()):
            part = quoted(word) if takes_text(keys[-1]) and word.lower() != "null" else part
        found += part
    try:
        parsed([found])  # a function such as range takes numbers alone
    except HydraException:
        return override
    return found


def typed_in(cfg: DictConfig) -> list[str]:
    """Return the overrides that a config was composed with, as they were typed."""
    there = OmegaConf.select(cfg, "hydra.overrides", default={"hydra": [], "task": []})
    given: Any = OmegaConf.to_container(OmegaConf.create(there), resolve=False)
    return [*given["hydra"], *given["task"]]


def parsed(overrides: Iterable[str]) -> list[Override]:
    """Return the overrides as Hydra reads them. Raises HydraException."""
    found: list[Override] = OverridesParser.create().parse_overrides(list(overrides))
    return found


def written(overrides: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of each key as they are written, those of a sweep one by one.

    A glob or an interval is one value. Raises HydraException.
    """
    found = {}
    for o in parsed(overrides):
        listed = o.is_discrete_sweep() and o.value_type != ValueType.GLOB_CHOICE_SWEEP
        whole = str(o.input_line).partition("=")[2]
        found[o.key_or_group] = list(o.sweep_string_iterator()) if listed else [whole]
    return found


def swept_in(cfg: DictConfig) -> dict[str, Any]:
    """Return the values of a sweep as its file (hydra.sweeper.params) or command line has them."""
    there, typed = cfg.hydra.sweeper.get("params") or {}, written(typed_in(cfg))
    found: dict[str, Any] = {key: values for key, values in there.items() if key not in typed}
    return found | {key: ",".join(values) for key, values in typed.items() if len(values) > 1}


def replace_ramp(tree: Any, overrides: Sequence[str]) -> None:
    """Put a batch ramp of the overrides in the place of that of a file, and of the sizes there.

    Hydra merges the two. The sizes are those that follow from a ramp, unless they are given too.
    """
    ramps = [o for o in overrides if key_of(o) == "batch.ramp"]
    if not ramps or not isinstance(tree.get("batch"), dict) or tree["batch"].get("ramp") is None:
        return
    given = {key_of(override) for override in overrides}
    tree["batch"]["ramp"] = parsed(ramps)[-1].value()
    for name in ("real_batch_size", "tokens_per_step", "gradient_accumulation_steps"):
        if f"batch.{name}" not in given:
            tree["batch"][name] = None
