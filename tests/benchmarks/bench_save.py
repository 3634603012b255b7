"""What the digest of a checkpoint costs: a state of 124M parameters with AdamW's moments, written
with and without it, in turns.

    python tests/benchmarks/bench_save.py [FOLDER]
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from llmexp.checkpoint import saving
from llmexp.checkpoint.pieces import piece_of


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


def seconds(root: Path, state: saving.Pieces, step: int) -> float:
    started = time.perf_counter()
    saving.write(root, step, state)
    took = time.perf_counter() - started
    shutil.rmtree(root)
    return took


def main(folder: str | None = None) -> None:
    state, digest = pieces(), saving.weighted_sum
    took: dict[str, list[float]] = {"with": [], "without": []}
    for step in range(1, 7):
        for kind, function in (("with", digest), ("without", lambda own: 0)):
            saving.weighted_sum = function  # type: ignore[assignment]
            took[kind].append(seconds(Path(tempfile.mkdtemp(dir=folder)), state, step))
    ratios = [a / b for a, b in zip(took["with"], took["without"], strict=True)]
    middle = {kind: statistics.median(found) for kind, found in took.items()}
    print(f"{middle['with']:.2f} s with the digest, {middle['without']:.2f} s without;")
    print(f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
