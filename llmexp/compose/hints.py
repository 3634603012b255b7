"""Explain what Hydra refused: what is wrong with which key, and the nearest key that exists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from llmexp.compose.origin import CONFIG_NAME, not_in_option
from llmexp.config import flatten, nearest
from llmexp.values import hint

MOST = 18  # names in a list of what there is


def in_words(error: Exception, loader: Any, overrides: Sequence[str]) -> str:
    """Return what Hydra refused, in words that name the key, the value and what would be valid."""
    text = str(error).strip()
    if error.__cause__ is not None and str(error.__cause__).strip() not in text:
        text += "\n" + str(error.__cause__).strip()
    if found := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return (
            f"{found.group(1)}: several values are a sweep, which needs -m; a list is written "
            "key=[a,b]"
        )
    if found := re.search(
        r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", text
    ):
        if "already at" in text:
            return f"{found.group(1)}: this key exists; write it without the +"
        return unknown(found.group(1).partition("=")[0], loader, overrides)
    if found := re.search(
        r"In '[^']+': Could not find '([^']+)'\s*Available options in '([^']+)':\s*(.*)", text, re.S
    ):
        choice, group, options = (
            found.group(1),
            found.group(2),
            found.group(3).split("Config search")[0].split(),
        )
        word = choice.removeprefix(group + "/")
        return f"{group}={word}: there is no such option.{hint(word, options)}"
    if "Config group override must be" in text:
        for override in map(OverridesParser.create().parse_override, overrides):
            if override.key_or_group in loader.list_groups("") and not isinstance(
                override.value(), (str, list)
            ):
                options = loader.get_group_options(override.key_or_group)
                return (
                    f"{override.input_line}: an option of the group is needed. Known: "
                    f"{', '.join(options)}."
                )
    key = getattr(error, "full_key", None)
    lines = [
        line.strip()
        for line in text.splitlines()
        if not re.match(r"\s*(full_key|object_type|reference_type)", line)
    ]
    return (f"{key}: " if key else "") + " ".join(filter(None, lines))


def unknown(key: str, loader: Any, overrides: Sequence[str]) -> str:
    """Return a refusal of a key that the composed config does not have: what it misses, or the
    nearest key that there is."""
    if key.startswith("user."):
        return (
            f"{key}: there is no such key yet; a new key of your own is written with a +: "
            f"+{key}=..."
        )
    tree = known_tree(loader, overrides)
    flat = flatten({k: v for k, v in tree.items() if k != "hydra"})
    value = next(
        (o.partition("=")[2] for o in overrides if o.lstrip("+~").partition("=")[0] == key), ""
    )
    for other in map(OverridesParser.create().parse_override, overrides):
        if other.key_or_group in flat and not other.is_sweep_override():
            flat[other.key_or_group] = other.value()
    if refusal := not_in_option(loader, tree["hydra"]["runtime"]["choices"], key, value, flat):
        return refusal
    return (
        f"{key}: there is no such key or group.{nearest_key(key, [*flat_keys(tree), 'experiment'])}"
    )


def nearest_key(key: str, known: Sequence[str]) -> str:
    """Return a hint: a key of the same section that is spelled alike, one of this name elsewhere, a
    section spelled alike; else what there is in the section."""
    section, _, name = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    turned = [s for s in siblings if sorted(s) == sorted(name)]  # rl for lr
    within = nearest(name, turned or siblings, cutoff=0.5 if turned else 0.75)
    if within and section:
        within = within.replace("mean ", f"mean {section}.")
    elsewhere = [k for k in known if f"_{k.rpartition('.')[2]}".endswith(f"_{name}")]
    if within or elsewhere:
        return within or f" Did you mean {' or '.join(elsewhere[:3])}?"
    top = [k for k in known if "." not in k and k != "hydra"]
    there = siblings or top
    more = f" and {len(there) - MOST} more" if len(there) > MOST else ""
    return (
        "" if siblings else nearest(key, known, cutoff=0.8)
    ) or f" Known: {', '.join(there[:MOST])}{more}"


def known_tree(loader: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the config with the chosen options of the groups and no other override."""
    groups = [
        o
        for o in overrides
        if re.fullmatch(r"[a-z]+=\w+", o) and o.partition("=")[0] in loader.list_groups("")
    ]
    cfg = None
    for choice in (groups, []):  # a choice may be wrong itself
        with suppress(HydraException):
            cfg = cfg or loader.load_configuration(CONFIG_NAME, choice, run_mode=RunMode.RUN)
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    return dict(tree)


def flat_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested mappings, sections included; hydra's own without what is in
    it."""
    for key, child in node.items():
        yield f"{prefix}{key}"
        if isinstance(child, dict) and key != "hydra":
            yield from flat_keys(child, f"{prefix}{key}.")
