"""Time of `llmexp compare` over many runs: reading and table, then the page.

    python tests/benchmarks/bench_compare.py [--runs 200] [--rows 10000] [--no-page] [--keep FOLDER]

Makes the runs (each row as a training writes it: 22 keys, 620 bytes; an evaluation every 100 rows),
then starts the command as a user does. Goals: 200 runs x 10,000 rows in under 10 s, the page under
12 MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.compare.synthetic import make_run  # noqa: E402

REST = {
    "lr": 0.0005871607054625496, "grad_norm": 2.777172088623047,
    "grad_norm_post_clip": 0.9999996423721313,
    "weight_norm": 37.31863021850586, "skipped": False, "skipped_steps": 0, "target_tokens": 1024,
    "clipped_share": 1.0,
    "clip_coefficient": 0.36007881, "noise_scale": 12.123456789123, "step_time": 0.576086450400544,
    "data_time": 0.006293245699635008, "tokens_per_sec": 1777.5109955945477,
    "peak_memory_gib": 0.3813819885253906,
    "tokens_per_sec_per_rank": 1777.5109955945477, "tflops_per_sec_per_rank": 0.010222081793289196,
    "amp": 0,
    "eta": 5.76086450400544,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--no-page", action="store_true")
    parser.add_argument(
        "--keep", type=Path, help="folder that holds the runs, made where it is missing"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary) / "sweep"
        if not folder.is_dir():
            make(folder, args.runs, args.rows)
        size = sum(p.stat().st_size for p in folder.rglob("metrics.jsonl"))
        print(f"{args.runs} runs x {args.rows:,} rows, {size / 1e6:,.0f} MB", flush=True)
        print(f"table {timed(['compare', str(folder)]):.1f} s", flush=True)
        if not args.no_page:
            page = Path(temporary) / "page.html"
            seconds = timed(["compare", str(folder), "--html", str(page)])
            print(f"page {seconds:.1f} s, {page.stat().st_size / 1e6:.1f} MB")


def make(folder: Path, runs: int, rows: int) -> None:
    rest = json.dumps(REST, separators=(",", ":"))[1:]
    for number in range(runs):
        lr = 1e-4 * (number + 1)
        path = make_run(
            folder / f"{number}-lr_{lr:.4f}", steps=20, max_norm=1 + number % 10, train__lr=lr
        )
        losses = (
            2.5
            + np.exp(-np.arange(rows) / 2000)
            + 0.05 * np.random.default_rng(number).standard_normal(rows)
        )
        with open(path / "metrics.jsonl", "w", encoding="utf-8") as f:
            for i, loss in enumerate(losses, 1):
                val = (
                    f'"val/loss":{loss + 0.1},"val/ppl":20.5,"val/bits_per_byte":{loss * 1.44},'
                    if i % 100 == 0
                    else ""
                )
                f.write(
                    f'{{"step":{i},"tokens_seen":{i * 1024},"epoch":{i / 85199},"train/loss":{loss},{val}{rest}\n'  # noqa: E501
                )


def timed(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "llmexp", *arguments],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
