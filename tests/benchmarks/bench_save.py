"""A checkpoint of 124M parameters with AdamW's moments (1.5 GB) beside torch.save and torch.load of
the same tensors, in turns.

    python tests/benchmarks/bench_save.py [FOLDER] [--rounds 5]

Both write over files that are there, into pages that the machine has already, and flush them; both
read into tensors that are there. Printed: medians of seconds by the clock and of processor; ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from llmexp.checkpoint import loading, saving
from llmexp.checkpoint.pieces import piece_of
from llmexp.system.fileio import sync

STEP = 1


def pieces() -> saving.Pieces:
    """124M parameters in float32, and twice as much of optimizer state."""
    shapes = [(50304, 768), (1024, 768), *[(768, 3072), (3072, 768), (768, 2304), (768, 768)] * 12]
    named = {f"p{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    moments = {
        f"0/{name}/{k}": torch.randn_like(t)
        for name, t in named.items()
        for k in ("exp_avg", "exp_avg_sq")
    }
    files = {"model.safetensors": named, "optimizer.safetensors": moments}
    held = {n: {k: piece_of(t) for k, t in of.items()} for n, of in files.items()}
    return saving.Pieces(0, 1, held, [])


def taken(function: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds by the clock and of processor."""
    start, before = time.perf_counter(), os.times()
    function()
    after = os.times()
    cpu = after.user + after.system - before.user - before.system
    return time.perf_counter() - start, cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    state = pieces()
    flat = {f"{file}/{k}": p.local for file, of in state.files.items() for k, p in of.items()}
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        root, plain = Path(name), Path(name) / "plain.pt"

        def save_plainly() -> None:
            torch.save(flat, plain)
            sync(plain)

        def load_plainly() -> None:
            for key, value in torch.load(plain, weights_only=True).items():
                flat[key].copy_(value)

        def load() -> None:
            loaded = loading.load(loading.of_step(root, STEP))
            for kind, of in (("model", loaded.model), ("optimizer", loaded.optimizer)):
                tensors = {k: p.local for k, p in state.files[f"{kind}.safetensors"].items()}
                loading.fill_all(loaded, tensors, of)

        saving.write(root, STEP, state)
        saving.commit(root, STEP, state, {}, {}, None)
        turns = {"torch.save": save_plainly, "save": lambda: saving.write(root, STEP + 1, state),
                 "torch.load": load_plainly, "load": load}  # fmt: skip
        for number in range(args.rounds + 1):
            for what, function in turns.items():
                seconds = taken(function)
                if number:  # the first round makes files and pages
                    found.setdefault(what, []).append(seconds)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; wall and CPU seconds")
    for what, times in found.items():
        print(
            f"{what:12}" + "".join(f"{statistics.median(t):7.2f}" for t in zip(*times, strict=True))
        )
    for ours in ("save", "load"):
        for number, of in enumerate(("wall", "CPU")):
            pairs = zip(found[ours], found[f"torch.{ours}"], strict=True)
            ratios = [a[number] / b[number] for a, b in pairs]
            print(f"{ours}: {of} {statistics.median(ratios):.3f} of torch's "
                  f"({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
