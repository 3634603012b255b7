"""Compose overrides over the config of a run: that of a fork's parent, or of a run gone on with.

The saved config takes the place of ours, as options that Hydra finds first.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException

from llmexp.compose.overrides import key_of, parsed
from llmexp.run.batch import cut_anew
from llmexp.run.budget import NO_BUDGET, budgets_in
from llmexp.run.layout import solve_layout
from llmexp.runs import rundir
from llmexp.settings.config import Config, conf_dir, plain
from llmexp.settings.convert import with_knobs
from llmexp.settings.values import AUTO, ConfigError, refuse

PREFIX = "llmexp-fork-"  # of the folder of options
OPTION = "parent"  # of each group: what the parent had
CUT = ("batch.micro_batch_size", "batch.gradient_accumulation_steps")


def parent_in(overrides: Sequence[str]) -> Path | None:
    """Return the run that a command line forks, None where it forks none.

    Given again, the last one counts, as for Hydra. Raises ConfigError for several, and for a folder
    that holds no run."""
    given = [o for o in overrides if o.lstrip("+").startswith("fork.run=")]
    run = None
    with suppress(HydraException):  # refused later, in words
        for override in parsed(given):
            if override.is_sweep_override():
                text = "several runs are several sweeps; fork.step takes several steps of one run"
                raise ConfigError(f"{override.input_line}: {text}")
            run = override.value()
    return None if run is None else existing_run(str(run))


def existing_run(given: str) -> Path:
    """Return the folder of a run with a checkpoint. Raises ConfigError."""
    path = Path(given)
    rundir.check_plain(path)
    if not rundir.is_run(path):
        raise ConfigError(f"fork.run={given}: {rundir.no_run(path)}")
    if not rundir.saved_steps(path):
        raise refuse("fork.run", given, "has no checkpoint yet that a fork could go on from")
    return path


def newest_step(overrides: Sequence[str]) -> list[str]:
    """Return the override of fork.step that a sweep over a fork lacks.

    The newest checkpoint may be another one when the sweep is resumed."""
    run = parent_in(overrides)
    given = [o for o in overrides if o.lstrip("+").startswith("fork.step=")]
    if run is None or (given and not given[-1].endswith("=null")):
        return []
    return [f"fork.step={rundir.saved_steps(run)[-1]}"]


@contextmanager
def options(run: Path, fork: bool) -> Iterator[Path]:
    """Write the config of a run as a folder of options, and a config.yaml that chooses them.

    Yield the folder, which is removed at the end. Raises ConfigError."""
    tree = plain(rundir.built_config(run))
    tree["train"]["stop_step"] = None  # it has been there
    if fork:
        tree["train"] |= {"profile_start": None, "twin": 0}
        tree["checkpoint"]["resume"], tree["tracker"]["name"] = "never", None
        del tree["fork"]
    whole = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        for entry in whole["defaults"]:
            group = next(iter(entry)) if isinstance(entry, dict) else ""
            if group in tree:
                entry[group] = OPTION
                _write(Path(name, group, f"{OPTION}.yaml"), tree.pop(group))
        _write(Path(name, "config.yaml"), whole | tree)
        yield Path(name)


def _write(path: Path, tree: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


def settle(
    tree: dict[str, Any], overrides: Sequence[str], folder: Callable[[], Path]
) -> Path | None:
    """Put the step of a fork, and the start and end of its cooldown, into the plain config.

    Return its parent, None where the config is no fork's. A fork that is in its `folder` already
    keeps its step. Raises ConfigError."""
    fork = tree.get("fork")
    if not isinstance(fork, dict) or fork.get("run") is None:
        return None
    if (run := parent_in(overrides)) is None:
        text = "is taken from the command line, because all that is not given follows from it"
        raise refuse("fork.run", fork["run"], text, "outputs/trunk")
    if fork.get("step") is None:
        before = rundir.read_run(folder()).get("parent") or {}
        same = before.get("folder") == str(run)
        fork["step"] = before.get("step") if same else rundir.saved_steps(run)[-1]
    schedule, step = tree.get("schedule"), fork["step"]
    if not isinstance(schedule, dict) or not isinstance(step, int):
        return run
    ours = schedule.get("_target_") == "llmexp.update.schedule.cooldown"
    if ours and schedule.get("decay_start", step) is None:
        schedule["decay_start"] = step
        if not budgets_in(overrides) and isinstance(tree.get("train"), dict):
            tree["train"] |= NO_BUDGET | {"max_steps": step + _updates(step, schedule)}
    return run


def follow(tree: dict[str, Any], overrides: Sequence[str], run: Path, fork: bool) -> None:
    """Put what follows from overrides over the config of `run` into the plain config.

    The cut of the batch is solved anew where a part of it is given. The warm-up keeps its length,
    in updates, where it was a share of another budget."""
    given, batch, schedule = _keys(overrides), tree.get("batch"), tree.get("schedule")
    if isinstance(batch, dict) and given.intersection(CUT):
        batch |= {key.partition(".")[2]: None for key in CUT if key not in given}
    if isinstance(schedule, dict) and (fork or budgets_in(overrides)):
        _take_warmup(schedule, given, run)


def _take_warmup(schedule: dict[str, Any], given: set[str], run: Path) -> None:
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


def _updates(step: int, schedule: dict[str, Any]) -> int:
    """Return the length of a cooldown that starts after `step`.

    It is decay_steps, or so many updates that they are the share decay_ratio of all."""
    steps, ratio = schedule.get("decay_steps"), schedule.get("decay_ratio")
    if steps is not None:
        return steps if isinstance(steps, int) else 1  # refused by its schedule
    if not isinstance(ratio, (int, float)) or not 0 < ratio < 1:
        text = "this share of all updates makes no length of a cooldown; give one between 0 and 1"
        raise refuse("schedule.decay_ratio", ratio, text, 0.2)
    return max(1, math.floor(step * ratio / (1 - ratio) + 0.5))


def _keys(overrides: Sequence[str]) -> set[str]:
    return set(map(key_of, overrides))


def recut(config: Config, overrides: Sequence[str]) -> Config:
    """Return a config over that of a run with its batch cut for its ranks, unless that is given."""
    ranks = config.parallelism.nproc_per_node
    if _keys(overrides).intersection(CUT):
        return config
    if config.batch.micro_batch_size == AUTO:  # of a file; the accumulation is the run's
        return with_knobs(config, batch={"gradient_accumulation_steps": None})
    dp_size = None if ranks is None else solve_layout(config.parallelism, ranks).dp_size
    return dataclasses.replace(config, batch=cut_anew(config.batch, dp_size))
