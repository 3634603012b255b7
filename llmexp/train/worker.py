"""One worker process: from a request or a run folder to a trained run, a status and an exit
code."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml

from llmexp import ending, fileio, mesh, provenance, rundir
from llmexp.assembly.assemble import Parts, assemble
from llmexp.assembly.targets import own_line
from llmexp.checkpoint import loading, saving
from llmexp.child import DONE, FAILED, PREEMPTED, REFUSED, STOP
from llmexp.config import ConfigError, flatten, plain
from llmexp.convert import build
from llmexp.data.tokenizers import token_byte_lengths
from llmexp.knobs import default_of, may_change
from llmexp.mesh.agent import LOCK_HELD, STARTED
from llmexp.metrics import hardware
from llmexp.metrics.console import Console, banner
from llmexp.metrics.meter import Meter
from llmexp.redact import concealed, marks, redacted
from llmexp.run import banner_sections
from llmexp.tracker.mirror import NoTracker, open_tracker
from llmexp.train import group
from llmexp.train.checkpointing import leave_saving
from llmexp.train.loop import measuring, resume, sample_text, train
from llmexp.train.state import Loop, Outputs, Progress
from llmexp.train.step import TrainingFailed, set_up
from llmexp.train.summary import details, say_the_end, summarise

REWRITTEN = (rundir.CONFIG, rundir.RUN, rundir.STATUS)  # when a run is gone on with
RECORDED = ("overrides", "label", "group", "swept")  # of a request, in run.json


def main(argument: str) -> int:
    """Run one worker; return its exit code. `argument` is a run folder, or - for a request on
    standard input."""
    STOP.importing = False
    path: Path | None = None
    before: dict[str, bytes] = {}
    origins: list[Path] | None = None
    try:
        if argument == "-":
            provenance.begin()
            text = sys.stdin.read()
            if not text:  # the parent has gone
                return REFUSED
            request = json.loads(text)
            parts = assemble(build(request["config"]), write=True)
            path, fresh = open_folder(parts, request)
            if not fresh and is_finished(path):
                return DONE
            if not fresh:
                before = {
                    name: (path / name).read_bytes()
                    for name in REWRITTEN
                    if (path / name).is_file()
                }
                origins = provenance.folders(path)
        else:
            path = Path(argument)
            if os.environ.get("RANK", "0") == "0":  # once is enough
                rundir.check_plain(path)
            if is_finished(path):
                return DONE
            parts = assemble(rundir.built_config(path), write=True, tried=True)
            refuse_other_run(path, parts)
            recorded = rundir.read_run(path)
            request = {key: recorded.get(key) for key in RECORDED}
        if request.get("queue"):
            with rundir.locked(path):
                record(path, parts, request, "queued")
            return DONE
        many = parts.run.world_size > 1 and "WORLD_SIZE" not in os.environ
        code = (supervised if many else work)(path, parts, request)
        if code == REFUSED:
            put_back(path, before, origins)
        return code
    except ConfigError as error:
        return never_began(path if argument != "-" else None, REFUSED, str(error))
    # a signal before training; the caller leaves without the slow finalisation
    except SystemExit as stopped:
        return cast(int, stopped.code)
    except OSError as error:
        return never_began(path, FAILED, str(error))
    except Exception as error:  # of a function of the user's, such as that of the data
        return never_began(path, FAILED, f"{type(error).__name__}: {error}", traceback.format_exc())


def never_began(path: Path | None, code: int, text: str, trace: str = "") -> int:
    """Say why the run at `path` was not begun, and record it there if nobody is at work in it.
    Returns `code`."""
    if path is not None and STARTED in os.environ:
        return failed(path, code, text, trace)
    if path is not None and (code == FAILED or rundir.is_run(path)):
        # another process may be at work there
        with contextlib.suppress(ConfigError), contextlib.ExitStack() as locks:
            with contextlib.suppress(OSError):  # the disk may be what failed
                locks.enter_context(rundir.locked(path))
                locks.enter_context(rundir.locked(path, ".lock-ranks"))
            fail(path, code, text, trace)
            return code
    print(f"{redacted(trace)}llmexp: {redacted(text)}", file=sys.stderr)
    return code


def put_back(path: Path, before: dict[str, bytes], origins: list[Path] | None) -> None:
    """After a refusal to go on with a run: its folder is what it was."""
    # the disk may be full
    with contextlib.suppress(ConfigError, OSError, ValueError), rundir.locked(path):
        now = rundir.read_status(path)
        if (now.get("state"), now.get("exit_code")) == ("failed", REFUSED):
            for name, content in before.items():
                fileio.write_whole(path / name, content.decode())
            for place in set(provenance.folders(path)) - set(
                provenance.folders(path) if origins is None else origins
            ):
                shutil.rmtree(place, ignore_errors=True)


def is_finished(path: Path) -> bool:
    """Return whether the folder's run is finished, which is said."""
    if rundir.read_status(path).get("state") != "finished":
        return False
    print(f"{path}: this run is finished; nothing to do")
    return True


def open_folder(parts: Parts, request: dict[str, Any]) -> tuple[Path, bool]:
    """Return the run's folder, made now, or found with a run to go on with: (path, is new). Raises
    ConfigError."""
    wanted, mode = Path(request["folder"]), parts.config.checkpoint.resume
    there = request["fixed"] and rundir.is_run(wanted)
    if there:
        rundir.check_plain(wanted)
    if there and mode == "never":
        state = rundir.read_status(wanted).get("state", "unknown")
        raise ConfigError(
            f"hydra.run.dir={wanted}: holds a run already (state: {state}); to go on with it: "
            f"llmexp resume {wanted}"
        )
    if not there and mode == "must":
        raise ConfigError(
            f"hydra.run.dir={wanted}: checkpoint.resume=must, but there is no run to resume"
        )
    if there:
        refuse_other_run(wanted, parts)
        path = wanted
    else:
        path = rundir.claim(wanted, request["fixed"])
    if "report_fd" in request:
        with os.fdopen(
            request["report_fd"], "w", encoding="utf-8", errors="surrogateescape"
        ) as report:
            report.write(str(path))
    return path, not there


def refuse_other_run(path: Path, parts: Parts) -> None:
    """Raise ConfigError when the folder's run differs from `parts` in anything that changes
    results."""
    refuse_other_config(path, fixed_part(rundir.read_config(path)), fixed_part(plain(parts.config)))
    there = rundir.read_run(path)
    if not there:
        print(f"llmexp: {path / rundir.RUN}: is not there and is written anew", file=sys.stderr)
    known, now = there.get("environment"), environment(parts)
    if isinstance(known, dict) and (
        changed := sorted(n for n in known | now if known.get(n) != now.get(n))
    ):
        raise ConfigError(
            f"{path}: is another run; the environment has another value of {', '.join(changed)} now"
        )
    recorded = there.get("data_fingerprint")
    if recorded is not None and recorded != json.loads(
        json.dumps(concealed(parts.corpus.fingerprint))
    ):
        raise other_data(path, parts)


def other_data(path: Path, parts: Parts) -> ConfigError:
    return ConfigError(f"{path}: the data changed since the run started ({parts.run.facts.data})")


def fixed_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return what of a plain config changes results, with dotted keys."""
    return {key: value for key, value in flatten(config).items() if not may_change(key)}


def refuse_other_config(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise ConfigError with the keys in which the fixed parts of two configs differ. A key that
    one of them does not have yet has its default there."""
    keys = [
        k
        for k in sorted(old.keys() | new.keys())
        if old.get(k, default_of(k)) != new.get(k, default_of(k))
    ]
    differing = ", ".join(f"{key} ({old.get(key)} there, {new.get(key)} here)" for key in keys)
    if differing:
        raise ConfigError(
            f"{path}: is another run; differing keys, which change results and so are fixed: "
            f"{differing}"
        )


def environment(parts: Parts) -> dict[str, str]:
    return marks(plain(parts.config), may_change)


def record(path: Path, parts: Parts, request: dict[str, Any], state: str = "running") -> None:
    """config.yaml with every derived value written back, run.json, provenance/, and the status."""
    fileio.write_whole(path / rundir.CONFIG, yaml.safe_dump(plain(parts.config), sort_keys=False))
    run = parts.run.as_dict() | {
        **{key: request.get(key) for key in RECORDED},
        "environment": environment(parts),
        "data_fingerprint": parts.corpus.fingerprint,
        "data_files": parts.corpus.states(),
    }
    fileio.write_json(path / rundir.RUN, concealed(run))
    provenance.write(path, hardware.drivers(), resumed=(path / rundir.METRICS).exists())
    fresh = dict.fromkeys(("error", "exit_code", "ended", "final"))
    rundir.write_status(
        path, state, started=time.time(), pid=os.getpid(), host=socket.gethostname(), **fresh
    )


def supervised(path: Path, parts: Parts, request: dict[str, Any]) -> int:
    """Return the run on this host's ranks, from the agent's side; returns the exit code."""
    with contextlib.ExitStack() as stack:
        if parts.run.facts.layout.nnodes == 1:  # else rank 0 does both, wherever it is
            stack.enter_context(rundir.locked(path))
            os.environ[LOCK_HELD] = "1"
            record(path, parts, request)
        try:
            code, text = group.supervise(path, parts)
        except SystemExit as stopped:
            if LOCK_HELD in os.environ:  # else the run may be another start's
                error = "stopped before the first step"
                rundir.write_status(
                    path, "preempted", exit_code=stopped.code, error=error, ended=time.time()
                )
            raise
        if code == REFUSED:
            print(f"llmexp: {text}", file=sys.stderr)
            if LOCK_HELD in os.environ:
                rundir.write_status(path, "failed", error=text, exit_code=code, ended=time.time())
        elif text:
            fail(path, code, f"{text}; the logs of all ranks are in {path / 'logs'}")
        return code


def fail(path: Path, code: int, text: str, trace: str = "") -> None:
    """Say and record that the run failed."""
    text, trace = redacted(text), redacted(trace)
    message = text if code == REFUSED else f"training failed: {text}; {ending.what_is_left(path)}"
    print(f"{trace}llmexp: {message}", file=sys.stderr)
    with (
        contextlib.suppress(OSError, ConfigError),
        open(path / rundir.LOG, "a", encoding="utf-8") as log,
    ):
        log.write(f"{trace}{message}\n")
    with contextlib.suppress(OSError):  # the disk may be what failed
        # Of several ranks the first one names the cause.
        if "RANK" not in os.environ or rundir.read_status(path).get("state") != "failed":
            rundir.write_status(path, "failed", error=text, exit_code=code, ended=time.time())


def work(path: Path, parts: Parts, request: dict[str, Any]) -> int:
    """Train (this rank's part of) the run in the folder; return the exit code."""
    if group.given_up(path):
        return FAILED
    joined: mesh.Mesh | None = None
    ours = False  # until the folder's lock is, another process may be at work in it
    with contextlib.ExitStack() as locks:  # held until the last word is written
        try:
            joined = group.join(path, parts)
            alone = locks.enter_context(group.held(path, joined))
            ours = True
            if joined.rank == 0:
                if alone:
                    record(path, parts, request)
                else:  # again, after a restart
                    rundir.write_status(
                        path, "running", error=None, exit_code=None, final=None, ended=None
                    )
            code = run_training(path, parts, joined)
            locks.close()
            gc.collect()  # model and optimizer go before the group, or gloo may abort at exit
            mesh.leave(joined)
            # Of ranks that stop as they were told the agent must not think that they failed.
            return DONE if code == PREEMPTED and STARTED in os.environ else code
        except SystemExit as stopped:
            if ours:
                rundir.write_status(
                    path, "preempted", exit_code=stopped.code, error="stopped before the first step"
                )
            raise
        except (ConfigError, loading.CheckpointError) as error:
            # a function of the user's may fail in any step
            code = FAILED if STOP.training else REFUSED
            return failed(path, code, str(error)) if ours else refused(path, str(error))
        except (TrainingFailed, OSError) as error:
            return failed(path, FAILED, str(error))
        except BaseException as error:
            return failed(path, FAILED, *in_words(error, path, parts, joined), final=False)


def in_words(
    error: BaseException, path: Path, parts: Parts, joined: mesh.Mesh | None
) -> tuple[str, str]:
    """Return (what an exception means for the user, its trace where that says more)."""
    text, run = f"{type(error).__name__}: {error}", parts.run
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in text:
        text = (
            f"out of memory with micro_batch_size {run.micro_batch_size} x {run.sequence_length} "
            "tokens; a smaller batch.micro_batch_size with more batch.gradient_accumulation_steps "
            f"computes the same ({text})"
        )
    elif unused := re.search(
        r"finished reduction in the prior iteration[\s\S]*indices[^:]*: ([\d ]+)", text
    ):
        numbers = ", ".join(unused[1].split())
        return (
            "the model has parameters without a part in the loss of a step, which torch's DDP "
            f"refuses; parallelism=fsdp takes them, or leave them out (number {numbers} in the "
            f"model's order, from 0)"
        ), ""
    elif joined is not None and (
        absent := group.absent_ranks(path, joined, text, parts.config.parallelism)
    ):
        return absent, ""
    where = own_line(error, or_any=False)
    return f"{text} ({where})" if where else text, traceback.format_exc()


def failed(path: Path, code: int, text: str, trace: str = "", *, final: bool = True) -> int:
    """Record a failure and say it, or leave that to the agent. `final`: it would only come again.
    Returns `code`."""
    text, trace = redacted(text), redacted(trace)
    if STARTED not in os.environ:  # on one rank, or under a launcher of another's
        fail(path, code, text, trace)
        return code
    group.report(path, int(os.environ["RANK"]), code, text, trace)
    if (
        os.environ["LOCAL_RANK"] != "0"
    ):  # into this rank's log; what local rank 0 prints is on the console
        print(f"{trace}{text}", file=sys.stderr)
    with contextlib.suppress(OSError):
        if (
            rundir.read_status(path).get("state") != "failed"
        ):  # the first rank to fail names the cause
            rundir.write_status(
                path, "failed", error=text, exit_code=code, ended=time.time(), final=final
            )
    return code


def refused(path: Path, text: str) -> int:
    """Say why this rank does not start, without touching what may be another's run."""
    text = redacted(text)
    if STARTED in os.environ:
        group.report(path, int(os.environ["RANK"]), REFUSED, text, "")
    else:
        print(f"llmexp: {text}", file=sys.stderr)
    return REFUSED


def log_line(text: str) -> None:
    """Into this rank's own log."""
    print(text, file=sys.stderr)


def run_training(path: Path, parts: Parts, joined: mesh.Mesh) -> int:
    config, run, main_rank = parts.config, parts.run, joined.rank == 0
    stream = sys.stdout if main_rank else open(os.devnull, "w")  # noqa: SIM115
    console = Console(path / rundir.LOG if main_rank else None, run.max_steps, stream=stream)
    begun = (
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}, rank {joined.rank} of {joined.world_size} on "
        f"{joined.device}"
    )
    console.line(banner([*banner_sections(run, str(path)), ("start", begun)]))
    if not main_rank:
        log_line(f"start {begun}")
    root = path / rundir.CHECKPOINTS
    if main_rank:
        saving.clean(root)
    listed = hashlib.sha256(" ".join(p.name for p in loading.steps(root)).encode()).digest()
    # after this no rank can be writing what is cleaned away
    if differing := mesh.differing_ranks(joined, listed):
        raise ConfigError(
            f"{root}: rank {', '.join(map(str, differing))} sees other checkpoints there than rank "
            "0; all hosts need one shared run folder"
        )
    loaded = loading.latest(
        root,
        console.line if main_rank else log_line,
        lambda bad: mesh.any_rank(joined, bad)[0],
        (joined.rank, joined.world_size),
    )
    fixed_config = json.loads(json.dumps(fixed_part(plain(config))))  # as it comes back from a file
    # the folder's own could have been edited
    if loaded and isinstance(saved := loaded.manifest.get("config"), dict):
        refuse_other_config(loaded.path, saved, fixed_config)
    data = hashlib.sha256(
        json.dumps(concealed(parts.corpus.fingerprint), sort_keys=True).encode()
    ).hexdigest()
    if loaded and loaded.manifest.get("data") not in (None, data):
        raise other_data(loaded.path, parts)
    s = set_up(parts, joined)
    fresh = Progress(), Meter(joined.device, 0, 0, 0), measuring(s)
    p, meter, measured = resume(s, loaded) if loaded else fresh
    if loaded:
        console.line(f"resumed from {loaded.path.name}: step {p.step:,} of {run.max_steps:,}")
    rows = rundir.Rows(path / rundir.METRICS, p.step) if main_rank else None
    tracker = open_tracker(path, config, console.line) if main_rank else NoTracker()
    lengths = token_byte_lengths(parts.tokenizer) * parts.corpus.is_text
    missing = max(0, (run.facts.vocab_size or 0) - len(lengths))
    loop = Loop(
        s=s,
        out=Outputs(path, main_rank, console, tracker, rows),
        p=p,
        meter=meter,
        measured=measured,
        fixed={"config": fixed_config, "data": data},
        byte_lengths=torch.from_numpy(np.pad(lengths, (0, missing)).astype(np.int64)),
        peak_flops=hardware.peak_flops(joined.device, parts.precision),
        saved=[p.step] if loaded else [],
    )
    # A split model speaks with all its ranks; rank 0 says what came out.
    says_more = config.train.sample_tokens and (main_rank or joined.sharded)
    gc.collect()
    gc.freeze()  # what lives now lives to the end; collections need not walk it again
    STOP.training = True
    state = "failed"
    try:
        state = train(loop)
    finally:  # STOP.training stays: a signal from here on must not undo what was reached
        code = {"finished": DONE, "preempted": PREEMPTED}.get(state, FAILED)
        leave_saving(loop)
        summary = summarise(loop)
        if rows is not None:
            rows.close()
        if main_rank and state != "failed":
            rundir.write_status(
                path,
                state,
                error=None,
                exit_code=code,
                ended=time.time(),
                summary=summary,
                **details(loop),
            )
        tracker.finish(summary, code)
        if state == "failed":
            console.close()
    text = None
    if state == "finished" and says_more:
        try:  # the run is over and recorded: what goes wrong here is only said
            text = sample_text(loop)
        except Exception as error:
            text = f"none: {error!r}"
    if main_rank:
        say_the_end(loop, state, summary, text)
    console.close()
    return code
