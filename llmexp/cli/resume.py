"""`llmexp resume RUN_DIR [key=value ...]`: go on with a run, or with a sweep, in its folder."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmexp.cli import train, worker
from llmexp.compose import app, command_line, environment, errors, origin
from llmexp.compose.command_line import recordable
from llmexp.compose.overrides import parsed
from llmexp.run.batch import cut_anew
from llmexp.run.budget import BUDGETS, NO_BUDGET, keep_warmup
from llmexp.run.layout import solve_layout
from llmexp.runs import rundir
from llmexp.settings.config import plain
from llmexp.settings.convert import build, with_knobs
from llmexp.settings.labels import plural
from llmexp.settings.values import ConfigError, nearest, quoted, refuse, remember_variables, typed
from llmexp.sweep import ledger
from llmexp.system import child


def resume(arguments: list[str]) -> int:
    """Go on with a run, or with a sweep, in its folder: `llmexp resume RUN_DIR [key=value ...]`."""
    text = "Go on with a run in its folder, from its newest whole checkpoint; or with a sweep."
    parser = command_line.parser_of("resume", text)
    parser.add_argument(
        "run_dir", type=Path, help="for example outputs/default/2030-01-01_12-00-00"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="changes to how the run is executed, for example batch.micro_batch_size=4; what it "
        "computes is fixed, but for a longer budget: train.max_steps=600",
    )
    args = parser.parse_args(command_line.take_allowed(arguments))
    command_line.check_overrides(args.overrides)
    path = args.run_dir
    rundir.check_plain(path)
    if rundir.is_run(path):
        return resume_run(path, args.overrides)
    if ledger.is_sweep(path):
        arguments = recordable(ledger.read(path).arguments)
        here = f"sweep.resume={quoted(str(path))}"
        return train.train(["-m", *arguments, *args.overrides, here])
    if ledger.runs_in(path):
        raise ConfigError(f"{path}: has runs but no {ledger.LEDGER}; {ledger.anew(path)}")
    return resume_run(path, args.overrides)  # it says what is missing


def resume_run(path: Path, overrides: Sequence[str]) -> int:
    """Go on with a run in its folder; return the exit code. Raises ConfigError."""
    tree, recorded = plain(rundir.built_config(path)), rundir.read_run(path)
    given = [o.partition("=")[0] for o in overrides]
    budget = set(given).intersection(BUDGETS)
    if rundir.read_status(path).get("state") == "finished" and not budget:
        if overrides:
            words = shlex.join(overrides)
            text = f"this run is finished, so {words} would change nothing"
            fork = typed("fork.run", path)
            way = "to train on, give a longer budget (train.max_steps=...), or fork it"
            raise ConfigError(f"{path}: {text}; {way}: llmexp train {fork} {words}")
        child.say(f"{path}: this run is finished; nothing to do")
        return 0
    tree["train"]["stop_step"] = None  # it has been there
    micro, accum = "micro_batch_size", "gradient_accumulation_steps"
    cut = [key for key in (micro, accum) if f"batch.{key}" in given]
    if cut:  # the real batch stays, and its cut is solved anew
        tree["batch"][micro if accum in cut else accum] = None
    note = None
    overrides = choose(tree, overrides)
    if budget:
        note = extend(tree, recorded.get("warmup_updates"), given)
    change(tree, overrides, path, recorded.get("parallelism"))
    if budget and all(tree["train"][name] is None for name in NO_BUDGET):
        raise refuse(min(budget), None, "is no budget to train on to", 600)
    for line in environment.fill_tracker(tree):
        child.say(line)
    environment.refuse_secrets(tree)
    config = build(tree)
    remember_variables(plain(config))
    origin.refuse_given(config, given)
    refuse_past(config.train.profile_start, path, given)
    if not cut:
        ranks = config.parallelism.nproc_per_node
        dp_size = None if ranks is None else solve_layout(config.parallelism, ranks).dp_size
        config = dataclasses.replace(config, batch=cut_anew(config.batch, dp_size))
    config = with_knobs(config, checkpoint={"resume": "must"})
    request = {"config": plain(config), "folder": str(path), "fixed": True}
    request |= {key: recorded.get(key) for key in ("overrides", "label", "group", "swept")}
    request["note"] = note
    return worker.Worker().run(request)[0]


def choose(tree: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Put the options of groups, such as schedule=constant, into the config of a run, as train and
    a fork do; return the other overrides. Raises ConfigError."""
    sections = {key for key, node in tree.items() if isinstance(node, dict)} - {"parallelism"}
    refuse_several(overrides)
    chosen = zip(overrides, parsed(overrides), strict=True)
    groups = [o for o, p in chosen if p.key_or_group in sections and isinstance(p.value(), str)]
    tree |= app.chosen_options(groups)
    return [o for o in overrides if o not in groups]


def refuse_several(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override with several values."""
    for override in parsed(overrides):
        if override.is_sweep_override():
            text = "several values are a sweep; a run is resumed with one"
            raise ConfigError(f"{override.input_line}: {text}")


def extend(tree: dict[str, Any], warmup: Any, given: Sequence[str]) -> str | None:
    """Make room for another budget in the config of a run, and keep the length of its warm-up,
    which was a share of the old one: return a line that says so."""
    tree["train"] |= NO_BUDGET
    if "schedule.warmup_steps" in given or not keep_warmup(tree["schedule"], warmup):
        return None
    return f"the warm-up stays {plural(warmup, 'update')}: schedule.warmup_steps={warmup}"


def refuse_past(first: int | None, path: Path, given: Sequence[str]) -> None:
    """Raise ConfigError for a trace of steps that the run has behind it."""
    step = rundir.saved_step(path)
    key = "train.profile_start"
    if key in given and first is not None and step is not None and first <= step:
        text = f"is not after the checkpoint that the run goes on from, which is of step {step}"
        raise refuse(key, first, text, step + 1)


def change(tree: dict[str, Any], overrides: Sequence[str], path: Path, before: str | None) -> None:
    """Put overrides into the config of the run in `path`, which ran with the parallelism `before`.
    Raises ConfigError."""
    kinds = ("parallelism", "parallelism.kind")
    # the kind first, then its sizes
    for override in sorted(parsed(overrides), key=lambda o: o.key_or_group not in kinds):
        key = override.key_or_group
        *parents, name = key.split(".")
        node: Any = tree
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if key == "experiment":
            text = "an experiment is chosen where a run starts; give the keys that it sets"
            raise ConfigError(f"{override.input_line}: {text}, for example train.max_steps=600")
        if not isinstance(node, dict) or name not in node:
            near = nearest(key, errors.flat_keys(tree))
            raise ConfigError(f"{key}: there is no such key in {path / rundir.CONFIG}.{near}")
        if key not in kinds:
            node[name] = override.value()
            continue
        # sizes of the old layout mean nothing in the new one
        sizes = dict.fromkeys(("tensor_parallel_size", "replicate_size"))
        tree["parallelism"] |= {"kind": override.value(), **sizes}
        if "single" in (override.value(), before):
            tree["parallelism"] |= {"nproc_per_node": None, "nnodes": 1}
