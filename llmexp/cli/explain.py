"""`llmexp explain KEY`: show a knob, a number or a group, who set it, and what it changes."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from omegaconf import MISSING, DictConfig, OmegaConf

from llmexp.cli.preparing import Prepare
from llmexp.cli.running import CommandLine
from llmexp.compose import app
from llmexp.compose.overrides import (
    COMMAND_LINE,
    Layer,
    layers,
    loader,
    options_of,
    typed_in,
    unresolved,
    written,
)
from llmexp.compose.putting import unknown
from llmexp.config import sections
from llmexp.config.knobs import affects, fields
from llmexp.config.labels import ALIASES, short_value
from llmexp.config.sections import Config, conf_dir
from llmexp.config.values import ConfigError, flatten, section_knobs
from llmexp.forecast.section import PlanKnobs
from llmexp.metrics.keys import ROW_KEYS, is_of_named_set
from llmexp.run import Run
from llmexp.run.budget import BUDGETS, budgets_in
from llmexp.run.derived import Derived
from llmexp.run.layout import DERIVED_SIZES, Layout
from llmexp.run.rules import keys_set, rules_in_words
from llmexp.sweep.section import Sweep
from llmexp.system.text import first_of

NUMBERS = {f.name: f for cls in (Run, Layout) for f in dataclasses.fields(cls) if f.metadata}
DERIVED: dict[str, Derived] = {n: f.metadata[Derived] for n, f in NUMBERS.items()} | DERIVED_SIZES
WIDTH = 80
_CHANGES = {
    "result": "the result",
    "rounding": "rounding only: the result stays the same to its last digits",
    "nothing": "no result: names, records and time",
}
CAN_END = (
    "train.max_consecutive_skips", "train.stop_step", "checkpoint.max_failures",
    "parallelism.start_timeout_s", "parallelism.timeout_s",
)  # fmt: skip
# Sections that are no part of a run's own config, and what each says.
OF_COMMANDS: dict[str, tuple[type, str]] = {
    "sweep": (Sweep, "the runs of a sweep are trained"),
    "prepare": (Prepare, "llmexp prepare works"),
    "plan": (PlanKnobs, "llmexp plan works"),
}
_COMMANDS = tuple(f"{name}." for name in OF_COMMANDS)


def explain(
    key: Annotated[
        str,
        "KEY",
        "a knob (clip.max_norm, or its short name clip), a number of the run (real_batch_size), a "
        "group or a section (optimizer, train), or a figure of the rows (val/loss)",
    ],
    line: CommandLine = (),
) -> Explained:
    """Show a knob, a number or a group: its value, who set it, what follows, and what it changes.

    For example: llmexp explain batch.real_batch_size batch.gradient_accumulation_steps=4
    """
    with app.composed(line) as (cfg, _):
        return Explained(explained(cfg, app.typed_config(cfg), key))


@dataclass(frozen=True)
class Explained:
    """All that is known of a key: what `llmexp explain --json` prints."""

    data: dict[str, Any]

    def __str__(self) -> str:
        return "\n".join(screen_lines(self.data))


def explained(cfg: DictConfig, config: Config, key: str) -> dict[str, Any]:
    """Return all that is known of a key, as plain values. Raises ConfigError."""
    if key not in DERIVED:
        key = next((full for full, short in ALIASES.items() if short == key), key)
    given = [str(o) for o in cfg.hydra.overrides.task]
    swept = swept_in(cfg)
    every = layers(cfg)
    flat = flatten(sections.plain(config))
    of_commands: Any = OmegaConf.to_container(OmegaConf.masked_copy(cfg, list(OF_COMMANDS)))
    flat |= flatten(of_commands)
    for layer in every:  # empty sections are no knobs yet
        flat |= {k: v for k, v in layer.values.items() if v == {} and not knobs_in(k, every, flat)}
    theirs = arguments_of_library(cfg, config, key)
    if key in cfg.hydra.runtime.choices and key not in flat:
        found = group(cfg, every, flat, key)
        return found | {"knobs": [*found["knobs"], *(theirs[k] for k in theirs if k not in flat)]}
    if key in DERIVED:
        found = {"key": key, "meaning": DERIVED[key].meaning, **solved(config, key)}
        return found | {"used_by": used_by(key)}
    if key not in flat:
        if (knob := theirs.get(key)) is None:
            return of_no_knob(cfg, every, flat, key)
        history = [{"value": knob["value"], "from": knob.pop("from")}]
        return knob | {"history": history, "affects": _CHANGES["result"]}
    setting = [layer for layer in every if layer.values.get(key, MISSING) != MISSING]
    history = [{"value": layer.values[key], "from": layer.source} for layer in setting]
    budgets = [o for o in given if budgets_in([o])] if key in BUDGETS else []
    if budgets and flat[key] is None and history and history[-1]["value"] is not None:
        history.append({"value": None, "from": f"{COMMAND_LINE}, by {' and '.join(budgets)}"})
    meaning = meaning_of(key, every) or theirs.get(key, {}).get("meaning", "")
    found = {"key": key, "value": flat[key], "meaning": meaning, "history": history}
    found["affects"] = changes(key)
    if key == "optimizer.rule":
        found["rules"] = rules_in_words()
    conditions = fields()[key].acts if key in fields() else ()
    for acts in conditions:
        is_what = f"is {' or '.join(map(short_value, acts.values))}" if acts.values else "is given"
        where = f"where {' or '.join(acts.keys)} {is_what}"
        found["acts"] = f"{found['acts']}, {where}" if "acts" in found else where
    if key in swept:
        found["swept"] = swept[key]
    set_by = [name for keys in keys_set(config.optimizer).values() for name in keys]
    if (flat[key] in (None, "auto") or key in set_by) and not key.startswith(_COMMANDS):
        found |= {k: v for k, v in solved(config, key).items() if k != "value"}
    beside = [k for k, knob in fields().items() if any(key in one.keys for one in knob.acts)]
    found["used_by"] = [*used_by(key), *beside]
    return found


def swept_in(cfg: DictConfig) -> dict[str, Any]:
    """Return the values of a sweep as its file (hydra.sweeper.params) or command line has them."""
    there, typed = cfg.hydra.sweeper.get("params") or {}, written(typed_in(cfg))
    found: dict[str, Any] = {key: values for key, values in there.items() if key not in typed}
    return found | {key: ",".join(values) for key, values in typed.items() if len(values) > 1}


def used_by(key: str) -> list[str]:
    """Return the derived numbers that follow directly from a key, or from another one of them."""
    section, _, name = key.rpartition(".")
    there = {key, name} if name in DERIVED and section == "batch" else {key}
    if (group := key.partition(".")[0]) in ("model", "data", "tokenizer"):
        there.add(group)
    return [other for other, d in DERIVED.items() if there & set(d.sources) and other != name]


def of_no_knob(
    cfg: DictConfig, every: list[Layer], flat: dict[str, Any], key: str
) -> dict[str, Any]:
    """Return what is known of a section, or of a figure of the rows.

    Raises ConfigError for an unknown key.
    """
    if knobs := knobs_in(key, every, flat):
        return {"key": key, "knobs": knobs}
    if key in (swept := swept_in(cfg)):  # the config that all points share lacks it
        return {"key": key, "swept": swept[key], "affects": changes(key)}
    if row := row_key(key):
        same = [k for k in flat if k.rpartition(".")[2] == key]
        knob = f"; {first_of(same)} is a knob" if same else ""
        return {"key": key, "meaning": row, "of": f"the rows of a run, metrics.jsonl{knob}"}
    raise unknown(key, unresolved(cfg), (), [name for name in DERIVED if name not in cfg])


def solved(config: Config, key: str) -> dict[str, Any]:
    """Return what the run makes of a number, or of a knob that was left open.

    Empty where nothing follows.
    """
    from llmexp.train.assembly.assemble import assemble

    try:
        parts = assemble(config)
    except ConfigError as error:
        return {"value": None, "unsolved": str(error)}
    config, numbers, name = parts.config, parts.run.as_dict(), key.rpartition(".")[2]
    of_the_run = key.partition(".")[0] in (key, "batch", "parallelism", "train")
    if name in DERIVED and of_the_run:
        value, number = numbers.get(name), DERIVED[name]
        formula = fill_formula(number.formula, numbers)
    else:
        value = flatten(sections.plain(config)).get(key)
        if not key.startswith("optimizer.") or "rule" not in numbers:
            open_still = value in (None, "auto")
            return {"value": value} if open_still else {"value": value, "derived": value}
        number, formula = DERIVED["rule"], numbers["rule"]
    return {"value": value, "derived": value, "formula": formula, "from": list(number.sources)}


def fill_formula(formula: str, numbers: dict[str, Any]) -> str:
    """Return a formula with the numbers of a run; empty where one of them is not known."""
    values = {word: numbers.get(word) for word in re.findall(r"{(\w+)}", formula)}
    if None in values.values():
        return ""
    shown_as = {k: f"{v:,}" if isinstance(v, int) else short_value(v) for k, v in values.items()}
    return formula.format_map(shown_as)


def group(cfg: DictConfig, every: list[Layer], flat: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a group: its option, who chose it, all options, and its knobs with their values."""
    choices = cfg.hydra.runtime.choices
    experiment, by = f"experiment/{choices.get('experiment')}", "conf/config.yaml"
    if choices.get("experiment") and name != "experiment":
        chosen = loader().repository.load_config(experiment).defaults_list or []
        of_groups = [d for d in chosen if getattr(d, "override", False)]
        if name in (str(d.group).lstrip("/") for d in of_groups):
            by = next((layer.source for layer in every if experiment in layer.source), by)
    if any(str(o).lstrip("+").startswith(f"{name}=") for o in cfg.hydra.overrides.task):
        by = COMMAND_LINE
    found = {"key": name, "value": choices[name], "chosen_by": by}
    knobs = knobs_in(name, every, flat)
    return found | {"options": options_of(name), "knobs": knobs}


def knobs_in(section: str, every: list[Layer], flat: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the knobs of a section with their values; none where there is no such section."""
    knobs = []
    for key in (k for k in flat if k.startswith(f"{section}.") and not k.endswith("._target_")):
        sources = [layer.source for layer in every if key in layer.values]
        if sources:
            found = {"key": key, "value": flat[key], "from": sources[-1]}
            knobs.append(found | {"meaning": meaning_of(key, every)})
    return knobs


def arguments_of_library(cfg: DictConfig, config: Config, key: str) -> dict[str, Any]:
    """Return the arguments of a named optimizer of a library, with their defaults there."""
    name, chosen = config.optimizer.get("name"), cfg.hydra.runtime.choices["optimizer"]
    if key.partition(".")[0] != "optimizer" or chosen != "library" or not name:
        return {}
    from llmexp.optim.optimizers import library

    return library.arguments_of_optimizer(str(name))


def row_key(key: str) -> str | None:
    """Return the meaning of a key of the rows, with its unit; None for a key that is none."""
    _, name, what = key.split("/") if is_of_named_set(key) else ("", "", "")
    if (known := ROW_KEYS.get(f"val/{what}" if name else key)) is None:
        return None
    unit = f" ({known.unit})" if known.unit else ""
    return f"{known.meaning}{f', of the set {name}' if name else ''}{unit}"


def meaning_of(key: str, every: list[Layer]) -> str:
    """Return the documentation of a knob with its range.

    It stands in the typed section, else in the comment of the YAML.
    """
    section, _, name = key.partition(".")
    known = section_knobs(OF_COMMANDS[section][0]) if section in OF_COMMANDS else fields()
    if (found := known.get(name if section in OF_COMMANDS else key)) is not None:
        return found.meaning
    texts = (comment(layer, key) for layer in reversed(every) if key in layer.values)
    return next(filter(None, texts), "")


def comment(layer: Layer, key: str) -> str:
    """Return the comment beside a key in its file."""
    file = Path(layer.source)
    if layer.source.startswith("conf/") and not file.is_file():
        file = conf_dir().parent / file
    if not file.is_file():
        return ""
    name = re.escape(key.rpartition(".")[2])
    found = re.search(rf"^\s*{name}:[^#\n]*#\s*(.+)$", file.read_text(encoding="utf-8"), re.M)
    return found[1].strip() if found else ""


def changes(key: str) -> str:
    """Return what another value changes."""
    if key.startswith(_COMMANDS):
        return f"how {OF_COMMANDS[key.partition('.')[0]][1]}, and no result of a run"
    if key in CAN_END:
        return "when a run stops before its end, and nothing of a result until then"
    if (decides := getattr(fields().get(key), "decides", None)) is not None:
        return f"{_CHANGES['result']} {decides.words}"
    if key.startswith("batch.") and affects(key) == "rounding":
        return "real_batch_size, and with it the result; at the same real_batch_size rounding only"
    return _CHANGES[affects(key)]


def screen_lines(found: dict[str, Any]) -> list[str]:
    """Return the lines of one screen."""
    lines = [f"{found['key']} = {value_text(found['value'])}" if "value" in found else found["key"]]
    for name, words in lines_of(found):
        wrapped = textwrap.wrap(words, WIDTH - 13, break_on_hyphens=False)
        lines += [f"  {'' if n else name:<10} {line}" for n, line in enumerate(wrapped)]
    for knob in found.get("knobs", ()):
        setting = f"  {knob['key']} = {value_text(knob['value'])}"
        line = f"{setting:<38} {knob['meaning'].partition(';')[0]}".rstrip()
        lines.append(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}...")
    return lines


def lines_of(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the words of each line; without words there is none."""
    yield "meaning", found.get("meaning", "")
    yield "stands in", found.get("of", "")
    yield "chosen by", found.get("chosen_by", "")
    yield "options", ", ".join(found.get("options", ()))
    history = found.get("history", [])
    if history:
        last = history[-1]
        yield "set by", last["from"]
        if last["value"] != found["value"] and "derived" not in found:
            now = f"{value_text(found['value'])} once the command line is read"
            yield "becomes", f"{value_text(last['value'])} there, {now}"
        for earlier in reversed(history[:-1]):
            yield "replaced", f"{value_text(earlier['value'])} from {earlier['from']}"
    elif "history" in found:
        yield "set by", "nothing: it is left at its default, as it does nothing here"
    yield "swept", str(found.get("swept", ""))
    for number, (rule, words) in enumerate(found.get("rules", {}).items()):
        yield "" if number else "rules", f"{rule}: {words}"
    if "derived" in found:
        value = f"{value_text(found['derived'])}: " if history else ""
        yield "derived", f"{value}{found.get('formula') or 'worked out when a run starts'}"
    yield "from", ", ".join(found.get("from", ()))
    for name in ("unsolved", "acts", "affects"):
        yield name, found.get(name, "")
    yield "used by", ", ".join(found.get("used_by", ()))


def value_text(value: Any) -> str:
    """Return a value as an override would have it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    return json.dumps(value) if isinstance(value, (list, dict)) else short_value(value)
