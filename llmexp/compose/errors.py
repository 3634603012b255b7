"""Turn what Hydra, OmegaConf and YAML refuse into a ConfigError in the user's words.

It says what is wrong with which key, and the nearest key that exists.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import yaml
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llmexp.compose.guard import kind_of_config
from llmexp.compose.origin import CONFIG_NAME, loader, not_in_option, option, options_of
from llmexp.compose.overrides import key_of, parsed, written
from llmexp.settings.commands import command
from llmexp.settings.kinds import Kind
from llmexp.settings.values import (
    ConfigError,
    closest,
    did_you_mean,
    flatten,
    hint,
    pasteable,
    refuse,
)  # fmt: skip
from llmexp.system.text import first_of

_MOST = 18  # names in a list of what there is
BESIDE = "; options of your own have it beside the others: "
NO_GROUP: tuple[Kind, str] = (
    "wrong_type",
    "hydra: holds Hydra's own keys; set one of them, for example hydra.run.dir=outputs/try1",
)


@contextmanager
def user_errors(overrides: Sequence[str] = (), sweep: Sequence[str] = ()) -> Iterator[None]:
    """Turn refusals of Hydra, OmegaConf and YAML into ConfigError within the block.

    `sweep`: the command line of the sweep where the overrides are those of one of its points.
    """
    try:
        yield
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        kind, text = in_words(error, overrides, sweep or overrides)
        key = re.match(r"[\w.]+(?=[:=])", text)
        raise ConfigError(kind, text, key and key[0]) from None


def in_words(error: Exception, overrides: Sequence[str], given: Sequence[str]) -> tuple[Kind, str]:
    """Return the kind of what Hydra refused, and words with the key, the value and a valid one.

    `given`: all that was typed, for examples.
    """
    text = str(error).strip()
    if error.__cause__ is not None and str(error.__cause__).strip() not in text:
        text += "\n" + str(error.__cause__).strip()
    several = r"Ambiguous value for argument '(.+?)'\n|Sweep parameters '(.+)' requires --multirun"
    if found := re.search(several, f"{text}\n"):
        way = "several values are a sweep, which needs -m; a list is written key=[a,b]"
        return "unsupported", f"{found[1] or found[2]}: {way}"
    changing = r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'"
    if found := re.search(changing, text):
        if "already at" in text:
            return "exists", f"{found[1]}: this key exists; write it without the +"
        inner = getattr(error.__cause__, "full_key", None)  # of batch={max_steps:3}
        return unknown(inner or found[1].partition("=")[0], overrides, given)
    if found := re.search(r"Error merging override (\S+?)=.*\nCannot merge ", text):
        return "wrong_type", str(_other_kind(found[1], overrides))
    choosing = r"In '[^']+': Could not (?:find|load) '([^']+)/([^/']+)'"
    if found := re.search(choosing, text):
        group, word = found.groups()
        near = hint(word, options_of(group))
        return "unknown_option", f"{group}={word}: there is no such option.{near}"
    if "Config group override must be" in text:
        groups = loader().list_groups("")
        for o in parsed(overrides):
            if o.key_or_group == "hydra":
                return NO_GROUP
            if o.key_or_group in groups and not isinstance(o.value(), (str, list)):
                known = ", ".join(options_of(o.key_or_group))
                text = f"{o.input_line}: an option of the group is needed. Known: {known}."
                return "unknown_option", text
    key = getattr(error, "full_key", None)
    if key and (found := re.search(r"Environment variable '([^']+)' not found", text)):
        unset = f"the environment variable {found[1]} is not set"
        way = f"set it where the run starts, such as with export {found[1]}=..."
        return "missing_value", str(
            refuse("missing_value", key, f"${{oc.env:{found[1]}}}", f"{unset}; {way}")
        )
    noise = re.compile(r"\s*(full_key|object_type|reference_type)")
    lines = [line.strip() for line in text.splitlines() if not noise.match(line)]
    return kind_of_config(error), (f"{key}: " if key else "") + " ".join(filter(None, lines))


def _other_kind(key: str, overrides: Sequence[str]) -> ConfigError:
    """Return the refusal of a list in place of a section of keys, or the other way round."""
    given = next(o.value() for o in parsed(overrides) if o.key_or_group == key)
    if not isinstance(given, list):
        one = [{"match": "*.mlp.*", "lr": 0.3}] if key == "optimizer.groups" else []
        return refuse("wrong_type", key, given, "a list is needed here, not keys", one)
    below = [f"{k}=..." for k in flat_keys(known_tree(overrides)) if k.startswith(f"{key}.")]
    if key in ("data.sources", "data.val"):
        below = [f"{key}.web.files=corpus/*.jsonl"]
    example = f"; for example {below[0]}" if below else ""
    return refuse(
        "wrong_type", key, given, f"a section of keys is needed here, not a list{example}"
    )


def unknown(key: str, overrides: Sequence[str], given: Sequence[str]) -> tuple[Kind, str]:
    """Return the refusal of a key that the composed config does not have, with the nearest one."""
    if key == "hydra":
        return NO_GROUP
    if key.startswith("user."):
        way = f"a new key of your own is written with a +: +{key}=..."
        return "unknown_key", f"{key}: there is no such key yet; {way}"
    tree = known_tree(overrides)
    choices = tree["hydra"]["runtime"]["choices"]
    flat = flatten({k: v for k, v in tree.items() if k != "hydra"})
    value = next((o.partition("=")[2] for o in given if key_of(o) == key), "")
    for other in parsed(overrides):
        if other.key_or_group in flat and not other.is_sweep_override():
            flat[other.key_or_group] = other.value()
    section = key.partition(".")[0]
    swept = [o for o in written(given).get(section, ()) if o in options_of(section)]
    lacking = [o for o in swept if not _takes(o, key)]
    if lacking:
        choices[section] = lacking[0]
    own = own_options(key, given)
    if refusal := not_in_option(choices, key, value, flat):
        text = f"{refusal.partition('; for example ')[0]}{own}" if own else refusal
        return "idle_knob", text
    if own:
        return "idle_knob", f"{key}: the option {section}={choices[section]} has no such knob{own}"
    near = _longer_in_option(choices, key, value)
    near = near or nearest_key(key, [*flat_keys(tree), "experiment"])
    return "unknown_key", f"{key}: there is no such key or group.{near}"


def own_options(key: str, given: Sequence[str], point: Sequence[str] = ()) -> str:
    """Return how some options of a swept group get a knob that the others do not have: by files.

    That is the whole command; empty where the group is not swept, or no option has the knob, or
    that of a refused `point` does, by its overrides.
    """
    section, asked = key.partition(".")[0], written(given)
    if any(_takes(o, key) for o in written(point).get(section, ())):
        return ""
    swept = [o for o in asked.get(section, ()) if o in options_of(section)]
    apart = [
        k for k in asked if k.startswith(f"{section}.") and not all(_takes(o, k) for o in swept)
    ]
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
    """Return a hint for an unknown key.

    In this order: a key of the same section that is spelled alike, one of this name elsewhere, a
    section spelled alike; else what there is in the section."""
    section, _, name = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    turned = [s for s in siblings if sorted(s) == sorted(name)]  # rl for lr
    within = closest(name, turned or siblings, cutoff=0.5 if turned else 0.75)
    near = [f"{section}.{word}" if section else word for word in within]
    if not near:
        near = [k for k in known if f"_{k.rpartition('.')[2]}".endswith(f"_{name}")][:3]
    if not near and not siblings:
        near = closest(key, known, cutoff=0.8)
    top = [k for k in known if "." not in k and k != "hydra"]
    return did_you_mean(near) or f" Known: {first_of(siblings or top, _MOST)}"


def known_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the config with the chosen options of the groups and no other override."""
    known = loader().list_groups("")
    groups = [o for o in overrides if re.fullmatch(r"[a-z]+=\w+", o) and key_of(o) in known]
    cfg = None
    for choice in (groups, []):  # a choice may be wrong itself
        with suppress(HydraException):
            cfg = cfg or loader().load_configuration(CONFIG_NAME, choice, run_mode=RunMode.RUN)
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    return dict(tree)


def flat_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested mappings, sections included.

    Of hydra's own section only its name."""
    for key, child in node.items():
        yield f"{prefix}{key}"
        if isinstance(child, dict) and key != "hydra":
            yield from flat_keys(child, f"{prefix}{key}.")
