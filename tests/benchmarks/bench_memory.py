"""Peak memory of a run with 16 micro-batches a step over that with 1, in processes of their own.

    python tests/benchmarks/bench_memory.py

Goal: at most 1.05.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def peak_gib(folder: str, accumulation: int) -> float:
    """Peak resident memory of the worker, as the last row reports it."""
    run = Path(folder) / str(accumulation)
    command = [
        sys.executable, "-m", "llmexp", "train", "data=synthetic", "tracker=none",
        f"hydra.run.dir={run}",
        "model.n_layers=4", "model.d_model=256", "model.n_heads=4", "model.d_ff=1024",
        "batch.sequence_length=256",
        "batch.micro_batch_size=4", f"batch.gradient_accumulation_steps={accumulation}",
        "train.max_steps=4",
        "train.eval_every=null", "train.sample_tokens=0",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["peak_memory_gib"]


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    with tempfile.TemporaryDirectory() as folder:
        one, sixteen = peak_gib(folder, 1), peak_gib(folder, 16)
    print(
        f"peak memory: accumulation 1 {one:.3f} GiB, accumulation 16 {sixteen:.3f} GiB, ratio "
        f"{sixteen / one:.3f}"
    )


if __name__ == "__main__":
    main()
