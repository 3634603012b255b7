"""`llmexp verify determinism`: the same run twice; where they part, the step and the likely
operation are named."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from llmexp.settings.config import Config
from llmexp.settings.values import ConfigError
from llmexp.verify import record, runs
from llmexp.verify.checks import Check, equal
from llmexp.verify.pair import Pair

STEPS, LOOK_STEPS = 8, 2
Events = list[list[str]]  # [module, "in" or "out", digest]


def verify(
    config: Config, path: Path, *, steps: int | None = None, shrink: bool = False
) -> list[Check]:
    """Compare two runs in folders under `path`, of the same config. Raises ConfigError."""
    plan = _plan(config, steps or STEPS, shrink)
    first, second = path / "first", path / "second"
    for run in (first, second):
        print(f"the {run.name} run of {plan.train.max_steps} steps", flush=True)
        runs.train_recorded(run, plan, modules=True)
    pair = Pair.of(first, second)
    checks = compare(pair)
    if any(check.passed is False for check in checks):
        note = first_difference(pair)
        look, what = path / "look", "that asks torch for what is not deterministic"
        print(f"a run of {LOOK_STEPS} steps {what}", flush=True)
        try:
            runs.train_recorded(look, _look(config, shrink), warned=True)
            likely = suspects(record.read(look))
        except ConfigError as error:  # such as of an operation that refuses; what was found stands
            likely = str(error)
        checks.append(Check("the first difference", False, note=f"{note}; {likely}"))
    return checks


def _plan(config: Config, steps: int, shrink: bool, **sections: dict[str, Any]) -> Config:
    saves = {"every": None, "save_initial": False}
    return runs.watched(config, steps, shrink, checkpoint=saves, **sections)


def _look(config: Config, shrink: bool) -> Config:
    """Return the config as a short run in which some update is made, also in fp16."""
    scale = {"init_scale": min(config.precision.init_scale, 1024.0)}
    return _plan(config, LOOK_STEPS, shrink, precision=scale)


def compare(pair: Pair) -> list[Check]:
    """Return everything that two recorded runs computed, bit by bit."""
    return [
        pair.figures("the data of each step", "data_digest", "target_tokens"),
        _inside(pair, "inputs and outputs of each module, each rank", "events"),
        _inside(pair, "gradients that the optimizer gets, each rank", "reduced"),
        pair.recorded("parameters after each step, each rank", "parameters"),
        pair.recorded("moments after each step, each rank", "optimizer"),
        pair.recorded("RNG after each step, each rank", "rng"),
        pair.figures("metrics rows, but for times and memory"),
    ]


def _inside(pair: Pair, what: str, part: str) -> Check:
    """Compare what is recorded only where it is looked into the modules."""
    differing, count = pair.differences(part)
    if not count:
        without = "not looked into: the model is compiled; the update is looked at as a whole"
        return Check(what.removesuffix(", each rank"), None, note=without)
    return equal(what, differing, count)


def parting(ours: Events, theirs: Events) -> int | None:
    """Return where two lists first differ; None where they are equal."""
    pairs = itertools.zip_longest(ours, theirs)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), None)


def first_difference(pair: Pair) -> str:
    """In words: the first step in which two runs differ, and what in it differs first, in the order
    in which a step computes: data, forward, loss, backward, reduction, update, RNG."""
    start = next((one for step, _, one, _ in pair.steps() if step == 0 and "modules" in one), {})
    classes, optimizers = start.get("modules", {}), start.get("optimizers", [])
    by_step = [{row["step"]: row for row in rows} for rows in pair.rows]
    found: list[tuple[int, int, int, str]] = []  # (step, stage, rank, text)
    for step, rank, one, other in pair.steps():
        here, there = (rows.get(step, {}) for rows in by_step)
        for stage, text in enumerate(_stages(one, other, here, there, classes, optimizers)):
            if text:
                found.append((step, stage, rank, text))
                break
    if not found:
        step = next((s for s in by_step[0] if by_step[0][s] != by_step[1].get(s)), 0)
        return f"step {step}: only in its row of metrics"
    step, _, rank, text = min(found)
    if step == 0:
        return f"before the first step, rank {rank}: {text}"
    return f"step {step}, rank {rank}: {text}"


def _stages(
    one: dict[str, Any],
    other: dict[str, Any],
    here: dict[str, Any],
    there: dict[str, Any],
    classes: dict[str, str],
    optimizers: list[str],
) -> list[str]:
    """Return what differs in each stage of one rank's step, in words, or nothing."""

    def differing(part: str, text: str) -> str:
        """Return the text with the first entry that differs, or nothing."""
        ours, theirs = one.get(part, {}), other.get(part, {})
        name = next((n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n)), "")
        return text.format(name) if name else ""

    if not one or not other:
        return ["only one of the runs came here"]
    gone = here.get("data_digest") != there.get("data_digest")
    passes = where_forward(one.get("events", []), other.get("events", []), classes)
    if passes:
        passes += differing("rng", "; it drew other random numbers too ({})")
    loss = here.get("train/loss") != there.get("train/loss")
    lists = one.get("gradients", []), other.get("gradients", [])
    left = parting(*lists)
    backward = ""
    if left is not None:
        gradient = max(lists, key=len)[left][0]
        backward = f"the gradient of {gradient}, in the backward pass of {owner(gradient, classes)}"
    update = f"optimizer update ({'; '.join(optimizers)}) of {{}}"
    update = "it starts with another {}" if "modules" in one else update
    return [
        "the data: the window holds other tokens" if gone else "",
        differing("entered", "something between the steps, such as a hook, changed {}"),
        passes,
        "the loss, after the last module" if loss else "",
        backward,
        differing("reduced", "the gradient of {}, reduced over ranks, unscaled and clipped"),
        differing("parameters", update),
        differing("optimizer", update),
        differing("rng", "the RNG of {}: another number of random numbers was drawn"),
    ]


def where_forward(ours: Events, theirs: Events, classes: dict[str, str]) -> str:
    """Return which module is the first to compute something else from equal inputs and parameters;
    empty where none is."""
    at = parting(ours, theirs)
    if at is None:
        return ""
    before = label(ours[at - 1][0], classes) if at else "the start"
    if at >= min(len(ours), len(theirs)) or ours[at][:2] != theirs[at][:2]:
        return f"other modules are called after {before}"
    name, way, _ = ours[at]
    this = label(name, classes)
    if way == "out" and ours[at - 1][:2] == [name, "in"]:
        return (
            f"the output of {this}, from an equal input and parameters equal after the step before"
        )
    inside: list[str] = []  # the modules that are under way
    for called, direction, _ in ours[:at]:
        if direction == "in":
            inside.append(called)
        elif called in inside:
            inside.remove(called)
    if way == "out":
        return f"an operation in {this} itself, after {before}"
    if name == ours[0][0]:  # the first module of a micro-batch
        return f"the data: the input of {this}"
    around = label(inside[-1], classes) if inside else "the model"
    return f"an operation in {around} itself, between {before} and {this}"


def label(name: str, classes: dict[str, str]) -> str:
    """Return a module's name and class: "blocks.1.mlp (MLP)"."""
    return f"{name or 'the model'} ({classes.get(name, 'unknown')})"


def owner(parameter: str, classes: dict[str, str]) -> str:
    return label(parameter.rpartition(".")[0], classes)


def suspects(records: record.Records) -> str:
    """Return the operations that torch itself knows to have no deterministic implementation."""
    rows = [row for by_step in records.values() for row in by_step.values()]
    names = sorted({name for row in rows for name in row.get("warned", [])})
    if not names:
        return "torch knows of no operation in this run without a deterministic implementation"
    return f"without a deterministic implementation, by torch's own account: {', '.join(names)}"
