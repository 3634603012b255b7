"""Prepare the loop before the first step: console, checkpoint and rows."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from llmexp import mesh
from llmexp.checkpoint import loading, saving
from llmexp.checkpoint.folders import checkpoint_folders
from llmexp.checkpoint.slices import piece_of
from llmexp.config.knobs import differing
from llmexp.config.sections import plain
from llmexp.config.values import ConfigError, refuse
from llmexp.folders import rundir
from llmexp.folders.rows import Rows
from llmexp.metrics.meter import Meter
from llmexp.run import Parent
from llmexp.run.banner import banner_sections
from llmexp.system import hardware
from llmexp.system.console import Console, banner
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import look_back
from llmexp.train.folder import fixed_facts, fixed_part
from llmexp.train.set_up import set_up
from llmexp.train.state import Loop, Progress
from llmexp.train.step import Setup


def log_line(text: str) -> None:
    """Print into this rank's own log."""
    print(text, file=sys.stderr)


def open_console(path: Path, parts: Parts, joined: mesh.Mesh) -> Console:
    """Return the console of a rank, after the banner; only rank 0 shows anything."""
    main_rank = joined.rank == 0
    stream = sys.stdout if main_rank else open(os.devnull, "w")  # noqa: SIM115
    log = path / rundir.LOG if main_rank else None
    console = Console(log, parts.run.max_steps, stream)
    begun = (
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}, rank {joined.rank} of {joined.world_size} on "
        f"{joined.device}"
    )
    console.line(banner([*banner_sections(parts.run, str(path)), ("start", begun)]))
    if not main_rank:
        log_line(f"start {begun}")
    return console


def parents_checkpoint(
    parent: Parent, joined: mesh.Mesh, warn: Callable[[str], None]
) -> loading.Loaded:
    """Return the checkpoint that a fork begins with, the same on all ranks.

    Raises ConfigError where it is gone, or another one by now."""
    root = Path(parent.folder) / rundir.CHECKPOINTS
    loaded = loading.newest_whole(root, warn, joined, step=parent.step)
    if loaded is None or parent.digest != loaded.digest:
        what = "is gone" if loaded is None else "is another one than when this fork was made"
        text = f"the checkpoint of step {parent.step} {what}"
        raise refuse(
            "no_checkpoint", "fork.run", parent.folder, f"{text}; put it back, or make another fork"
        )
    return loaded


def newest_checkpoint(
    path: Path, joined: mesh.Mesh, warn: Callable[[str], None], begin: tuple[str, int] | None
) -> loading.Loaded | None:
    """Return the newest whole checkpoint of the run, or that of `begin`; None where there is none.

    It is the same on all ranks. What killed saves have left is removed first. Raises ConfigError
    where ranks see different folders."""
    if begin is not None:
        return loading.newest_whole(Path(begin[0]), warn, joined, step=begin[1])
    root = path / rundir.CHECKPOINTS
    if joined.rank == 0:
        saving.remove_leftovers(root)
    listed = " ".join(p.name for p in checkpoint_folders(root))
    # The ranks meet here, so that rank 0 has cleaned up before any of them saves.
    if differing := mesh.differing_ranks(joined, listed):
        raise ConfigError(
            "wrong_ranks",
            f"{root}: rank 0 sees other checkpoints there than {mesh.numbered(differing)}; all "
            "hosts need one shared run folder",
        )
    return loading.newest_whole(root, warn, joined)


def restore(
    parts: Parts, setup: Setup, loaded: loading.Loaded, forked: bool
) -> tuple[Progress, Meter]:
    """Restore a checkpoint, whatever the layout that saved it.

    That is parameters, optimizer state, counters, and what features keep; the RNG and the data
    position follow from the step number. A run that is `forked` keeps its own
    settings of the optimizer, and what its model computes from settings of its own; it may drop the
    optimizer state, counts its best loss anew, and takes its perturbation as a twin. Raises
    CheckpointError."""
    config = parts.config
    try:
        changed = differing(loaded.manifest["config"], fixed_part(plain(config))) if forked else []
        of_model = any(key.startswith("model.") for key in changed)
        loading.restore_model(loaded, setup.model, computed=not of_model)
        if not forked or not config.fork.reset_optimizer:
            loading.restore_optimizers(loaded, setup.model, setup.optimizers, values=not forked)
        if forked and config.train.twin:
            from llmexp.optim.twin import perturb

            # also the weights to train with, which may be among the states
            perturb(setup.model, config.train.seed, config.train.twin, piece_of)
        setup.scaler.load_state_dict(loaded.state["scaler"])
        progress = Progress(**loaded.state["progress"])
        for feature in setup.features:
            if feature.name in loaded.state:
                anew = forked and feature.begins_anew(changed)
                feature.load_state_dict(loaded.state[feature.name], anew)
            if tensors := feature.tensors():
                if pieces := loaded.tensors.get(feature.name):
                    loading.fill_all(loaded, tensors, pieces)
                else:
                    feature.begin_tensors()
        timed = {} if forked else loaded.manifest.get("since_row", {})
        meter = Meter(setup.mesh.device, loaded.state["meter"]["tokens_seen"], **timed)
        if forked:  # what it counts is its own
            progress.best_val_loss, progress.loss = math.inf, None
        if progress.step != loaded.step:
            raise ValueError(f"its progress is of step {str(progress.step)[:60]}")
    except ConfigError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        file = loaded.path / loading.STATE
        raise loading.CheckpointError(
            "damaged_file", f"{file} is not the state of this run: {error!r}"
        ) from error
    return progress, meter


def start_loop(
    path: Path,
    parts: Parts,
    joined: mesh.Mesh,
    accepted: Callable[[], None] | None,
    begin: tuple[str, int] | None,
) -> Loop:
    """Return the loop at the step from which the run goes on.

    `begin`: a folder of checkpoints and the step of one of them, in place of the newest of its own.
    `accepted()` is called as soon as checkpoint and rows were read without a refusal. Before it
    only train.log is written, and what killed saves have left is removed. Raises ConfigError and
    CheckpointError.
    """
    console, main = open_console(path, parts, joined), joined.rank == 0
    warn = console.line if main else log_line
    loaded = resumed = newest_checkpoint(path, joined, warn, begin)
    if resumed is None and parts.run.parent is not None:
        loaded = parents_checkpoint(parts.run.parent, joined, warn)
    forked = loaded is not resumed
    setup = set_up(parts, joined, fresh=loaded is None)
    progress, meter = Progress(), Meter(joined.device, 0)
    if loaded:
        progress, meter = restore(parts, setup, loaded, forked)
        source = loaded.path if forked else loaded.path.name
        console.line(
            f"{'forked' if forked else 'resumed'} from {source}: step {progress.step:,} of "
            f"{parts.run.max_steps:,}"
        )
    rows, removals = None, list[Callable[[], None]]()
    if main:
        rows = Rows(path / rundir.METRICS, progress.step, parts.run.first_step, steps=True)
        removals = look_back(path, progress.step)
    if accepted is not None:
        accepted()
    if rows is not None:
        rows.open()
    for remove in removals:
        remove()
    loop = Loop(
        parts=parts,
        setup=setup,
        path=path,
        main=main,
        console=console,
        rows=rows,
        progress=progress,
        meter=meter,
        fixed=fixed_facts(parts),
        peak_flops=hardware.peak_flops(joined.device, parts.precision),
        saved=resumed.kept if resumed else [],
    )
    for feature in setup.features:
        feature.begin(loop)
        off = resumed and feature.name not in resumed.state.keys() | resumed.tensors.keys()
        if off and (feature.state_dict() or feature.tensors()):
            console.line(f"{feature.name} starts over: it was off when the checkpoint was saved")
    return loop
