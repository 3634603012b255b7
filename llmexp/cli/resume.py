"""`llmexp resume RUN_DIR [key=value ...]`: go on with a run, or with a sweep, in its folder."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from llmexp import child, rundir
from llmexp.cli import train, worker
from llmexp.compose import app, command_line, environment, hints, origin
from llmexp.compose.command_line import recordable
from llmexp.config import ConfigError, nearest, plain
from llmexp.convert import build
from llmexp.run import cut_anew, solve_layout
from llmexp.sweep import ledger


def resume(arguments: list[str]) -> int:
    """`llmexp resume RUN_DIR [key=value ...]`: goes on with a run, or with a sweep, in its
    folder."""
    parser = argparse.ArgumentParser(
        prog="llmexp resume",
        description="Go on with a run in its folder, from its newest whole checkpoint; or with a "
        "sweep.",
        epilog=command_line.ALLOW_HELP,
    )
    parser.add_argument(
        "run_dir", type=Path, help="for example outputs/default/2030-01-01_12-00-00"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="changes to how the run is executed, for example batch.micro_batch_size=4; what it "
        "computes is fixed",
    )
    args = parser.parse_args(command_line.take_allowed(arguments))
    command_line.check_overrides(args.overrides)
    path = args.run_dir
    rundir.check_plain(path)
    if not rundir.is_run(path) and ledger.is_sweep(path):
        arguments = recordable(ledger.read(path).arguments)
        return train.train(
            ["-m", *arguments, *args.overrides, f"sweep.resume={app.quoted(str(path))}"]
        )
    if not rundir.is_run(path) and ledger.runs_in(path):
        raise ConfigError(f"{path}: has runs but no {ledger.LEDGER}; {ledger.ANEW}{path}")
    tree, recorded = plain(rundir.built_config(path)), rundir.read_run(path)
    micro, accum = "batch.micro_batch_size", "batch.gradient_accumulation_steps"
    given = [o.partition("=")[0] for o in args.overrides]
    tree["train"]["stop_step"] = None  # it has been there
    if {micro, accum} & set(given):  # the real batch stays, and its cut is solved anew
        tree["batch"][(micro if accum in given else accum).removeprefix("batch.")] = None
    if rundir.read_status(path).get("state") == "finished":
        if args.overrides:
            raise ConfigError(
                f"{path}: this run is finished, so {' '.join(args.overrides)} would change "
                f"nothing; for another run: llmexp train ... {' '.join(args.overrides)}"
            )
        child.say(f"{path}: this run is finished; nothing to do")
        return 0
    change(tree, args.overrides, path, recorded.get("parallelism"))
    for line in environment.fill_tracker(tree):
        child.say(line)
    environment.refuse_secrets(tree)
    config = build(tree)
    origin.refuse_given(config, given)
    if not {micro, accum} & set(given):
        ranks = config.parallelism.nproc_per_node
        dp_size = None if ranks is None else solve_layout(config.parallelism, ranks).dp_size
        config = dataclasses.replace(config, batch=cut_anew(config.batch, dp_size))
    config = dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, resume="must")
    )
    request = {"config": plain(config), "folder": str(path), "fixed": True}
    return worker.Worker().run(
        request | {k: recorded.get(k) for k in ("overrides", "label", "group", "swept")}
    )[0]


def change(tree: dict[str, Any], overrides: Sequence[str], path: Path, before: str | None) -> None:
    """Put overrides into the config of the run in `path`, which ran with the parallelism `before`.
    Raises ConfigError."""
    parsed = map(OverridesParser.create().parse_override, overrides)
    kind_first = sorted(
        parsed, key=lambda o: o.key_or_group not in ("parallelism", "parallelism.kind")
    )
    for override in kind_first:  # then its sizes
        key = override.key_or_group
        *parents, name = key.split(".")
        node: Any = tree
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if not isinstance(node, dict) or name not in node:
            raise ConfigError(
                f"{key}: there is no such key in "
                f"{path / rundir.CONFIG}.{nearest(key, hints.flat_keys(tree))}"
            )
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: several values are a sweep; a run is resumed with one"
            )
        if key in (
            "parallelism",
            "parallelism.kind",
        ):  # sizes of the old layout mean nothing in the new one
            tree["parallelism"] |= {
                "kind": override.value(),
                "tensor_parallel_size": None,
                "replicate_size": None,
            }
            if "single" in (override.value(), before):
                tree["parallelism"] |= {"nproc_per_node": None, "nnodes": 1}
            continue
        node[name] = override.value()
