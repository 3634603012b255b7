"""On a CUDA device: speed and memory of gpt2_small and llama_1b at length 1024 in bf16, as real
runs.

    python tests/benchmarks/bench_cuda.py [--out cuda.json] [--model gpt2_small] [--steps 30]
    [OVERRIDE ...]

Each run is a process of its own with a row every 5 steps; figures are medians over the rows after
the first 10 steps, in which kernels are compiled. Just before each run the rate of the device in
plain bf16 matrix products is measured. Writes everything raw as JSON and prints a table for
docs/internals/speed.md. Goals on one H200: 55 % of the measured matrix rate with compile, data wait
under 1 %. Where there is no CUDA device it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# Largest micro-batch that fits an H200 is no aim: past some 16k tokens the matrix products are as
# fast as they get.
MODELS = {"gpt2_small": 32, "llama_1b": 16}  # micro-batch
ACCUMULATION = 4
ROW_EVERY, WARM_UP = 5, 10  # steps


def matrix_rate(seconds: float = 2.0) -> float:
    """FLOP/s of products of 8192 x 8192 bf16 matrices, kept up for so long that clocks settle."""
    size = 8192
    a, b, out = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(products: int) -> float:
        start.record()
        for _ in range(products):
            torch.mm(a, b, out=out)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    timed(10)
    products = max(10, round(10 * seconds / timed(10)))
    return 2 * size**3 * products / timed(products)


def train(
    model: str, micro_batch: int, steps: int, compiled: bool, checkpointing: str, more: list[str]
) -> dict[str, Any]:
    """One real run; its rows and derived numbers, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable, "-m", "llmexp", "train", f"model={model}", "data=synthetic",
            "data.n_ids=null",
            "data.n_tokens=4000000", "batch.sequence_length=1024",
            f"batch.micro_batch_size={micro_batch}",
            f"batch.gradient_accumulation_steps={ACCUMULATION}", "precision=bf16",
            "train.device=cuda",
            f"train.max_steps={steps}", f"train.log_every={ROW_EVERY}", "train.eval_every=null",
            "train.eval_tokens=16384", "train.sample_tokens=0", "checkpoint.every=null",
            "tracker=none",
            f"train.compile={compiled}", f"parallelism.activation_checkpointing={checkpointing}",
            f"hydra.run.dir={run}", *more,
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        found: dict[str, Any] = {"command": command[3:], "exit_code": done.returncode}
        if done.returncode:
            return found | {"error": done.stderr[-2000:]}
        found["run"] = json.loads((run / "run.json").read_text())
        found["rows"] = [
            json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        return found


def figures(found: dict[str, Any], rate: float) -> dict[str, float]:
    """What the table shows of a run; `mfu` is absent where the device's peak is not known."""
    rows = [row for row in found["rows"] if row["step"] > WARM_UP]

    def median(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    shown = {
        "tokens_per_sec": median("tokens_per_sec"),
        "of_matrix_rate": found["run"]["flops_per_token"] * median("tokens_per_sec") / rate,
        "data_wait": statistics.median(row["data_time"] / row["step_time"] for row in rows),
        "peak_memory_gib": rows[-1]["peak_memory_gib"],
    }
    return shown | ({"mfu": median("mfu")} if "mfu" in rows[-1] else {})


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


def line(case: dict[str, Any]) -> str:
    """A row of the table."""
    name = (
        f"| {case['model']} | {case['micro_batch']} x {ACCUMULATION} | "
        f"{'on' if case['compile'] else 'off'} "
    )
    name += f"| {case['activation_checkpointing']} |"
    if "figures" not in case:
        short = "out of memory" if "out of memory" in case["error"] else "failed, see the JSON"
        return f"{name} {short} | | | | |"
    f = case["figures"]
    mfu = f"{f['mfu']:.1%}" if "mfu" in f else ""
    return (
        f"{name} {f['tokens_per_sec']:,.0f} | {mfu} | {f['of_matrix_rate']:.1%} | "
        f"{f['data_wait']:.2%} | {f['peak_memory_gib']:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="cuda.json")
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--micro-batch", type=int, help="another one than for an H200")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("override", nargs="*", help="for all runs, such as model.vocab_size=50304")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_cuda: no CUDA device is visible; nothing was measured")
        return
    if args.steps < WARM_UP + ROW_EVERY:
        parser.error(f"--steps {args.steps}: at least {WARM_UP + ROW_EVERY} are needed")
    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver(), "python": sys.version.split()[0],
        "date": datetime.date.today().isoformat(),
        "products": "bf16 8192 x 8192",
    }  # fmt: skip
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print("\n| model | micro-batch x accumulation | compile | checkpointing | tokens/s | MFU | of "
          "the matrix rate "
          "| data wait | peak GiB |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    cases: list[dict[str, Any]] = []
    for model, compiled, kind in itertools.product(
        [args.model] if args.model else MODELS, (False, True), ("none", "full")
    ):
        micro_batch, rate = args.micro_batch or MODELS[model], matrix_rate()
        torch.cuda.empty_cache()
        case = {
            "model": model, "micro_batch": micro_batch, "compile": compiled,
            "activation_checkpointing": kind,
            "matrix_flops_per_sec": rate,
        } | train(model, micro_batch, args.steps, compiled, kind, args.override)  # fmt: skip
        if case["exit_code"] == 0:
            case["figures"] = figures(case, rate)
        cases.append(case)
        print(line(case), flush=True)
        # what there is, if it is cut short
        Path(args.out).write_text(json.dumps({**about, "cases": cases}, indent=1))
    rates = [case["matrix_flops_per_sec"] / 1e12 for case in cases]
    print(
        f"\nbf16 matrix rate: {min(rates):.0f} to {max(rates):.0f} TFLOP/s; raw figures in "
        f"{args.out}"
    )


if __name__ == "__main__":
    main()
