"""Steady-state speed of a run against a bare hand-written loop over the same model, batch and
precision.

    python benchmarks/step.py [--rounds 40] [--case NAME] [--log-every 1] [--layers-every N]

The run is a real one, with rows, console and checks on and a row each step (or each N-th); a hook
makes one bare step before each of its steps, so that both see the same machine. Printed: median of
bare time / run time, step by step (1.00 = as fast), and the share of a step that measuring and
writing its row takes (goal for the first: under 1 %).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import numpy as np
import torch
import torch.nn.functional as F

from llmexp import mesh
from llmexp.compose import app
from llmexp.folders import rundir
from llmexp.folders.rows import read_rows
from llmexp.train import folder, loop, worker
from llmexp.train.assembly.assemble import Parts, assemble

SIZES = {
    "base": (4, 256, 4, 256, 320),  # layers, width, heads, length, vocabulary
    "tiny": (2, 64, 2, 64, 320),
    "large-vocabulary": (4, 256, 4, 256, 50304),
}
# name: (size, micro-batch, accumulation, precision, goal)
CASES = {
    "base fp32": ("base", 4, 4, "fp32", 0.98),
    "base bf16": ("base", 4, 4, "bf16", 0.98),
    "tiny fp32": ("tiny", 4, 4, "fp32", 0.95),
    "tiny fp32, accumulation 1": ("tiny", 4, 1, "fp32", 0.95),
    "base fp32, accumulation 1": ("base", 4, 1, "fp32", 0.98),
    "base fp32, accumulation 8": ("base", 4, 8, "fp32", 0.98),
    "50k vocabulary fp32": ("large-vocabulary", 4, 2, "fp32", 1.15),
    "50k vocabulary bf16": ("large-vocabulary", 4, 2, "bf16", 1.3),
}


class Bare:
    """What people write by hand: nanoGPT's loop."""

    def __init__(self, parts: Parts) -> None:
        self.run, self.precision = parts.run, parts.precision
        self.model = parts.new_model()
        self.data = parts.corpus.train.read(0, 200_000).astype(np.uint16)
        decay = [p for p in self.model.parameters() if p.ndim >= 2]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
        self.amp = torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        t = self.run.sequence_length
        at = np.random.randint(0, len(self.data) - t - 1, self.run.micro_batch_size)
        x = torch.stack([torch.from_numpy(self.data[i : i + t].astype(np.int64)) for i in at])
        y = torch.stack(
            [torch.from_numpy(self.data[i + 1 : i + t + 1].astype(np.int64)) for i in at]
        )
        return x, y

    def step(self) -> None:
        for _ in range(self.run.gradient_accumulation_steps):
            x, y = self.batch()
            with self.amp:
                logits = self.model(x)
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
            (loss / self.run.gradient_accumulation_steps).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def parts_of(size: str, micro: int, accum: int, precision: str, steps: int, *more: str) -> Parts:
    layers, width, heads, length, vocabulary = SIZES[size]
    overrides = [
        f"model.n_layers={layers}", f"model.d_model={width}", f"model.n_heads={heads}",
        f"model.d_ff={4 * width}",
        f"model.max_position_embeddings={length}", f"model.vocab_size={vocabulary}",
        f"batch.sequence_length={length}",
        f"batch.micro_batch_size={micro}", f"batch.gradient_accumulation_steps={accum}",
        f"precision={precision}",
        f"train.max_steps={steps}", "data=synthetic", "train.log_every=1", "train.eval_every=null",
        "train.sample_tokens=0", "tracker=none", "checkpoint.every=null", *more,
    ]  # fmt: skip
    with app.hydra_app(None) as hydra:
        return assemble(app.typed_config(app.compose(hydra, overrides)[0]))


def ratio(
    case: str, rounds: int, log_every: int = 1, layers_every: int | None = None
) -> tuple[float, float, float, float]:
    """Median, lower and upper quartile of bare time / run time; share of a run's step that its row
    costs."""
    size, micro, accum, precision, _ = CASES[case]
    warm_up = 5
    each = [f"train.log_every={log_every}", f"metrics.layers_every={layers_every or 'null'}"]
    parts = parts_of(size, micro, accum, precision, rounds + warm_up + 1, *each)
    bare, marks = Bare(parts), []

    def hook(event: str, context: object) -> None:
        if event == "step_start":
            start = time.perf_counter()
            bare.step()
            marks.append((start, time.perf_counter()))

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> None:
            start = time.perf_counter()
            function(*arguments)
            spent.append(time.perf_counter() - start)

        return call

    parts, spent = dataclasses.replace(parts, hooks=[("bench", hook)]), []
    originals = loop.report_step, loop.show_rows
    loop.report_step, loop.show_rows = map(timed, originals)
    with tempfile.TemporaryDirectory() as path:
        folder.record_run(Path(path), parts, {})
        out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
        try:
            worker.run_training(Path(path), parts, mesh.join("cpu", "single", 1, 1, 1))
        finally:
            sys.stdout, (loop.report_step, loop.show_rows) = out, originals
        rows = read_rows(Path(path) / rundir.METRICS)
        assert len(rows) == -(-(rounds + warm_up + 1) // log_every)
    pairs = zip(marks[warm_up:-1], marks[warm_up + 1 :], strict=True)
    ratios = [(done - begun) / (next_begun - done) for (begun, done), (next_begun, _) in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    step = statistics.median(
        after - done for (_, done), (after, _) in itertools.pairwise(marks[warm_up:])
    )
    evaluation = max(spent)  # with the last row
    return middle, low, high, (sum(spent) - evaluation) / len(ratios) / step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--layers-every", type=int)
    args = parser.parse_args()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; bare time / run time per "
        "step"
    )
    print(f"{'case':28} {'median':>7} {'quartiles':>13} {'goal':>6} {'a row':>8}")
    for case in [args.case] if args.case else CASES:
        middle, low, high, row = ratio(case, args.rounds, args.log_every, args.layers_every)
        print(
            f"{case:28} {middle:7.3f} {low:6.3f} {high:6.3f} {CASES[case][-1]:6.2f} {row:8.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
