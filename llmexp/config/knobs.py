"""Effects of knobs, as their declarations say: where each acts and what it changes.

Resuming, telling the points of a sweep apart, comparing and refusing ask here. A knob that would
change nothing in the chosen option is refused when it is set; left at its default it is no part of
what tells two runs apart. Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import typing
from collections.abc import Collection, Mapping
from typing import Any

from llmexp import features
from llmexp.config import parts
from llmexp.config.rules import ONE_NUMBER, RULE_KEYS, SET, SHAPE_KEYS, rule_sets_batch
from llmexp.config.sections import CLIP_RULES, Config, plain
from llmexp.config.values import NO_DEFAULT, Knob, Plain, Where, flatten, is_ours, section_knobs

SEED = "train.seed"  # runs that differ in it alone are seeds of one setting


def is_seed(override: str) -> bool:
    """Return whether an override gives a run its seed."""
    return override.lstrip("+").partition("=")[0] == SEED


@functools.cache
def fields() -> dict[str, Knob]:
    """Return the knobs of the closed sections and those of `parts`, by their dotted keys."""
    found = dict(section_knobs(Config))
    for name, section in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(section):
            usual = getattr(section, "AFFECTS", "")
            for key, knob in section_knobs(typing.cast(type, section)).items():
                found[f"{name}.{key}"] = dataclasses.replace(knob, affects=knob.affects or usual)
    return found | {key: knob for key, (_, knob) in parts.arguments().items()}


# Knobs of text that `fields` does not know: of commands, of Hydra, and of single parts.
_TEXT = re.compile(
    r"\w+|hydra\.(run|sweep)\.\w+|hydra\.launcher\.(partition|account|qos|address|setup)"
    r"|sweep\.(resume|report|on_infeasible|search\.sampler)|plan\.device|prepare\.(part|on)"
    r"|model\.path|data\.val_main|data\.(train|val)_(files|labels)"
    r"|tokenizer\.(name|path|pattern|end_of_text)"
    r"|data\.(sources|val)\.[^.]+\.(files|hf|split|text_key)|optimizer\.name|\w+\._target_"
)


@functools.cache
def takes_text(key: str) -> bool:
    """Return whether a key takes text, or a list of texts: what is typed for it is no number.

    A key without a dot is the name of a run, a group of options or a list of names.
    """
    section, _, name = key.partition(".")
    kind: Any = parts.arguments().get(key, [None])[0]
    if (closed := typing.get_type_hints(Config).get(section)) and dataclasses.is_dataclass(closed):
        kind = typing.get_type_hints(closed).get(name)
    of = {*(typing.get_args(kind) or (kind,))} - {type(None)}
    return (of == {str} and key != "batch.ramp") or _TEXT.fullmatch(key) is not None


def affects(key: str) -> str:
    """Return what another value of a key changes: the `result`, its `rounding`, or `nothing`."""
    return getattr(fields().get(key), "affects", "") or "result"


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Return the values of the knobs that a config need not list, by their dotted keys."""
    given = {key: knob.default for key, knob in fields().items()}
    return {key: value for key, value in given.items() if value not in (NO_DEFAULT, {})}


def fresh_seeds(used: Collection[str], count: int) -> list[str]:
    """Return the first seeds from 1 on that are not among the used ones."""
    free = (seed for seed in map(str, itertools.count(1)) if seed not in used)
    return list(itertools.islice(free, count))


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys in which two flat configs differ, in order.

    A key that one of them does not have yet has its default there.
    """
    usual = defaults()
    return [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key, usual.get(key)) != new.get(key, usual.get(key))
    ]


def is_record(key: str) -> bool:
    """Return whether the key names, records or times a run and changes no bit of its result."""
    return affects(key) == "nothing"


def may_change(key: str) -> bool:
    """Return whether a resumed run may have another value.

    What hooks do, and read in the section user, is up to the user; a twin is one from its start.
    """
    return key.partition(".")[0] in ("hooks", "user") or (
        affects(key) != "result" and key != "train.twin"
    )


def dead(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the knobs of a flat config that do nothing beside its other values.

    Each comes with (why, what else could be done).
    """
    return {key: condition.why(flat) for key, condition in idle(fields(), flat).items()}


def idle(knobs: Mapping[str, Knob], flat: Mapping[str, Any]) -> dict[str, Where]:
    """Return the first condition that does not hold, by the knobs of a flat config."""
    failing = dict[str, Where]()
    for key, knob in knobs.items():
        for condition in knob.acts if key in flat else ():
            if not _holds(condition, key, flat):
                failing.setdefault(key, condition)
    return failing


def _holds(condition: Where, key: str, flat: Mapping[str, Any]) -> bool:
    """Return whether a condition of a knob holds; for a function of the user's each does."""
    section = key.partition(".")[0]
    return not is_ours(flat.get(f"{section}._target_", "llmexp.")) or condition.holds(flat)


def _settled(flat: Mapping[str, Any]) -> set[str]:
    """Return the keys that decide nothing more, as what follows from them is in the config."""
    found = {"batch.tokens_per_step"} if flat.get("batch.real_batch_size") is not None else set()
    if None not in (flat.get(f"model.{name}", 0) for name in SHAPE_KEYS):
        found |= {key for key in flat if key.startswith((*ONE_NUMBER, "model.shape_rule"))}
    open_keys = [SET["lr"], SET["weight_decay"], "optimizer.beta2"]
    open_keys += [SET["B"]] if rule_sets_batch(flat) else []
    if None not in (flat.get(key, 0) for key in open_keys):  # the stages of a ramp go by the rule
        settled = RULE_KEYS[1:2] if flat.get("batch.ramp") else RULE_KEYS
        found |= {key for key in flat if key.startswith(settled)}
    return found


def deciding_result(flat: Mapping[str, Any]) -> Plain:
    """Return what of a flat config can change a bit of the result, beside its other values.

    Configs that are equal in it make equal runs. A knob that the config does not list has its
    default.
    """
    flat = {**defaults(), **flat}
    rule = CLIP_RULES.get(str(flat.get("clip.kind")))
    if rule is not None and flat.get(f"clip.{rule.limit}", 0) is None:
        flat["clip.kind"] = "none"
    without = set(dead(flat)) | _settled(flat)
    for key, knob in fields().items():
        if knob.decides is not None and not _holds(knob.decides, key, flat):
            without.add(key)
    if not flat.get("hooks"):  # only hooks read the section user
        without |= {key for key in flat if key.startswith("user.")}
    return {key: value for key, value in flat.items() if key not in without and not is_record(key)}


# Keys besides those of the sections data and tokenizer that decide which sequence is the k-th.
_ORDER = ("batch.sequence_length", SEED)
# Knobs of our own data that leave the training sequences as they are.
_BESIDES = re.compile(r"data\.(ignore_id|val_main|val\.[^.]+\.(?!share$).*)")


def deciding_data(tree: Mapping[str, Any]) -> Plain:
    """Return what of a plain config decides which tokens the k-th training sequence has."""
    flat = flatten({key: tree[key] for key in ("data", "tokenizer", "batch", "train")})
    ours = is_ours(flat.get("data._target_"))
    found = {
        key: value
        for key, value in deciding_result(flat).items()
        if (key.startswith(("data.", "tokenizer.")) or key in _ORDER)
        and not (ours and _BESIDES.fullmatch(key))
    }
    if ours and "data.val_files" in found:  # without them a part of the rest is for validation
        found["data.val_files"] = found["data.val_files"] is not None
    return found


# Knobs of the sections train and optimizer that neither the memory nor the time of a step depends
# on.
_NO_WORK = {
    "train": (
        "max_steps", "max_epochs", "max_tokens", "max_flops", "tokens_per_parameter", "tail",
        "seed", "twin", "log_every", "eval_every", "eval_every_tokens", "max_consecutive_skips",
        "stop_step",
    ),
    "optimizer": ("lr", "weight_decay", "beta1", "beta2", "rule", "reference", "exponents"),
}  # fmt: skip


def deciding_work(config: Config, device_name: str) -> Plain:
    """Return what of a solved run the memory and the time of its steps depend on, besides data."""
    tree = plain(config)
    for section, names in _NO_WORK.items():
        tree[section] = {k: v for k, v in tree[section].items() if k not in names}
    for part in features.parts("config"):
        here = tree[part.SECTION]
        for name in getattr(part, "NO_WORK", ()):
            here.pop(name, None)
        for name in getattr(part, "SOMETIMES", ()):  # whether it comes at all
            here[name] = here.get(name) is not None
    whole = ("train", "optimizer", "batch", "model", "precision", "metrics", "hooks", "user")
    return {key: tree[key] for key in whole} | {
        "device": device_name,
        "parallelism": {k: v for k, v in tree["parallelism"].items() if "timeout" not in k},
        "clip": [tree["clip"]["kind"], *(k for k, v in tree["clip"].items() if v is not None)],
        "async": tree["checkpoint"]["async"],
    }
