"""What checks cost in the steady state, as shares of a step: the look for what is not finite, the
hashes of a checkpoint, the look at the data files.

    python tests/benchmarks/bench_trust.py [--model gpt_tiny] [--rounds 30] [OVERRIDE ...]

The default run's step is timed between the checks, on the same live model, so that all see the same
machine. A hash is paid once in checkpoint.every steps; with checkpoint.async=true it is computed
while training goes on, and costs the loop nothing but the copy of the state. Goal: each under 1 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import torch

from llmexp import mesh
from llmexp.checkpoint import hashes, saving
from llmexp.compose import app
from llmexp.train.assembly.assemble import assemble
from llmexp.train.step import Verdict, set_up, train_step, unusable
from llmexp.train.windows import read_ahead


def timed(function: Callable[[], object], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - start) / times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    quiet = ["tracker=none", f"train.max_steps={args.rounds + 5}", *args.overrides]
    with app.hydra_app(None) as hydra:
        config = app.typed(app.compose(hydra, quiet)[0])
    parts = assemble(config, write=True)
    joined = mesh.join(parts.device.type, "single", 1, 1, 1)
    s = set_up(parts, joined)
    windows = read_ahead(s, 0)
    s.model.train()
    updates = 0

    def applied() -> int:
        return updates

    def step() -> None:
        nonlocal updates
        train_step(s, next(windows), applied).verdict.read()
        updates += 1

    norm, loss, count = torch.tensor(1.0), 3.0, 1000.0

    def look() -> None:
        skip = unusable(loss, norm, count)
        Verdict(None, skip, loss, norm, norm, False, count, loss).read()

    for _ in range(5):
        step()
    found: dict[str, list[float]] = {
        "look for what is not finite": [],
        "look at the data files": [],
        "hashes": [],
    }
    steps = []
    with tempfile.TemporaryDirectory() as name:
        pieces = saving.snapshot(s.model, s.optimizers, 0, 1, copy=True)
        saving.write(Path(name), 1, pieces)
        files = list(Path(name).rglob("*.safetensors"))
        size = sum(p.stat().st_size for p in files)
        for _ in range(args.rounds):
            steps.append(timed(step))
            found["look for what is not finite"].append(timed(look, 20))
            found["look at the data files"].append(timed(parts.corpus.changed, 20))
            found["hashes"].append(timed(lambda: [hashes.fingerprint(p) for p in files]))
    every = config.checkpoint.every or parts.run.max_steps
    one = statistics.median(steps)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {parts.run.facts.model}: a "
        f"step {one:.4f} s"
    )
    for what, seconds in found.items():
        share = statistics.median(t / own for t, own in zip(seconds, steps, strict=True))
        if what == "look for what is not finite":
            print(f"{what}: {statistics.median(seconds) * 1e6:.0f} us, {share:.3%} of a step")
            continue
        middle = statistics.median(seconds)
        rate = (
            f" of {size / 2**20:.0f} MiB, {size / middle / 1e6:,.0f} MB/s"
            if what == "hashes"
            else ""
        )
        print(
            f"{what}: {middle * 1e3:.2f} ms{rate}, each {every} steps: {share / every:.4%} of a "
            "step"
        )


if __name__ == "__main__":
    main()
