"""Find the size for batch.micro_batch_size=auto where the run starts.

Another process chooses what to try (`python -m llmexp.forecast.fitting`). It tries alone, or, where
the ranks of the run were started already, with all of them, through the store where they meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from llmexp import mesh
from llmexp.config.convert import with_knobs
from llmexp.config.sections import Config, plain
from llmexp.config.values import AUTO, ConfigError, error_record, refusal
from llmexp.folders import rundir
from llmexp.mesh.groups import STARTED, log_file, note_file
from llmexp.mesh.ranks import GRACE_S
from llmexp.system import fileio, hardware
from llmexp.system.child import (
    DONE,
    first_to_go_without_memory,
    hand_over,
    how_it_died,
    kill_family,
)
from llmexp.system.workers import start_worker
from llmexp.train import group
from llmexp.train.assembly.assemble import Parts
from llmexp.train.step import TrainingFailed

CHOOSER = "llmexp.forecast.fitting"
STORE = "sizes"  # what the keys of a search begin with
POLL_S = 0.05


def is_open(config: Config) -> bool:
    """Return whether the size is still to be found."""
    return config.batch.micro_batch_size == AUTO


def cut(config: Config, micro: int) -> Config:
    """Return the config with this micro-batch, whose accumulation is solved."""
    return with_knobs(config, batch={"micro_batch_size": micro})


def found_alone(config: Config) -> Config:
    """Return the config with the size that is found on this host.

    Raises ConfigError where there is none.
    """
    with choosing({"config": plain(config)}) as chooser:
        return cut(config, _checked(_answer_of(chooser)))


def run(
    config: Config,
    assembled: Callable[[Config], Parts],
    path: Path | None,
    find: Callable[[Config], Config] | None = found_alone,
) -> Parts:
    """Return the parts of a run; a size that is open is that of the run in `path`, or is found.

    A rank finds it with all others, another process by `find`; where that is None the run is only
    queued, and its config stays open. Raises ConfigError where there is no size, and TrainingFailed
    where a rank is lost.
    """
    if is_open(config) and path is not None:
        with contextlib.suppress(ConfigError):
            size = rundir.built_config(path).batch.micro_batch_size
            config = cut(config, size) if isinstance(size, int) else config
    if is_open(config) and path is not None and "RANK" in os.environ:
        config = found_together(path, config, assembled(config))
    elif is_open(config) and find is not None:
        config = find(config)
    parts = assembled(config)
    if not is_open(config):
        return parts
    batch = {"micro_batch_size": AUTO, "gradient_accumulation_steps": None}
    return dataclasses.replace(parts, config=with_knobs(parts.config, batch=batch))


def found_together(path: Path, config: Config, parts: Parts) -> Config:
    """Return the config with the size that all ranks of the run, of which this is one, find."""
    rank, timeout_s = int(os.environ["RANK"]), config.parallelism.start_timeout_s
    with group.absence_named(path, parts):
        with group.waiting(path, rank):
            store = mesh.meeting_store(STORE, timeout_s)
        store.set(f"memory/{rank}", json.dumps(memory_of_rank(parts)))
        with contextlib.ExitStack() as stack:
            chooser = None
            if rank == 0:
                request = {"config": plain(config), "run": str(path.absolute())}
                chooser = stack.enter_context(choosing(request))
            for number in itertools.count():
                asked = next_question(store, number, chooser)
                if "trial" not in asked:
                    break
                ended = try_steps(store, path / "logs" / asked["trial"], number)
                store.set(f"ended/{number}/{rank}", json.dumps(ended))
        # the others read the answer before its store goes; a lost rank will not
        end = time.monotonic() + (GRACE_S if "lost" in asked else timeout_s)
        read = store.add("read", 1)
        while rank == 0 and read < parts.run.world_size and time.monotonic() < end:
            time.sleep(POLL_S)
            read = store.add("read", 0)
    return cut(config, _checked(asked))


def memory_of_rank(parts: Parts) -> float | None:
    """Return the bytes that this rank's device has; on a CPU, its share of the host's."""
    if parts.device.type == "cuda":
        return hardware.memory_bytes(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
    whole = hardware.memory_bytes(parts.device)
    return None if whole is None else whole / parts.run.layout.nproc_per_node


@contextlib.contextmanager
def choosing(request: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Start the process that chooses what to try; end it if it is not through."""
    pipe = subprocess.PIPE
    chooser: subprocess.Popen[str] = start_worker(
        "", module=CHOOSER, stdin=pipe, stdout=pipe, text=True
    )
    try:
        hand_over(chooser, request)
        yield chooser
    finally:
        chooser.terminate()
        chooser.wait()


def _answer_of(chooser: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the process answers in the end: a size, or why there is none."""
    assert chooser.stdout is not None
    text = chooser.stdout.read()
    if code := chooser.wait():
        why = how_it_died(code, stopped=False)
        text = f"batch.micro_batch_size=auto: no size was found: {why}"
        return {"error": error_record(ConfigError("failed", text))}
    found: dict[str, Any] = json.loads(text)
    return found


def _checked(answer: dict[str, Any]) -> int:
    """Return the size of an answer. Raises ConfigError, and TrainingFailed for a lost rank."""
    if "lost" in answer:
        raise TrainingFailed(answer["lost"])
    if "error" in answer:
        raise refusal(answer["error"])
    return int(answer["micro_batch_size"])


def next_question(store: Any, number: int, chooser: subprocess.Popen[str] | None) -> dict[str, Any]:
    """Wait for what all ranks try next, or for the answer, and return it."""
    key = f"question/{number}"
    while True:
        through = chooser is not None and chooser.poll() is not None
        if store.check([key]):
            found: dict[str, Any] = json.loads(store.get(key))
            return found
        if through:
            assert chooser is not None
            store.set(key, json.dumps(_answer_of(chooser)))
        time.sleep(POLL_S)


def try_steps(store: Any, folder: Path, number: int) -> dict[str, Any]:
    """Train a few steps of the run in the folder, as one of its ranks; return how that ended.

    Once another rank has failed, this one has GRACE_S to end.
    """
    rank, failed = int(os.environ["RANK"]), f"failed/{number}"
    env = {key: value for key, value in os.environ.items() if key != STARTED}
    env[mesh.TRIAL] = f"trial/{number}"
    log_file(folder, rank).parent.mkdir(exist_ok=True)
    child = start_worker(str(folder), log=log_file(folder, rank), env=env)
    first_to_go_without_memory(child.pid)
    deadline, late = math.inf, False
    try:
        while (code := child.poll()) is None:
            if deadline == math.inf and store.check([failed]):
                deadline = time.monotonic() + GRACE_S
            if time.monotonic() > deadline and not late:
                late = True
                kill_family(child.pid)
            time.sleep(POLL_S)
    except BaseException:
        kill_family(child.pid)
        child.wait()
        raise
    if code == DONE:
        return {}
    order = store.add(failed, 1)
    text = how_it_died(code, late, f"rank {rank}")
    with contextlib.suppress(ConfigError, KeyError):
        text = fileio.read_json(note_file(folder, rank))["text"]
    killed = code < 0 and not late  # by the kernel, perhaps: the others only notice
    return {"order": 0 if killed else order, "text": text}
