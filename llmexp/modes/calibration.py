"""Time a run before it is started: some of its steps, and once each what comes between them."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from llmexp import mesh
from llmexp.system import hardware
from llmexp.system.child import STOP
from llmexp.train.checkpointing import save
from llmexp.train.evaluation import validate
from llmexp.train.finishing import finish_step
from llmexp.train.loop import Due, report_step, take_step
from llmexp.train.state import Loop

WARM_UP, FEWEST, MOST = 2, 3, 50  # steps
ENOUGH_S = 4.0  # of steps that are timed


def run(loop: Loop, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Train a few steps as the run will; return how many seconds each part took.

    `asked` says whether `all` is timed, or the steps alone. None where a signal ended it."""
    began = time.time()
    at, last, stopped = _steps(loop)
    if stopped:
        return None
    taken, begin = [b - a for a, b in itertools.pairwise(at)], loop.run.first_step
    # the share that each has of a step of `real_batch_size`
    sizes = [loop.run.stage_at(begin + i).real_batch_size for i in range(len(taken))]
    shares = [size / loop.run.real_batch_size for size in sizes]
    each = [time_s / share for time_s, share in zip(taken, shares, strict=True)]
    steady = each[WARM_UP:] or each[-1:]
    step_s = statistics.median(steady)
    found: dict[str, Any] = {
        "timed_steps": len(steady),
        "step_s": step_s,
        "first_s": max(0.0, sum(taken[:WARM_UP]) - sum(shares[:WARM_UP]) * step_s),
        "peak_bytes": _peak_bytes(loop),
    }
    if asked["all"]:
        found |= _between(loop, last)
    return found | {"began": began, "ended": time.time()}


def _steps(loop: Loop) -> tuple[list[float], Callable[[], None], bool]:
    """Take the steps.

    Return when each began, what writes a row of the last one, and whether a signal to any rank
    ended them.
    """
    first = loop.progress.step  # not 0 in a fork
    end = min(loop.run.max_steps, first + MOST)
    windows, at = loop.windows(first), [time.perf_counter()]
    while True:
        window, outcome = take_step(loop, windows, Due())
        at.append(time.perf_counter())
        enough = len(at) > WARM_UP + FEWEST and at[-1] - at[WARM_UP] > ENOUGH_S
        stopped, through = mesh.any_rank(loop.mesh, STOP.requested, enough)
        if stopped or through or loop.progress.step >= end:
            break
    finish_step(loop)
    return at, functools.partial(report_step, loop, outcome, window, Due(row=True)), stopped


def _between(loop: Loop, write_row: Callable[[], None]) -> dict[str, float]:
    """Return what rows, evaluation, what features do between steps and a checkpoint take."""
    config = loop.config
    actions: dict[str, Callable[[], Any]] = {
        "row_s": write_row,
        "evaluation_s": lambda: validate(loop.parts, loop.setup),
    }
    for timed in loop.features.on("timed"):
        actions |= {f"{name}_s": act for name, act in timed().items()}
    actions["save_s"] = lambda: save(loop, wait=not config.checkpoint.async_)
    found = {}
    for name, act in actions.items():
        start = time.perf_counter()
        act()
        found[name] = time.perf_counter() - start
    return found


def _peak_bytes(loop: Loop) -> float:
    """Return the most memory that a rank took: on CUDA what its allocator reserved."""
    device = loop.mesh.device
    peak = hardware.peak_memory_gib(device) * 2**30
    if device.type == "cuda":
        peak = float(torch.cuda.max_memory_reserved(device))
    return float(mesh.maximum(loop.mesh, torch.tensor(peak, dtype=torch.float64)))
