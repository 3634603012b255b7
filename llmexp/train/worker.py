"""Turn a request or a run folder into a trained run, a status and an exit code, in one process."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmexp import features, mesh
from llmexp.config.convert import build
from llmexp.config.sections import Config
from llmexp.config.values import AUTO, ConfigError, Plain, error_record
from llmexp.folders import ending, rundir
from llmexp.system import fileio, workers
from llmexp.system.child import DONE, FAILED, PREEMPTED, REFUSED, STOP, say
from llmexp.train import failing, folder, group
from llmexp.train.assembly.assemble import Parts, admitted, assemble
from llmexp.train.beginning import start_loop
from llmexp.train.checkpointing import finish_alone
from llmexp.train.finishing import NotFinite
from llmexp.train.loop import show_rows, train
from llmexp.train.state import Loop
from llmexp.train.step import TrainingFailed
from llmexp.train.summary import say_the_end, summarise, told


def main(argument: str) -> int:
    """Run one worker; return its exit code.

    `argument` is a run folder, or - for a request on standard input."""
    STOP.importing = False
    path = None if argument == "-" else Path(argument)
    request: Plain = {}
    try:
        if path is not None:
            return go_on(path)
        text = sys.stdin.read()
        if not text:  # the parent has gone
            return REFUSED
        request = json.loads(text)
        config, known = build(request["config"]), folder.known_of(request)
        prepare_forks(config)
        for start in features.offered("folders", "start"):  # of threads, which no fork has
            start()
        there = Path(request["folder"]) if request["fixed"] else None
        parts = admitted(parts_of(config, there, waits=bool(request.get("queue")), **known))
        path, fresh = folder.open_folder(parts, request)
        if not fresh:
            if folder.is_finished(path, parts.run.max_steps):
                return DONE
            if request.get("note"):
                say(request["note"])
        code = begin_run(path, parts, request, record_late=not fresh)
        if code == REFUSED and fresh:  # by what is found as first weights are read
            folder.forget_run(path)
        return code
    # a function of the user's, such as that of the data, may raise anything
    except BaseException as error:
        failure = failing.failure_of(error)
        refused = failure.exit_code == REFUSED
        if refused and folder.answer_command(request, error=error_record(error)):
            return REFUSED
        return failing.record_unbegun(path, failure)


def prepare_forks(config: Config) -> None:
    """Have ranks, and trials of sizes, be forks of this process as it is now."""
    ranks = config.parallelism.kind != "single" and "WORLD_SIZE" not in os.environ
    if ranks or config.batch.micro_batch_size == AUTO:
        workers.keep_template(ranks)


def go_on(path: Path) -> int:
    """Train the run that the folder describes; return the exit code."""
    if os.environ.get("RANK", "0") == "0":  # once is enough
        rundir.check_plain(path)
    if folder.is_finished(path):
        return DONE
    parent, config = folder.recorded_parent(path), rundir.built_config(path)
    prepare_forks(config)
    hosts = config.parallelism.nnodes > 1
    parts = parts_of(config, path, waits=hosts, tried=True, parent=parent)
    folder.refuse_other_run(path, parts)
    recorded = rundir.read_run(path)
    request = {key: recorded.get(key) for key in rundir.RECORDED}
    return begin_run(path, parts, request, record_late=rundir.newest_step(path) is not None)


def parts_of(config: Config, path: Path | None, *, waits: bool, **known: Any) -> Parts:
    """Assemble a run. A size that is `auto` is found first, unless it `waits` for the ranks.

    `path`: its folder, where that is given; `known`: what `assemble` takes."""
    if config.batch.micro_batch_size != AUTO:
        return assemble(config, **known)
    from llmexp.modes import micro_batch

    find = None if waits else micro_batch.found_alone
    return micro_batch.run(config, functools.partial(assemble, **known), path, find)


def begin_run(path: Path, parts: Parts, request: Plain, *, record_late: bool) -> int:
    """Queue or train the run in the folder; return the exit code. Raises ConfigError."""
    if not os.access(path, os.W_OK | os.X_OK):
        copy = f"cp -r --no-preserve=mode {shlex.quote(str(path))} /tmp/run"
        again = rundir.command_on(path, "resume", "/tmp/run")
        text = "this folder cannot be written; copy it to one that can, and continue there"
        raise ConfigError("disk", f"{path}: {text}: {copy} && {again}")
    if request.get("queue"):
        with rundir.locked(path):
            folder.record_run(path, parts, request, "queued")
        return DONE
    if parts.run.world_size > 1 and "WORLD_SIZE" not in os.environ:
        from llmexp.modes import ranks

        return ranks.run(path, parts, request, record_late)
    return work(path, parts, request, record_late)


def work(path: Path, parts: Parts, request: Plain, record_late: bool = False) -> int:
    """Train (this rank's part of) the run in the folder; return the exit code.

    With `record_late` nothing but train.log is written before the newest checkpoint and the rows
    were accepted. A refusal leaves the rest as it was. Where no command waits for an answer, under
    Slurm and torchrun, it is written to status.json too.
    """
    joined: mesh.Mesh | None = None
    holds_lock = False  # until then another process may be at work in the folder
    record, accepted = functools.partial(folder.record_run, path, parts, request), None
    with contextlib.ExitStack() as locks:  # held until the end is recorded
        try:
            joined = group.join_ranks(path, parts)
            took_first = locks.enter_context(group.held(path, joined))
            holds_lock = True
            if joined.rank == 0:
                if not took_first:  # again, after a restart
                    rundir.write_status(path, "running", **rundir.NO_END)
                elif record_late:
                    accepted = record
                else:
                    record()
            code = run_training(path, parts, joined, accepted)
            locks.close()
            gc.collect()  # model and optimizer go before the group, or gloo may abort at exit
            mesh.leave(joined)
            # torchrun would take any other code for a failure, and start the ranks again
            return DONE if code == PREEMPTED and "TORCHELASTIC_RUN_ID" in os.environ else code
        except BaseException as error:
            failure = failing.failure_of(error, path, parts, joined)
            untouched = record_late and failure.exit_code == REFUSED and "folder" in request
            return failing.record_failure(path, failure, ours=holds_lock and not untouched)


def run_training(
    path: Path, parts: Parts, joined: mesh.Mesh, accepted: Callable[[], None] | None = None
) -> int:
    """Train to the end or to a signal; return the exit code. Raises what training raises.

    `accepted`: see `start_loop`."""
    file = path / rundir.ASKED
    asked: Plain = fileio.read_json(file) if file.exists() else {}
    loop = start_loop(path, parts, joined, accepted, asked.get("begin"))
    gc.collect()
    gc.freeze()  # what lives now lives to the end; collections need not walk it again
    STOP.training = True
    state = "failed"
    try:
        state = _carry_out_mode(loop, asked) if asked else train(loop)
    except NotFinite as bad:
        from llmexp.modes import diagnosis

        raise TrainingFailed(diagnosis.run(loop, bad), "not_finite") from None
    finally:  # STOP.training stays: a signal from here on must not undo what was reached
        code = {"finished": DONE, "preempted": PREEMPTED}.get(state, FAILED)
        summary = finish_run(loop, state, code)
    last_words = told(loop, "last_words") if state == "finished" else []
    if loop.main:
        say_the_end(loop, state, summary, last_words)
    loop.console.close()
    return code


def _carry_out_mode(loop: Loop, asked: Plain) -> str:
    """Do what is `asked` for in the place of training; return how that ended."""
    from llmexp.modes import calibration, replay

    mode = {"calibration": calibration.run, "replay": replay.run}[asked["mode"]]
    if (found := mode(loop, asked)) is None:
        return "preempted"
    if loop.main:
        fileio.write_json(loop.path / rundir.FOUND, found)
    return "finished"


def finish_run(loop: Loop, state: str, code: int) -> Plain:
    """Save, record and upload what a run came to; return its figures.

    Also where it fails, with a device that is lost or a disk that is full."""
    if loop.saving is not None:
        finish_alone(loop, loop.saving)
    summary = summarise(loop)
    try:
        close_rows(loop, state)
        if loop.main and state != "failed":
            more = loop.features.by_name("status")
            ending.record_end(loop.path, state, code, None, summary=summary, **more)
    except BaseException:
        state, code = "failed", FAILED
        raise
    finally:
        for feature in loop.features.acting("closed"):
            try:
                feature.closed(summary, code)
            except Exception as error:  # the others are told, and how the run ended stays
                text = f"WARNING: the end of {type(feature).__name__} failed: {error!r}"
                loop.console.line(text)
        if state == "failed":
            loop.console.close()
    return summary


def close_rows(loop: Loop, state: str) -> None:
    """Write and close metrics.jsonl, and what features have open, whichever of them fails.

    Raises Unwritable where last rows may be lost; where the run has `failed`, that is a line, and
    the user gets the error that ended it."""
    try:
        with contextlib.ExitStack() as closing:
            for close in loop.features.on("close"):
                closing.callback(close)
            show_rows(loop)
            if loop.rows is not None:
                loop.rows.close()
    except OSError as error:
        if state != "failed":
            raise
        loop.console.line(f"WARNING: the rows may not all be on the disk: {error}")
