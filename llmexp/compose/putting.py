"""Put overrides into a config; refuse a key that it lacks, with the one that was meant."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from llmexp.compose.overrides import (
    PARENT,
    at,
    key_of,
    loader,
    option,
    options_of,
    parsed,
    set_by,
    unresolved,
    written,
)
from llmexp.config.commands import command
from llmexp.config.knobs import dead, fields
from llmexp.config.rules import LIBRARY_TARGET
from llmexp.config.values import (
    NO_DEFAULT,
    ConfigError,
    as_yaml,
    closest,
    did_you_mean,
    flatten,
    pasteable,
    refuse,
)
from llmexp.system.text import first_of

BESIDE = "; options of your own have it beside the others: "
_MOST = 18  # names in a list of what there is
# Sections that may be empty: below data.sources and data.val a name is the user's own.
MAY_BE_EMPTY = ("data.sources", "data.val", "optimizer.reference", "optimizer.exponents")


def put(cfg: DictConfig, overrides: Sequence[Override], swept: Sequence[Override] = ()) -> None:
    """Put values into a config of the files and options that are chosen, one after the other.

    Raises ConfigError for all keys that it does not have, those that are `swept` with them, and
    for a value that does not fit there.
    """
    given = [str(o.input_line) for o in overrides]
    for number, override in enumerate(overrides, 1):
        try:
            _put_one(cfg, override, given)
        except ConfigError as error:
            raise _with_others(error, cfg, overrides[number:], swept, given) from None


def _with_others(
    error: ConfigError,
    cfg: DictConfig,
    left: Sequence[Override],
    swept: Sequence[Override],
    given: Sequence[str],
) -> ConfigError:
    """Return the error with all further keys that the config does not have, if it is one of these.

    `left`: the overrides after it, which may need each other; another error among them ends these.
    """
    texts = dict.fromkeys([str(error)])
    if error.kind != "unknown_key":
        return error
    for override in left:
        try:
            _put_one(cfg, override, given)
        except ConfigError as other:
            if other.kind != "unknown_key":
                break
            texts[str(other)] = None
    for override in swept:
        try:
            _check(override, override.get_key_element().lstrip("+~"), None, unresolved(cfg), given)
        except ConfigError as other:
            if other.kind == "unknown_key":
                texts[str(other)] = None
    return ConfigError(error.kind, "\n".join(texts), error.key)


def _put_one(cfg: DictConfig, override: Override, given: Sequence[str]) -> None:
    """Put the value of one override into a config. Raises ConfigError."""
    key, value = override.get_key_element().lstrip("+~"), override.value()
    _check(override, key, value, unresolved(cfg), given)
    try:
        if override.is_delete():
            above, _, name = key.rpartition(".")
            with open_dict(cfg):
                del (OmegaConf.select(cfg, above) if above else cfg)[name]
        else:
            OmegaConf.update(cfg, key, value, merge=not _replaces(key), force_add=True)
    except (OmegaConfBaseException, AttributeError, IndexError, TypeError, ValueError):
        raise refuse("wrong_type", key, value, "is not a value of this key") from None


def _check(override: Override, key: str, value: Any, tree: Any, given: Sequence[str]) -> None:
    """Raise ConfigError for an override of a key that is not there, or is of another kind."""
    there, adds = at(tree, key), override.is_add() or override.is_force_add()
    whole = key == "hydra" and not isinstance(value, dict)
    if whole or key.startswith("hydra.overrides"):
        text = "holds Hydra's own keys; set one of them, for example hydra.run.dir=outputs/try1"
        raise ConfigError("not_allowed", f"{key}: {text}", key)
    if there is NO_DEFAULT and not adds and not _is_open(key, tree):
        raise unknown(key, tree, given)
    if override.is_delete() and value not in (None, there):
        text = f"it is {as_yaml(there)} here; ~{key} takes it out whatever it is"
        raise refuse("conflict", f"~{key}", value, text)
    merges = there in (NO_DEFAULT, None) or isinstance(value, (dict, list))
    if override.is_add() and not merges:
        raise ConfigError("exists", f"{key}: this key exists; write it without the +", key)
    if _replaces(key):
        return
    example = getattr(fields().get(key), "example", None)
    if isinstance(there, list) and isinstance(value, dict):
        raise refuse("wrong_type", key, value, "a list is needed here, not keys", example)
    if isinstance(there, dict) and isinstance(value, list):
        text = "a section of keys is needed here, not a list; for example "
        raise refuse("wrong_type", key, value, f"{text}{key}.{next(iter(there), 'web')}=...")
    if isinstance(there, dict) and isinstance(value, dict) and not adds:
        for name, below in value.items():
            _check(override, f"{key}.{name}", below, tree, given)


def _is_open(key: str, tree: Any) -> bool:
    """Return whether a key may be new: a name of the user's own, or an argument of a library's."""
    open_here = [s for s in MAY_BE_EMPTY if at(tree, s) is not NO_DEFAULT]
    if at(tree, "optimizer._target_") == LIBRARY_TARGET:
        open_here.append("optimizer")
    return key.startswith(tuple(f"{section}." for section in open_here))


def _replaces(key: str) -> bool:
    """Return whether a value of a key takes the place of the one before, such as a batch ramp."""
    return key in fields() and fields()[key].form is not None


def unknown(
    key: str, tree: dict[str, Any], given: Sequence[str], more: Sequence[str] = ()
) -> ConfigError:
    """Return the refusal of a key that a config does not have, with the nearest one.

    `more`: names that are known besides its keys."""
    section, dot, _ = key.partition(".")
    if dot and not isinstance(tree.get(section, {}), dict):
        text = f"{section} is {as_yaml(tree[section])} here, where a section is needed"
        return ConfigError("wrong_type", f"{key}: {text}", key)
    if section == "user":
        way = f"a new key of your own is written with a +: +{key}=..."
        return ConfigError("unknown_key", f"{key}: there is no such key yet; {way}", key)
    choices, asked = tree["hydra"]["runtime"]["choices"], written(given)
    value = ",".join(_typed().get(key, asked.get(key, ())))
    swept = [o for o in _typed().get(section, ()) if o in options_of(section)]
    lacking = [o for o in swept if not _takes(o, key)]
    choices = choices | ({section: lacking[0]} if lacking else {})
    flat = flatten({k: v for k, v in tree.items() if k != "hydra"})
    flat |= {k: v for o in parsed(given) for k, v in set_by(o).items() if k in flat}
    own = own_options(key)
    if key in fields() and key in (idle := dead(flat | {key: value})):
        text, example = (
            str(refuse("idle_knob", key, value, "{}; leave it out, or {}".format(*idle[key]))),
            "",
        )
    else:
        text, example = _of_other_options(choices, key, value)
    if not text and own:
        text = f"{key}: the option {section}={choices[section]} has no such knob"
    if text:
        return ConfigError("idle_knob", text + (own or example), key)
    near = _longer_in_option(choices, key, value)
    near = near or nearest_key(key, [*flat_keys(tree), "experiment", *more])
    return ConfigError("unknown_key", f"{key}: there is no such key or group.{near}", key)


def _of_other_options(choices: Mapping[str, Any], key: str, value: str) -> tuple[str, str]:
    """Return the refusal of a knob that other options of a group have, and an example; or ''."""
    section, name = f"{key}.".split(".")[:2]
    having = options_of(section) if section in choices and name else []
    having = [o for o in having if name in option(f"{section}/{o}")]
    if not having or choices[section] in having:
        return "", ""
    text = f"the option {section}={choices[section]} has no such knob"
    if str(choices[section]).startswith(PARENT):
        text = f"the {section} that the run folder has takes no such knob"
    example = f"; for example {section}={having[0]} {pasteable(f'{key}={value}')}" if value else ""
    return f"{key}: {text}; these have it: {', '.join(having)}", example


def _typed() -> dict[str, list[str]]:
    """Return the values of each key on the whole command line; see `written`."""
    return written(loader().typed)


def own_options(key: str, point: Sequence[str] = ()) -> str:
    """Return how some options of a swept group get a knob that the others do not have: by files.

    That is the whole command; empty where the group is not swept, or no option has the knob, or
    that of a refused `point` does, by its overrides.
    """
    section, asked, given = key.partition(".")[0], _typed(), loader().typed
    swept = [o for o in asked.get(section, ()) if o in options_of(section)]
    apart = [
        k for k in asked if k.startswith(f"{section}.") and not all(_takes(o, k) for o in swept)
    ]
    if any(_takes(o, key) for o in written(point).get(section, ())):
        return ""
    if key not in apart or not any(_takes(o, key) for o in swept):
        return ""
    path = loader().get_search_path().get_path()
    folders = [p.path.removeprefix("file://") for p in path if p.provider == "command-line"]
    folder, chosen = next(iter(folders), "own"), list[str]()
    steps = [f"mkdir -p {pasteable(f'{folder}/{section}')}"]
    for o in swept:
        own = [k for k in apart if _takes(o, k)]
        for values in itertools.product(*(asked[k] for k in own)):
            name = "_".join(re.sub(r"\W+", "_", v).strip("_") for v in (o, *values))
            while name in chosen:  # 1 and -1
                name += "_"
            chosen.append(name)
            lines = [f"{k.partition('.')[2]}: {v}" for k, v in zip(own, values, strict=True)]
            text = " ".join(map(pasteable, (f"defaults: [{o}]", *lines)))
            file = pasteable(f"{folder}/{section}/{chosen[-1]}.yaml")
            steps += [f"printf '%s\\n' {text} > {file}"] if own else []
    if "sweep.screen" in asked and len(chosen) != 2:  # a screen takes two values of each key
        return ""
    kept = [o for o in given if key_of(o) not in (section, "hydra.mode", *apart)]
    words = ["-m", "--config-dir", folder, f"{section}={','.join(chosen)}", *kept]
    return f"{BESIDE}{' && '.join([*steps, command(*loader().command.split(), *words)])}"


def _takes(chosen: str, key: str) -> bool:
    """Return whether an option of a group has a knob; one of a library takes all arguments."""
    section, _, name = key.partition(".")
    there = option(f"{section}/{chosen}")
    return name in there or (section == "optimizer" and "name" in there)


def _longer_in_option(choices: Mapping[str, Any], key: str, value: str) -> str:
    """Return a hint for a key that ends a knob of another option, as files for train_files.

    Empty where there is none, or where the chosen option has such a knob."""
    section, _, name = key.partition(".")
    if section not in choices or not name or "." in name:
        return ""
    for other in [choices[section], *options_of(section)]:
        longer = [k for k in option(f"{section}/{other}") if k.endswith(f"_{name}")]
        if longer and other == choices[section]:
            return ""
        if longer:
            word = pasteable(f"{section}.{longer[0]}={value}")
            return did_you_mean([f"{section}={other} {word}"])
    return ""


def nearest_key(key: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown key: the nearest ones, else what there is in its section."""
    there = _siblings(key.rpartition(".")[0], known) or _siblings("", known)
    names = first_of([name for name in there if name != "hydra"], _MOST)
    return did_you_mean(nearest_keys(key, known)) or f" Known: {names}"


def nearest_keys(key: str, known: Sequence[str]) -> list[str]:
    """Return the known keys that may be meant, up to three.

    In this order: a key of the same section that is spelled alike, one of this name elsewhere, a
    section spelled alike."""
    section, _, name = key.rpartition(".")
    siblings = _siblings(section, known)
    turned = [s for s in siblings if sorted(s) == sorted(name)]  # rl for lr
    turned = turned or [s for s in siblings if _shortens(s, name) or _shortens(name, s)]
    within = turned[:1] or closest(name, siblings, cutoff=0.75)
    near = [f"{section}.{word}" if section else word for word in within]
    if not near:
        names = {k: k.rpartition(".")[2] for k in known}
        near = [k for k, n in names.items() if f"_{n}".endswith(f"_{name}") or _shortens(n, name)]
        near = near[:3]
    if not near and not siblings:
        near = closest(key, known, cutoff=0.8)
    return near


def _siblings(section: str, known: Sequence[str]) -> list[str]:
    names = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    return [name for name in names if not name.startswith("_")]


def _shortens(short: str, name: str) -> bool:
    """Return whether a name has the first letters of the words of another: lr, learning_rate."""
    return "_" in name and short == "".join(word[:1] for word in name.split("_"))


def flat_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested mappings, sections included.

    Of hydra's own section only its name."""
    for key, child in node.items():
        yield f"{prefix}{key}"
        if isinstance(child, dict) and key != "hydra":
            yield from flat_keys(child, f"{prefix}{key}.")
