"""The two kernels of the chunked loss on a CPU, in pairs: its own (tiles) against whole rows.

    python benchmarks/loss.py [--width 256] [--tokens 1024] [--vocab 50304] [--rounds 6]

One forward pass with its gradients, fp32, one thread. Printed: CPU seconds, the median ratio to the
tiles of the same round, and the memory that one pass adds to its process at its peak.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from llmexp.models import rows
from llmexp.models.chunked import chunked_cross_entropy_sum
from llmexp.models.operands import Dtypes, How


def ways(tokens: int, width: int, vocab: int) -> dict[str, Callable[[], object]]:
    """Return one pass by each kernel, and by `F.cross_entropy` over all logits."""
    h_nd = torch.randn(1, tokens, width, requires_grad=True)
    weight_vd = (torch.randn(vocab, width) * 0.02).requires_grad_()
    targets_n = torch.randint(0, vocab, (1, tokens))
    how = How(targets_n[0], Dtypes.of(h_nd, weight_vd), needs=(True, True))

    def tiles() -> object:
        return chunked_cross_entropy_sum(h_nd, weight_vd, targets_n)

    def by_rows(count: int) -> Callable[[], object]:
        operands = h_nd.detach()[0], weight_vd.detach(), how
        return lambda: rows.nll_by_rows(*operands, count)

    def plain() -> object:
        logits_nv = torch.nn.functional.linear(h_nd[0], weight_vd)
        loss = torch.nn.functional.cross_entropy(logits_nv, targets_n[0], reduction="sum")
        return torch.autograd.grad(loss, (h_nd, weight_vd))

    return {"tiles": tiles, "plain": plain} | {f"rows {n}": by_rows(n) for n in (64, 256, 512)}


def peak_mib(name: str, sizes: tuple[int, int, int]) -> float:
    """Return what one pass adds to the memory of this process (Linux)."""
    torch.set_num_threads(1)
    run = ways(*sizes)[name]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak_kib()
    run()
    return (_peak_kib() - before) / 1024


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("tokens", 1024), ("width", 256), ("vocab", 50304), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (args.tokens, args.width, args.vocab)
    kernels = ways(*sizes)
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(args.rounds + 1):
        for name, run in kernels.items():
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    for name, found in seconds.items():
        ratios = [a / b for a, b in zip(found[1:], seconds["tiles"][1:], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(peak_mib, (name, sizes))
        figures = f"{statistics.median(found[1:]):6.3f} s  {statistics.median(ratios):.2f}"
        print(f"{name:9} {figures} ({spread})  {peak:5.0f} MiB")


if __name__ == "__main__":
    main()
