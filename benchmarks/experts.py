"""Tokens per second of `model=moe_tiny` beside a dense model of the same active FLOPs.

    python benchmarks/experts.py [--pairs 40] [OVERRIDE ...]

One thread; whole steps of a run, with its features; the two models take their steps in turns, and
each is timed by the CPU time of this thread, which a busy machine does not stretch. Printed: the
median of dense time / time with experts, and its quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from llmexp import mesh
from llmexp.compose import app
from llmexp.train.assembly.assemble import assemble
from llmexp.train.set_up import set_up
from llmexp.train.step import train_step
from llmexp.train.windows import read_ahead

COMMON = [
    "model=moe_tiny", "data=synthetic", "precision=fp32", "tracker=none", "train.sample_tokens=0",
    "train.device=cpu",
]  # fmt: skip
# 2 experts of 256, and the router's 8 rows, in three matrices of 128
DENSE = ["model.n_experts=0", "model.d_expert=null", "model.d_ff=515"]


def steps_of(*overrides: str) -> tuple[Callable[[], float], int]:
    """Return what takes a step and returns its seconds, and the FLOPs of a token."""
    with app.hydra_app(None) as hydra:
        given = [*COMMON, "train.max_steps=10000", *overrides]
        parts = assemble(app.typed_config(app.compose(hydra, given)[0]))
    setup = set_up(parts, mesh.join("cpu", "single", 1, 1, 1))
    windows = read_ahead(parts, setup.mesh, 0)

    def step() -> float:
        window = next(windows)
        start = time.thread_time()
        for act in setup.features.on("backward_start"):
            act(window)
        train_step(setup, window, lambda: 0).read()
        return time.thread_time() - start

    return step, parts.run.flops_per_token or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sparse, flops = steps_of(*given.overrides)
    dense, dense_flops = steps_of(*DENSE, *given.overrides)
    for _ in range(3):
        dense(), sparse()
    ratios = [dense() / sparse() for _ in range(given.pairs)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"FLOPs of a token: {flops:,}, dense {dense_flops:,}")
    print(f"dense time / time with experts: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
