"""Recomputation: peak memory and step time of llama_100m at length 1024, on one rank.

    python tests/benchmarks/bench_recompute.py [--micro-batch 1 2 4] [--rounds 5]

The runs take turns, step by step (see bench_ranks), and must print the same losses, bit for bit. The vocabulary is that
of GPT-2, padded. Weights, gradients and Adam's moments are there whatever is computed again, so the share that is saved
grows with the micro-batch. Goal: `full` lowers the peak of the process by at least a third.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from bench_ranks import interleave, llmexp, quartiles, rows

KINDS = ("none", "selective", "full")
WARM_UP = 1  # step


def measure(micro_batch: int, rounds: int) -> tuple[dict[str, float], dict[str, list[float]], int]:
    """Peak resident GiB and time over that of `none` by kind, and the number of parameters. Raises AssertionError where
    losses or norms differ."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = [
            llmexp(
                folder / kind, WARM_UP + rounds + 1, "model=llama_100m", "model.vocab_size=50304", "data.n_ids=null",
                "batch.sequence_length=1024", f"batch.micro_batch_size={micro_batch}",
                f"parallelism.activation_checkpointing={kind}",
            )
            for kind in KINDS
        ]  # fmt: skip
        seconds = interleave(folder, commands, 1, warm_up=WARM_UP)
        found = {kind: rows(folder / kind) for kind in KINDS}
        parameters = json.loads((folder / "none" / "run.json").read_text())["parameters"]
    for key in ("train/loss", "grad_norm"):
        for kind in KINDS:
            assert [row[key] for row in found[kind]] == [row[key] for row in found["none"]], (key, kind)
    peaks = {kind: found[kind][-1]["peak_memory_gib"] for kind in KINDS}
    ratios = {
        kind: [own / none for own, none in zip(taken, seconds[0], strict=True)]
        for kind, taken in zip(KINDS, seconds, strict=True)
    }
    return peaks, ratios, parameters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    peaks: dict[int, dict[str, float]] = {}
    parameters = 0
    for micro_batch in args.micro_batch:
        peaks[micro_batch], ratios, parameters = measure(micro_batch, args.rounds)
        for kind, peak in peaks[micro_batch].items():
            print(f"micro-batch {micro_batch}, {kind:9}: peak {peak:.2f} GiB, {peak / peaks[micro_batch]['none']:.2f} "
                  f"of none; time of a step / none {quartiles(ratios[kind])}", flush=True)  # fmt: skip
    print(f"losses and norms bit-equal; weights, gradients and moments: {16 * parameters / 2**30:.2f} GiB "
          f"({parameters:,} parameters)")  # fmt: skip
    if len(peaks) > 1:
        low, high = min(peaks), max(peaks)
        for kind in KINDS:
            print(f"{kind:9}: {(peaks[high][kind] - peaks[low][kind]) / (high - low):.3f} GiB for each more sequence")


if __name__ == "__main__":
    main()
