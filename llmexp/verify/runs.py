"""Make the runs of a verification: ordinary run folders, trained by ordinary workers.

The workers are processes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmexp import features
from llmexp.config.convert import with_knobs
from llmexp.config.forms import ramp_sizes
from llmexp.config.sections import Batch, Config, plain
from llmexp.config.values import ConfigError, override_value, refuse
from llmexp.folders import rundir
from llmexp.folders.door import scan_rows
from llmexp.run.batch import shared_sequences
from llmexp.run.budget import NO_BUDGET
from llmexp.system.child import DONE, hand_over, kill_family, signals_passed_on
from llmexp.system.fileio import last_line
from llmexp.system.workers import start_worker
from llmexp.verify import record

LAYER_KNOBS = ("n_layers", "n_layer", "num_layers")
EVAL_SEQUENCES = 16  # of a run that is watched
OUTPUT = "output.log"  # in the run folder's parent: what the workers printed


def trial(config: Config, steps: int, **sections: dict[str, Any]) -> Config:
    """Return the config as a short run that logs each step, and writes to its own folder only.

    `sections` changes knobs of sections: batch={"micro_batch_size": 4}. A budget other than `steps`
    is given by train={"max_tokens": ..., "max_steps": None}.
    """
    budget = {**NO_BUDGET, "max_steps": steps, "log_every": 1}
    saves = {"keep": None, "save_initial": True}
    short = with_knobs(quiet(config), train=budget, checkpoint=saves)
    if config.batch.ramp is not None:
        sizes = window_sizes(config.batch, steps)
        short = with_knobs(short, batch=ramp_over(sizes, config.batch.sequence_length))
    return with_knobs(of_features(short, "trial"), **sections)


def of_features(config: Config, name: str, *given: Any) -> Config:
    """Return the config with the knobs that features want in a proof, by a name: a `trial`."""
    for knobs in features.offered("verify", name):
        config = with_knobs(config, **knobs(*given))
    return config


def quiet(config: Config) -> Config:
    """Return the config without what comes between and beside the steps, which stay as they are."""
    train = dict.fromkeys(("stop_step", "eval_every", "eval_every_tokens"))
    saves = dict.fromkeys(("every", "every_minutes", "keep_every")) | {"resume": "auto"}
    config = with_knobs(config, train=train, checkpoint=saves)
    for part in features.parts("config"):
        config = with_knobs(config, **{part.SECTION: getattr(part, "OFF", {})})
    return config


def refuse_hosts(config: Config, what: str) -> None:
    """Raise ConfigError for several hosts, which `what` cannot start."""
    if (hosts := config.parallelism.nnodes) > 1:
        raise refuse(
            "unsupported", "parallelism.nnodes", hosts, f"{what} runs on this host alone", 1
        )


def window_sizes(batch: Batch, steps: int, factor: int = 1) -> list[int]:
    """Return the sequences of so many steps; the stages of a ramp have like numbers of them.

    `factor`: on the sizes of the batch.
    """
    sizes = [batch.real_batch_size or 1]
    if batch.ramp is not None:
        sizes = list(ramp_sizes(batch.ramp).values())
    return [factor * sizes[step * len(sizes) // steps] for step in range(steps)]


def ramp_over(sizes: Sequence[int], length: int) -> dict[str, Any]:
    """Return the knobs of a batch whose steps have these sequences, of `length` tokens each."""
    ramp, tokens = dict[int, int](), 0
    for size in sizes:
        if size not in [*ramp.values()][-1:]:
            ramp[tokens] = size
        tokens += size * length
    others = ("real_batch_size", "tokens_per_step", "gradient_accumulation_steps")
    return {"ramp": override_value(ramp)} | dict.fromkeys(others)


def watched(config: Config, steps: int, shrink: bool, **sections: dict[str, Any]) -> Config:
    """Return the config as a trial run with the recorder and a short evaluation.

    Raises ConfigError for several hosts.
    """
    refuse_hosts(config, "a verification")
    config = shrunk(config) if shrink else config
    most = EVAL_SEQUENCES * config.batch.sequence_length
    train = {"eval_tokens": min(config.train.eval_tokens or most, most)}
    short = trial(config, steps, train=train, **sections)
    # before the user's own hooks, which may draw numbers
    return dataclasses.replace(short, hooks=[record.HOOK, *short.hooks])


def shrunk(config: Config) -> Config:
    """Return the config with two layers, short sequences and small micro-batches.

    Sequences have at most 64 tokens, micro-batches 2 sequences, two of them a step on each rank.
    Widths, vocabulary, data and everything else stay: what is proven is still this config's
    arithmetic.
    """
    layers = {key: n for key in LAYER_KNOBS if isinstance(n := config.model.get(key), int)}
    model = {key: min(2, n) for key, n in layers.items()}
    length = min(64, config.batch.sequence_length)
    batch: dict[str, Any] = {"real_batch_size": None, "tokens_per_step": None}
    cut = dict.fromkeys(("micro_batch_size", "gradient_accumulation_steps"))
    if config.batch.ramp is None:
        cut = dict.fromkeys(cut, 2)
    else:
        ramp, shared = ramp_sizes(config.batch.ramp), shared_sequences(config.batch)
        less = shared // 8 if shared % 8 == 0 else 1  # which 1, 2, 4 or 8 ranks share
        batch["ramp"] = override_value({tokens: size // less for tokens, size in ramp.items()})
    return with_knobs(config, model=model, batch={**batch, **cut, "sequence_length": length})


def start_run(path: Path, config: Config, **env: str) -> subprocess.Popen[str]:
    """Return a worker that makes the run folder `path`, or goes on with the run in it.

    It has a process group of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    streams: dict[str, Any] = {"env": {**os.environ, **env}, "stdin": subprocess.PIPE, "text": True}
    with open(path.parent / OUTPUT, "a", encoding="utf-8") as output:
        process = start_worker("-", stdout=output, stderr=output, **streams)
    request = {"config": plain(config), "folder": str(path.absolute()), "fixed": True}
    hand_over(process, request)
    return process


@contextlib.contextmanager
def ended_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """Pass signals on to a worker, and leave neither it nor its ranks behind.

    A signal is a KeyboardInterrupt, whatever became of the worker: it may have been importing, or
    about to end.
    """
    with signals_passed_on([process]) as passed:
        try:
            yield
        finally:
            if process.poll() is None:
                kill_family(process.pid)
                process.wait()
            if passed:
                raise KeyboardInterrupt


def train_folder(path: Path, config: Config, **env: str) -> None:
    """Train the run in `path` to its end.

    Raises ConfigError with its last words when it does not get there.
    """
    process = start_run(path, config, **env)
    with ended_with_us(process):
        code = process.wait()
    if code != DONE:
        words = last_words(path)
        hint = "; --shrink proves it for a smaller model" if "memory" in words else ""
        raise ConfigError(
            "cannot_verify",
            f"{path}: this run of the verification ended with exit code {code}: {words}{hint}",
        )


def train_recorded(path: Path, config: Config) -> None:
    """Train a watched run, which records what its ranks compute."""
    print(f"the {path.name} run of {config.train.max_steps} steps", flush=True)
    train_folder(path, config, **record.recorder_environment(path))


def last_words(path: Path) -> str:
    """Return why a run ended, from its status or its output."""
    if error := rundir.read_status(path).get("error"):
        return str(error)
    return last_line(path.parent / OUTPUT) or "it printed nothing"


def read_run_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run, oldest first."""
    found = []
    for _, _, row in scan_rows(path / rundir.METRICS):  # in any order, which is compared
        if isinstance(row, ValueError):
            raise ConfigError("damaged_file", f"{path / rundir.METRICS}: {row}")
        found.append(row)
    return found
