"""Extend a run: another budget, where all that it has done so far would have been the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmexp.checkpoint.loading import Loaded
from llmexp.config.values import ConfigError, refuse
from llmexp.folders import rundir
from llmexp.run import endless_stages
from llmexp.run.batch import solve_batch
from llmexp.run.budget import BUDGETS, NO_BUDGET, solve_budget
from llmexp.train.assembly.assemble import Parts
from llmexp.train.assembly.solving import rate_factor


def run(path: Path, old: dict[str, Any], parts: Parts, loaded: Loaded) -> None:
    """Raise ConfigError unless training with the new budget would have made the same checkpoint.

    `old` is the flat config of the run in `path`, and `parts` have the new budget."""
    now, config = parts.run, parts.config
    budgets: dict[str, Any] = {name: old.get(f"train.{name}") for name in NO_BUDGET}
    before = solve_budget(
        dataclasses.replace(config.train, **budgets),
        endless_stages(config.optimizer, solve_batch(config.batch, now.dp_size), now),
        now.sequence_length,
        now.train_sequences,
        now.begin,
        now.token_cost,
    )
    given = {f"train.{name}": getattr(config.train, name) for name in NO_BUDGET}
    key = next((k for k, value in given.items() if value is not None), BUDGETS[0])
    value = given[key]
    if now.max_steps <= loaded.step:
        text = f"is {now.max_steps:,} steps, and {path} is at step {loaded.step:,} already"
        raise refuse("out_of_range", key, value, text)
    if before.tail_sequences and loaded.step == before.max_steps:
        step = max((s for s in rundir.saved_steps(path) if s < loaded.step), default=None)
        text = f"the last step of {path} was a short one, which a longer run does not have"
        raise ConfigError("other_run", f"{key}={value}: {text}; {_fork(path, step, key, value)}")
    section = {k[9:]: v for k, v in old.items() if k.startswith("schedule.")}
    then = rate_factor(section, before.max_steps)
    updates = int(loaded.state["progress"]["updates"])
    other = next((u for u in range(updates) if then(u) != parts.rate_factor(u)), None)
    if other is not None:
        step = max((s for s in rundir.saved_steps(path) if s <= other), default=None)
        name = str(section["_target_"]).rpartition(".")[2]
        raise ConfigError(
            "other_run",
            f"{key}={value}: the schedule of {path} ({name}, over {before.max_steps:,} updates) "
            f"would have had another rate from update {other:,} on, and the run has done "
            f"{updates:,}; {_fork(path, step, key, value)}",
        )


def _fork(path: Path, step: int | None, key: str, value: Any) -> str:
    """Return the command of a fork that does what the refused extension would have done.

    `step` is that of the last checkpoint up to which both are the same; None where none is kept."""
    at = () if step is None else (("fork.step", step),)
    fork = rundir.command_on(path, "train", ("fork.run", path), *at, (key, value))
    if step is None:
        text = "no checkpoint from before that is kept; train again, or fork the last one, to go"
        return f"{text} on at the rate of the longer schedule: {fork}"
    return f"fork it: {fork}"
