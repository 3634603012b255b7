"""Tell which runs are one setting, and which settings are one computation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from llmexp.compare.figures import over_items
from llmexp.compare.records import APART, REACHED, TWIN, Record, Setting, is_execution
from llmexp.compare.statistics import mean_interval
from llmexp.config.knobs import SEED, affects
from llmexp.config.labels import short_label
from llmexp.config.rules import rule_sets_batch
from llmexp.folders.folder import STATES
from llmexp.metrics.keys import is_score
from llmexp.run.batch import BATCH_TOTALS, CUT_KEYS
from llmexp.system.text import one_line

FORK, RULE = "fork.run", "optimizer.rule"
_PREFERRED = (
    "batch.gradient_accumulation_steps",
    "batch.real_batch_size",
    "batch.micro_batch_size",
)
_DECIDE_BUDGETS = (
    "batch.", "fork.", "schedule.decay_start", "schedule.decay_steps", "schedule.decay_ratio",
)  # fmt: skip
_RATES = re.compile(r"optimizer\.(lr|\w+_lr)")
_BY_RULE = re.compile(r"optimizer\.(lr|weight_decay|beta2|reference\..+|exponents\..+)")
_NAME_OF_SEED = re.compile(r"(?<![A-Za-z])seed[_=]?[0-9]+[,+]?")


def differing_keys(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the config keys whose values differ between runs that have a config, by section."""
    configs = [r.config for r in records if r.config]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    found = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    found = [key for key in found if key != "checkpoint.resume"]  # `llmexp resume` sets it
    own = [r for r in records if not r.foreign]  # of others what is no setting is not in the config
    found = [key for key in found if not own or not is_execution(key)] or found
    sections = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    return tuple(sorted(found, key=lambda key: sections.index(key.partition(".")[0])))


def batch_cut(record: Record) -> str:
    """Return how the run's batch is cut into micro-batches and ranks."""
    keys = ("micro_batch_size", "gradient_accumulation_steps", "dp_size")
    return str([record.batch(key) for key in keys])


def folded(records: Sequence[Record]) -> list[list[Record]]:
    """Group runs that differ in nothing but the seed, and in that of their trunks.

    Repeats of one seed are no new evidence and stay apart. A run that takes part goes before one
    that is left out, which it may have been made to replace.
    """
    groups: dict[object, list[Record]] = {}
    repeats = Counter[object]()
    for r in sorted(records, key=lambda r: bool(r.out)):
        setting: object = r.path.resolve()
        if SEED in r.config:
            setting = _without(r, SEED, FORK), repr(r.parent.get("setting") or r.config.get(FORK))
        groups.setdefault((setting, repeats[setting, r.seed]), []).append(r)
        repeats[setting, r.seed] += 1
    return list(groups.values())


def computation(record: Record) -> object:
    """Return what is equal for runs that compute the same but for rounding, seeds aside.

    A cut also changes what dropout draws, so with dropout only twins and repeats are one
    computation.
    """
    if not record.config:
        return record.path
    cuts: Iterable[str] = ()
    if not record.foreign and not any(
        "dropout" in k and v not in (0, None) for k, v in record.config.items()
    ):
        cuts = (key for key in record.config if affects(key) == "rounding")
    return _without(record, SEED, TWIN, *cuts), repr(record.batch("real_batch_size"))


def _without(record: Record, *keys: str) -> frozenset[tuple[str, str]]:
    return frozenset((k, v) for k, v in record.essence.items() if k not in keys)


def setting_of(group: Sequence[Record], differing: Sequence[str], tokenizer: str = "") -> Setting:
    """Make the setting of runs that differ in the seed alone.

    It has means over those that take part, notes and a state. `tokenizer`: a note on it, where
    several are.
    """
    first, name = group[0], group[0].name
    keys = [key for key in differing if first.config]
    if len(group) > 1:
        name = f"{_NAME_OF_SEED.sub('', name).strip('+,_- ')} x{len(group)}".strip()
        several = len({r.config.get(FORK) for r in group}) > 1  # a trunk for each seed
        keys = [key for key in keys if key != SEED and not (several and key == FORK)]
    usable = [r for r in group if not r.out] or group
    figures = {}
    intervals = {}
    for key in dict.fromkeys(key for r in usable for key in r.figures):
        known = [r.figures[key] for r in usable if key in r.figures]
        if key in ("steps", "tokens_seen") and first.foreign and len({*known}) > 1:
            continue  # no run has the mean of lengths
        if key == "target/after" and len(known) < len(usable):
            continue  # some were there by their first evaluation
        figures[key], interval = mean_interval(known)
        # of two it would be six times as wide as they lie apart
        if interval and len(known) > 2 and key != REACHED:
            intervals[key] = interval
        if is_score(key) and (interval := over_items(key, usable)):
            intervals[key] = interval
    if figures.get(REACHED, 1.0) < 1.0:  # no mean of where some of the runs reach the target
        figures = {k: v for k, v in figures.items() if k == REACHED or not k.startswith("target/")}
    tally = Counter(r.state or "of no known state" for r in group)
    states = ", ".join(f"{count} {state}" for state, count in tally.items())
    notes = [f"{len(usable)} of {len(group)} seeds ({states})" * (len(tally) > 1), tokenizer]
    for r in group:
        left = f"left out after {r.rung:.0%} of its steps" if r.rung is not None else ""
        error = str(r.status.get("error") or "") if r.state in ("failed", "preempted") else ""
        notes += [r.lost, left, one_line(error, 200)]
    return Setting(
        name=name,
        runs=tuple(group),
        values={key: first.config.get(key) for key in keys},
        figures=figures,
        intervals=intervals,
        state=max((r.state for r in group), key=["", *STATES].index),
        note="; ".join(note for note in dict.fromkeys(notes) if note),
        computation=computation(first),
    )


def factors(settings: Sequence[Setting], differing: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that name the settings.

    They are those that vary of themselves among the settings that take part, and the swept ones
    that only settings that are left out have other values of.
    """
    taking_part = [e for e in settings if not e.out]
    if len(taking_part) < 2:
        taking_part = list(settings)
    swept = {TWIN, *(key for e in settings for r in e.runs for key in r.swept)}
    every = _independent(settings, differing)
    found = {key for key in every if {key, key.partition(".")[0]} & swept}
    found.update(_independent(taking_part, differing))
    return tuple(sorted(found, key=lambda key: (key == TWIN, differing.index(key))))


def varying(settings: Sequence[Setting], keys: Sequence[str]) -> list[str]:
    """Return the keys that have several values among the settings that have a config."""
    known = [e.values for e in settings if e.values]
    return [key for key in keys if len({repr(values.get(key)) for values in known}) > 1]


def _independent(settings: Sequence[Setting], differing: Sequence[str]) -> list[str]:
    """Return the keys that vary, less the seed and those that follow from others.

    Such are the real batch from the accumulation, and what optimizer.rule sets.
    """
    settings = [e for e in settings if e.values]
    runs = [r for e in settings for r in e.runs]
    swept = {key for r in runs for key in r.swept}
    varied = varying(settings, differing)
    keys = [key for key in varied if all(key in e.values for e in settings) and key != SEED]
    if RULE in swept or all(r.config.get(RULE, "none") != "none" for r in runs):
        batches = any(rule_sets_batch(r.config) for r in runs)
        of_batch = {*CUT_KEYS, *BATCH_TOTALS} if batches else set()
        own = [k for k in keys if k in swept or not (_BY_RULE.fullmatch(k) or k in of_batch)]
        keys = own or keys

    def follows(key: str, other: str) -> bool:
        if key.startswith("optimizer.") and "optimizer" not in swept:
            rate = _RATES.fullmatch(key) and None not in (e.values[key] for e in settings)
            if rate or other != "optimizer._target_":
                return False  # both were chosen, such as by an experiment
        section, first = (k.partition(".")[0] for k in (key, other))
        # A batch, a fork or a cooldown, with which a fork ends, decide the budget; a fork what it
        # fixes in its schedule, and all that is not given; a tokenizer the vocabulary.
        near = section == first or other == FORK
        near |= key.startswith("train.max_") and other.startswith(_DECIDE_BUDGETS)
        near |= first == "fork" and key.startswith(("schedule.decay_start", "schedule.warmup_"))
        near |= key == "model.vocab_size" and first == "tokenizer"
        if not near:
            return False
        pairs = {(repr(e.values[other]), repr(e.values[key])) for e in settings}
        return len(pairs) == len({value for value, _ in pairs})

    def weight(key: str) -> tuple[bool, bool, int]:
        preferred = _PREFERRED.index(key) if key in _PREFERRED else -1
        return key not in swept, not key.startswith(("batch.", "fork.")), preferred

    kept: list[str] = []
    for key in sorted(keys, key=weight):
        if key in swept or not any(follows(key, other) for other in kept):
            kept.append(key)
    return kept


def label(settings: Sequence[Setting], keys: Sequence[str]) -> None:
    """Give each setting its short name: accum=1 clip=0.5, else its seeds, or the name of its run.

    Repeats would share one: a single run has the name of its folder, and several sets of seeds a
    number behind the name. Of several that only seeds tell apart each has the name of its folders.
    """
    for s in settings:
        shown = {}
        if s.out not in APART and s.values and len(keys) <= 4:
            shown = {key: s.values.get(key) for key in keys if key != TWIN or s.values.get(key)}
        s.label = short_label(shown)
    nameless = [s for s in settings if not s.label]
    alone = sum(len(s.runs) > 1 for s in nameless) == 1 and len(keys) <= 4
    for s in nameless:
        s.label = f"{len(s.runs)} seeds" if alone and len(s.runs) > 1 else s.name
    known, seen = Counter(s.label for s in settings), Counter[str]()
    sets = Counter(s.label for s in settings if len(s.runs) > 1)
    for s in settings:
        seen[s.label] += len(s.runs) > 1
        if len(s.runs) == 1 and known[s.label] > 1:
            s.label = s.name
        elif sets[s.label] > 1:
            s.label = f"{s.label} ({seen[s.label]})"
