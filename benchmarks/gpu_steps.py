"""Steps on a CUDA device, in this process: made of the project's own parts as a run makes them, and
as people write them by hand. For gpu.py."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmexp import mesh
from llmexp.compose import app
from llmexp.data.window import Window
from llmexp.train.assembly.assemble import Parts, assemble
from llmexp.train.set_up import set_up
from llmexp.train.step import Outcome, Setup, seed_step, train_step

COMMON = [
    "data=synthetic", "data.n_ids=null", "data.n_tokens=400000", "tokenizer=bytes",
    "train.max_steps=1000", "tracker=none",
    "optimizer.lr=1e-3", "schedule=constant", "schedule.warmup_steps=0",  # as by hand
]  # fmt: skip


def made(model: str, micro: int, accumulation: int, length: int, *more: str) -> tuple[Parts, Setup]:
    """Return what a run and a rank consist of; bf16 on CUDA unless they say otherwise."""
    sizes = [
        f"batch.micro_batch_size={micro}", f"batch.gradient_accumulation_steps={accumulation}",
        f"batch.sequence_length={length}", "precision=bf16", "train.device=cuda",
    ]  # fmt: skip
    with app.hydra_app(None) as hydra:
        overrides = [f"model={model}", *COMMON, *sizes, *more]
        parts = assemble(app.typed_config(app.compose(hydra, overrides)[0]))
    return parts, set_up(parts, mesh.join(parts.device.type, "single", 1, 1, 1))


def windows(parts: Parts, s: Setup, count: int = 3) -> list[Window]:
    """Random ones, in pinned memory as those of a run."""
    run = parts.run
    shape = (run.micro_batch_size, run.sequence_length + 1)

    def ids() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, run.vocab_size or 256, shape)
        pair = x[:, :-1].contiguous(), x[:, 1:].contiguous()
        return (pair[0].pin_memory(), pair[1].pin_memory()) if s.mesh.device.type != "cpu" else pair

    targets = run.micro_batch_size * run.sequence_length * run.gradient_accumulation_steps
    return [  # of steps in which nothing is measured that comes every tenth
        Window(step, [ids() for _ in range(run.gradient_accumulation_steps)], targets, 0)
        for step in range(count)
    ]


def step_of(s: Setup, window: Window, last: Outcome | None = None) -> Outcome:
    """One step as the loop makes it: the outcome of the last one is read within it."""

    def settle() -> int:
        if last is not None:
            last.read()
        return 0

    seed_step(1, window.step, 0)
    return train_step(s, window, settle)


def ours(parts: Parts, s: Setup) -> Callable[[], None]:
    """Return a function that makes the next step."""
    following, last = itertools.cycle(windows(parts, s)), None

    def step() -> None:
        nonlocal last
        last = step_of(s, next(following), last)

    return step


def bare(parts: Parts, s: Setup, compiled: bool = True) -> Callable[[], None]:
    """Return the same by hand: nanoGPT's loop over a model of the same shape.

    The loss is compiled as a whole, AdamW fused, gradients clipped and set to none.
    """
    model, run = parts.new_model().to(s.mesh.device), parts.run
    following = itertools.cycle(windows(parts, s))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))

    whole: Any = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step() -> None:
        for x, y in next(following).micro_batches:
            x, y = (ids.to(s.mesh.device, non_blocking=True) for ids in (x, y))
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = whole(x, y)
            (loss / run.gradient_accumulation_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def first(step: Callable[[], None]) -> float:
    """Seconds of the first step, in which all is compiled."""
    start = time.monotonic()
    step()
    torch.cuda.synchronize()
    return time.monotonic() - start


def rate(step: Callable[[], None], tokens: int, steps: int) -> dict[str, float]:
    """Tokens per second by the wall clock around some steps, and the host's time of one."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    host, begun = [], time.perf_counter()
    for _ in range(steps):
        at = time.perf_counter()
        step()
        host.append(time.perf_counter() - at)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / steps
    return {
        "tokens_per_sec": tokens / seconds,
        "ms": 1e3 * seconds,
        "host_ms_least": 1e3 * min(host),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def timed(work: Callable[[], object], least: int = 5, seconds: float = 0.4) -> float:
    """Median milliseconds of a call, by events, after two calls to warm up."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    times, begun = [], time.monotonic()
    while len(times) < least or (time.monotonic() - begun < seconds and len(times) < 50):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        work()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return max(statistics.median(times), 1e-6)


def matrix_rate(size: int = 8192) -> float:
    """FLOP/s of products of bf16 matrices, kept up for so long that clocks settle."""
    a, b, out = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ms = timed(lambda: torch.mm(a, b, out=out), seconds=1.0)
    return 2 * size**3 / ms * 1e3


def kernels(step: Callable[[], None]) -> list[str]:
    """Return the kernels of one step by their time on the device: milliseconds, calls, name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    events = [e for e in found.key_averages() if e.device_type.name == "CUDA"]
    events.sort(key=lambda e: -e.self_device_time_total)
    return [f"{e.self_device_time_total / 1e3:9.3f} ms {e.count:5d} {e.key[:120]}" for e in events]
