"""CPU time of a micro-batch with a document mask over one without, at length 1024.

    python tests/benchmarks/bench_documents.py [--rounds 15] [--threads 1]

Forward and backward pass of 2 x 1024 tokens, fp32, by turns in one process. A document has from
half the mean length to one and a half. `spans`: attended to one by one, what a CPU does unless
they are very short; `mask`: all at once under a bool mask, as where blocks are compiled one by one.
Printed: medians and quartiles of the ratio (goal: at most 1.10).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from llmexp.models.loss import WindowLoss

LENGTH, ROWS, END = 1024, 2, 319
CASES = (("spans", 300), ("spans", 700), ("spans", 40), ("spans", 20), ("mask", 300))


def model_of(kind: str) -> nn.Module:
    if kind == "gpt_tiny":
        return GPT2(END + 1, LENGTH, n_layers=4, n_heads=4, d_model=128, d_ff=512)
    return Llama(END + 1, LENGTH, n_layers=2, n_heads=4, n_kv_heads=2, d_model=256, d_ff=688)


def window(mean: int) -> Tensor:
    tokens_bt = torch.randint(0, END, (ROWS, LENGTH))
    for row in tokens_bt:
        at = random.randint(0, mean)
        while at < LENGTH:
            row[at] = END
            at += random.randint(mean // 2, 3 * mean // 2)
    return tokens_bt


def seconds(loss: WindowLoss, tokens_bt: Tensor, end: int | None) -> float:
    loss.model.document_end = end
    targets_bt = tokens_bt.roll(-1, dims=1)
    start = time.process_time()
    loss(tokens_bt, targets_bt).backward()
    took = time.process_time() - start
    loss.zero_grad()
    return took


def ratios(kind: str, form: str, mean: int, rounds: int) -> list[float]:
    loss, found = WindowLoss(model_of(kind)), []
    loss.model.document_spans = form == "spans"
    for _ in range(rounds + 1):
        tokens_bt = window(mean)
        without = seconds(loss, tokens_bt, None)
        found.append(seconds(loss, tokens_bt, END) / without)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    random.seed(0)
    print(f"{'model':9} {'mean document':>13}  {'form':5} {'with / without':>14}  quartiles")
    for kind in ("gpt_tiny", "llama"):
        for form, mean in CASES:
            low, middle, high = statistics.quantiles(ratios(kind, form, mean, arguments.rounds))
            print(
                f"{kind:9} {mean:>13}  {form:5} {middle:>14.3f}  {low:.3f} to {high:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
