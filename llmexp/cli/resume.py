"""`llmexp resume RUN_DIR [key=value ...]`: go on with a run, or with a sweep, in its folder."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from llmexp import features
from llmexp.cli import worker
from llmexp.cli.running import run_command
from llmexp.compose import app, command_line, security
from llmexp.compose.command_line import recordable
from llmexp.compose.overrides import key_of
from llmexp.config.labels import plural
from llmexp.config.sections import Config, plain
from llmexp.config.values import ConfigError, quoted, refuse
from llmexp.folders import ledger, rundir
from llmexp.folders.naming import named_checkpoint
from llmexp.run.budget import BUDGETS, NO_BUDGET
from llmexp.system import child


def resume(
    run: Annotated[Path, "RUN", "for example outputs/default/2030-01-01_12-00-00"],
    overrides: Annotated[
        Sequence[str],
        "KEY=VALUE",
        "changes to how the run is executed, for example batch.micro_batch_size=4; what it "
        "computes is fixed, but for a longer budget: train.max_steps=600",
    ] = (),
) -> int:
    """Go on with a run in its folder, from its newest whole checkpoint; or with a sweep."""
    command_line.check_overrides(overrides)
    path = run
    rundir.check_plain(path)
    if rundir.is_run(path):
        return resume_run(path, overrides)
    if ledger.is_sweep(path):
        arguments = recordable(ledger.read_ledger(path).arguments)
        here = f"sweep.resume={quoted(str(path))}"
        arguments = [argument for argument in arguments if argument != "-m"]
        return run_command("train", ["-m", *arguments, *overrides, here])
    if ledger.runs_in(path):
        raise ConfigError(
            "damaged_file", f"{path}: has runs but no {ledger.LEDGER}; {ledger.anew(path)}"
        )
    _, step = named_checkpoint(str(path))  # it says what is missing
    way = f"resume uses the newest checkpoint; to start from step {step}, fork"
    raise ConfigError("unsupported", f"{path}: {way}: {forking(path, overrides)}")


def forking(path: Path, overrides: Sequence[str]) -> str:
    """Return the command that forks RUN[@STEP] with these overrides.

    A fork of the last step has a longer budget: that of its parent counts the parent's steps."""
    words: list[object] = [o for o in overrides if not key_of(o).startswith("fork.")]
    run, step = named_checkpoint(str(path))
    steps = rundir.read_run(run).get("max_steps") or 0
    at_end = steps and steps == (step or rundir.newest_step(run))
    if at_end and not {key_of(o) for o in overrides}.intersection(BUDGETS):
        words.append(("train.max_steps", 2 * steps))
    return rundir.command_on(run, "train", ("fork.run", path), *words)


def resume_run(path: Path, overrides: Sequence[str]) -> int:
    """Go on with a run in its folder; return the exit code. Raises ConfigError."""
    before, recorded = rundir.built_config(path), rundir.read_run(path)
    given = [key_of(override) for override in overrides]
    budget = set(given).intersection(BUDGETS)
    if rundir.read_status(path).get("state") == "finished" and not budget:
        return _leave(path, overrides)
    if own := next((key for key in given if key.startswith(("hydra.", "hydra/", "fork."))), None):
        raise ConfigError("unsupported", f"{own}: a resumed run keeps its folder; leave this out")
    with contextlib.closing(worker.Worker()) as waiting:
        config = app.composed_over(path, overrides, note=child.say)
        if budget and all(getattr(config.train, name) is None for name in NO_BUDGET):
            raise refuse("missing_value", min(budget), None, "is not a budget to train on to", 600)
        security.refuse_secrets(list(overrides), "the command line")
        for check in features.offered("cli", "check_resume", config):
            check(config, path, given)
        config = replace(config, checkpoint=replace(config.checkpoint, resume="must"))
        request = {"config": plain(config), "folder": str(path), "fixed": True}
        request |= {key: recorded.get(key) for key in rundir.RECORDED}
        if budget and "schedule.warmup_steps" not in given:
            request["note"] = note_of(before, config)
        return waiting.run(request)[0]


def _leave(path: Path, overrides: Sequence[str]) -> int:
    """Say that a finished run has nothing to do. Raises ConfigError for `overrides`."""
    if overrides:
        app.composed_over(path, overrides)  # which refuses what a run cannot take
        text = f"this run is finished, so {shlex.join(overrides)} would change nothing"
        way = "to train on, give a longer budget (train.max_steps=...), or fork it"
        raise ConfigError("finished_run", f"{path}: {text}; {way}: {forking(path, overrides)}")
    child.say(f"{path}: this run is finished; nothing to do")
    return 0


def note_of(before: Config, now: Config) -> str | None:
    """Return a line about a warm-up that was a share of another budget and keeps its length."""
    steps = now.schedule.get("warmup_steps")
    if steps is None or steps == before.schedule.get("warmup_steps"):
        return None
    return f"the warm-up stays {plural(steps, 'update')}: schedule.warmup_steps={steps}"
