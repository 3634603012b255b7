"""Recomputation: peak memory and step time of llama_100m at length 1024, on one rank.

    python tests/benchmarks/bench_recompute.py [--micro-batch 1 2 4] [--rounds 5]

Times are those of the first micro-batch size; the runs take turns, step by step (see bench_ranks,
also for what "in use" is). All must print the same losses and norms, bit for bit. The vocabulary is
that of GPT-2, padded. Weights, gradients and Adam's moments are there whatever is computed again:
the share that is saved grows with the micro-batch. Goal: `full` lowers the peak of the process by
at least a third.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from bench_ranks import interleave, llmexp, peak_in_use, quartiles, rows

KINDS = ("none", "selective", "full")
WARM_UP = 1  # step


def overrides(kind: str, micro_batch: int) -> list[str]:
    return [
        "model=llama_100m", "model.vocab_size=50304", "data.n_ids=null",
        "batch.sequence_length=1024",
        f"batch.micro_batch_size={micro_batch}", f"parallelism.activation_checkpointing={kind}",
    ]  # fmt: skip


def check_equal(folder: Path) -> None:
    """Raises AssertionError where the runs of the kinds differ."""
    for key in ("train/loss", "grad_norm"):
        first, *others = ([row[key] for row in rows(folder / kind)] for kind in KINDS)
        assert all(other == first for other in others), (key, first, others)


def step_times(micro_batch: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, steps = Path(name), WARM_UP + rounds + 1
        commands = [llmexp(folder / kind, steps, *overrides(kind, micro_batch)) for kind in KINDS]
        seconds = interleave(folder, commands, 1, warm_up=WARM_UP)
        check_equal(folder)
        for kind, taken in zip(KINDS, seconds, strict=True):
            ratios = [own / none for own, none in zip(taken, seconds[0], strict=True)]
            peak = rows(folder / kind)[-1]["peak_memory_gib"]
            print(
                f"micro-batch {micro_batch}, {kind:9}: time of a step / none {quartiles(ratios)}, "
                f"peak {peak:.2f} GiB"
            )


def peaks(micro_batch: int) -> dict[str, float]:
    """Peak GiB in use by kind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {kind: peak_in_use(folder / kind, *overrides(kind, micro_batch)) for kind in KINDS}
        check_equal(folder)
        parameters = json.loads((folder / "none" / "run.json").read_text())["parameters"]
    for kind, peak in found.items():
        print(f"micro-batch {micro_batch}, {kind:9}: peak in use {peak:.2f} GiB, "
              f"{peak / found['none']:.2f} of none; weights, gradients and moments are "
              f"{16 * parameters / 2**30:.2f} GiB of it")  # fmt: skip
    return found


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    step_times(args.micro_batch[0], args.rounds)
    found = {micro_batch: peaks(micro_batch) for micro_batch in args.micro_batch}
    low, high = min(found), max(found)
    for kind in KINDS if high > low else ():
        more = (found[high][kind] - found[low][kind]) / (high - low)
        print(f"{kind:9}: {more:.3f} GiB for each further sequence of the micro-batch")
    print("losses and norms were bit-equal")


if __name__ == "__main__":
    main()
