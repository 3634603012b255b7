"""Compose overrides over the config of a run: that of a fork's parent, or of a run gone on with.

The saved config takes the place of ours, as options that Hydra finds in its store.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException

from llmexp.compose.overrides import PARENT, key_of, parsed, written
from llmexp.config.convert import with_knobs
from llmexp.config.knobs import fields
from llmexp.config.sections import Config, conf_dir, plain
from llmexp.config.values import AUTO, ConfigError, Plain, quoted, refuse
from llmexp.folders import rundir
from llmexp.folders.door import read_yaml
from llmexp.folders.naming import named_checkpoint
from llmexp.run.batch import BATCH_TOTALS, CUT_KEYS, cut_anew
from llmexp.run.budget import NO_BUDGET, budgets_in
from llmexp.run.layout import solve_layout
from llmexp.run.rules import batch_is_open

_BRINGS = re.compile(r"(\\*)\$\{(oc\.env:[^{},]+\})?")


def forks_in(overrides: Sequence[str]) -> list[tuple[Path, int | None]]:
    """Return the runs that a command line forks, with the steps that RUN@STEP names.

    Those of a sweep are in their order. Given again, the last fork.run counts, as for Hydra. Raises
    ConfigError for a folder that holds no run.
    """
    given = [o for o in overrides if key_of(o) == "fork.run" and "=" in o]
    runs: list[Any] = []
    with suppress(HydraException):  # refused later, in words
        for text in written(given).get("fork.run", ()):
            runs += [override.value() for override in parsed([f"fork.run={text}"])]
    if len(runs) > 1 and None in runs:
        way = "a run without a parent has none of its settings; train it by a command of its own"
        raise ConfigError("unsupported", f"{given[-1]}: {way}")
    return [existing_run(str(run)) for run in runs if run is not None]


def parents_in(overrides: Sequence[str]) -> list[Path]:
    """Return the folders of the runs that a command line forks, each once. Raises ConfigError."""
    return list(dict.fromkeys(run for run, _ in forks_in(overrides)))


def existing_run(given: str) -> tuple[Path, int | None]:
    """Return the folder of a run with a checkpoint, and the step of RUN@STEP.

    Raises ConfigError."""
    path, step = Path(given), None
    if "@" in given and not path.exists():
        path, step = named_checkpoint(given)
    rundir.check_plain(path)
    if not rundir.is_run(path):
        raise ConfigError("not_a_run", f"fork.run={given}: {rundir.why_no_run(path)}")
    if rundir.newest_step(path) is None:
        raise refuse("no_checkpoint", "fork.run", given, "has no checkpoint yet to fork from")
    return path, step


def with_steps(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the command line of a sweep with the steps that its forks begin at.

    The newest checkpoints may be others when the sweep is resumed. `overrides`: those among the
    words. Raises ConfigError."""
    forks = forks_in(overrides)
    steps = [o for o in overrides if key_of(o) == "fork.step"]
    if not forks or (steps and not steps[-1].endswith("=null")):
        return list(words)
    named = [(run, rundir.newest_step(run) if at is None else at) for run, at in forks]
    if len({step for _, step in named}) == 1 and not any(at for _, at in forks):
        return [*words, f"fork.step={named[0][1]}"]
    text = ",".join(quoted(f"{run}@{step}") for run, step in named)
    return [f"fork.run={text}" if key_of(word) == "fork.run" else word for word in words]


# The number of each run whose config is among the options.
_STORED: dict[Path, int] = {}


def root_of(beneath: Path | None, overrides: Sequence[str]) -> str | None:
    """Return the name of the config that overrides are put over: that of a run; None for ours.

    It is the run `beneath`, or the first one that they fork. Its config becomes an option of each
    group, and a config that chooses them all. Raises ConfigError."""
    runs = [beneath] if beneath else parents_in(overrides)
    if not runs:
        return None
    tree = _as_text(plain(rundir.built_config(runs[0])))
    tree["train"]["stop_step"] = None  # it has been there
    if beneath is None:
        steps = {key.partition(".")[2] for key, knob in fields().items() if knob.a_step}
        tree["train"] |= dict.fromkeys(steps) | {"twin": 0}
        tree["checkpoint"]["resume"], tree["tracker"]["name"] = "never", None
        del tree["fork"]
    whole, store = read_yaml(conf_dir() / "config.yaml"), ConfigStore.instance()
    option = f"{PARENT}_{_STORED.setdefault(runs[0], len(_STORED))}"
    for entry in whole["defaults"]:
        group = next(iter(entry)) if isinstance(entry, dict) else ""
        if group in tree:
            entry[group] = option
            store.store(option, tree.pop(group), group, provider=PARENT)
    store.store(option, whole | tree, provider=PARENT)
    return option


def _as_text(node: Any) -> Any:
    """Return plain values with texts that bring nothing from elsewhere but variables.

    A composed config holds no other interpolation, and those of a foreign one could be endless.
    """
    if isinstance(node, dict):
        return {key: _as_text(value) for key, value in node.items()}
    if isinstance(node, list):
        return list(map(_as_text, node))
    if not isinstance(node, str):
        return node
    return _BRINGS.sub(lambda m: f"{m[1] * 2}{'' if m[2] else chr(92)}${{{m[2] or ''}", node)


def settle(tree: Plain, overrides: Sequence[str], folder: Callable[[], Path]) -> Path:
    """Put the step of a fork, and the start and end of its cooldown, into the plain config.

    Return its parent. A fork that is in its `folder` already keeps its step. Raises ConfigError."""
    fork = tree["fork"]
    if not (forks := forks_in(overrides)):
        text = "must be on the command line, because other settings follow from it"
        raise refuse("unsupported", "fork.run", fork["run"], text, "outputs/trunk")
    run, at = forks[0]
    if at is not None:
        if fork.get("step") is not None:
            text = f"fork.run={run}@{at} names a step too; leave one of them out"
            raise refuse("conflict", "fork.step", fork["step"], text)
        fork |= {"run": str(run), "step": at}
    if fork.get("step") is None:
        before = rundir.read_run(folder()).get("parent") or {}
        same = before.get("folder") == str(run)
        fork["step"] = before.get("step") if same else rundir.newest_step(run)
    schedule, step = tree.get("schedule"), fork["step"]
    if not isinstance(schedule, dict) or not isinstance(step, int):
        return run
    ours = schedule.get("_target_") == "llmexp.optim.schedule.cooldown"
    if ours and schedule.get("decay_start", step) is None:
        schedule["decay_start"] = step
        if not budgets_in(overrides) and isinstance(tree.get("train"), dict):
            tree["train"] |= NO_BUDGET | {"max_steps": step + _updates(step, schedule)}
    return run


def follow(tree: Plain, overrides: Sequence[str], run: Path, fork: bool) -> None:
    """Put what follows from overrides over the config of `run` into the plain config.

    The cut of the batch is solved anew where a part of it is given. The warm-up keeps its length,
    in updates, where it was a share of another budget."""
    given, batch, schedule = _keys(overrides), tree.get("batch"), tree.get("schedule")
    if isinstance(batch, dict) and given.intersection(CUT_KEYS):
        batch |= {key.partition(".")[2]: None for key in CUT_KEYS if key not in given}
    # one of them is enough
    if isinstance(batch, dict) and (same := given.intersection(BATCH_TOTALS)):
        batch |= {key.partition(".")[2]: None for key in BATCH_TOTALS if key not in same}
    elif isinstance(batch, dict) and "batch.sequence_length" in given:
        batch["tokens_per_step"] = None
    if isinstance(schedule, dict) and (fork or budgets_in(overrides)):
        _take_warmup(schedule, given, run)


def _take_warmup(schedule: Plain, given: set[str], run: Path) -> None:
    """Give a schedule as many updates of warm-up as `run` has, unless overrides say how many.

    A schedule of the user's may know none."""
    keys = ("warmup_steps", "warmup_ratio")
    there = plain(rundir.built_config(run))["schedule"]
    if not all(key in section for key in keys for section in (schedule, there)):
        return
    if "schedule.warmup_steps" in given:
        return
    updates = rundir.read_run(run).get("warmup_updates")
    if "schedule.warmup_ratio" in given:
        schedule["warmup_steps"] = None
    elif isinstance(updates, int) and schedule["warmup_steps"] != updates:
        schedule |= {"warmup_steps": updates, "warmup_ratio": None}


def _updates(step: int, schedule: Plain) -> int:
    """Return the length of a cooldown that starts after `step`.

    It is decay_steps, or so many updates that they are the share decay_ratio of all."""
    steps, ratio = schedule.get("decay_steps"), schedule.get("decay_ratio")
    if steps is not None:
        return steps if isinstance(steps, int) else 1  # refused by its schedule
    if not isinstance(ratio, (int, float)) or not 0 < ratio < 1:
        text = "this share of all updates makes no length of a cooldown; give one between 0 and 1"
        raise refuse("out_of_range", "schedule.decay_ratio", ratio, text, 0.2)
    return max(1, math.floor(step * ratio / (1 - ratio) + 0.5))


def _keys(overrides: Sequence[str]) -> set[str]:
    return set(map(key_of, overrides))


def recut(config: Config, overrides: Sequence[str]) -> Config:
    """Return a config over that of a run with its batch cut for its ranks, unless that is given."""
    ranks = config.parallelism.nproc_per_node
    if _keys(overrides).intersection(CUT_KEYS) or batch_is_open(config.batch):
        return config
    if config.batch.micro_batch_size == AUTO:  # of a file; the accumulation is the run's
        return with_knobs(config, batch={"gradient_accumulation_steps": None})
    dp_size = None if ranks is None else solve_layout(config.parallelism, ranks).dp_size
    return dataclasses.replace(config, batch=cut_anew(config.batch, dp_size))
