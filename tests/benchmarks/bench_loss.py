"""Time and memory of the loss end beside a bare cross-entropy over whole logits.

Usage: python tests/benchmarks/bench_loss.py [--device cuda] [--rounds 5] [--threads 2] bf16 is left
out on a CPU without its instructions, where a step takes minutes; --precision bf16 asks for it.

One forward and backward pass of a model of 4 layers, width 256, on 4 x 256 tokens. "bare" is
`F.cross_entropy(model(x).view(-1, V), y)` over the same model, under autocast for bf16. Times are
medians of runs that take turns; peak memory is of one process each: resident size on a CPU,
allocated on a GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from llmexp.models.gpt2 import GPT2
from llmexp.models.loss import WindowLoss

WAYS = ("bare", "plain", "chunked")


def make_step(
    way: str, vocab_size: int, precision: str, arguments: argparse.Namespace
) -> Callable[[], None]:
    """A function that runs one forward and backward pass, gradients freed first."""
    torch.manual_seed(0)
    width = arguments.width
    with torch.device(arguments.device):
        model = GPT2(
            vocab_size, arguments.length, arguments.layers, width // 64, width, 4 * width, 0.0
        )
        shape = (arguments.batch, arguments.length)
        tokens_bt = torch.randint(0, vocab_size, shape)
        targets_bt = torch.randint(0, vocab_size, shape)
    loss_fn = None if way == "bare" else WindowLoss(model, kernel=way)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(arguments.device, dtype=torch.bfloat16, enabled=precision == "bf16"):
            if loss_fn is None:
                loss = F.cross_entropy(model(tokens_bt).view(-1, vocab_size), targets_bt.view(-1))
            else:
                loss = loss_fn(tokens_bt, targets_bt) / targets_bt.numel()
        loss.backward()
        if arguments.device == "cuda":
            torch.cuda.synchronize()

    return step


def peak_memory_mib(
    way: str, vocab_size: int, precision: str, arguments: argparse.Namespace
) -> float:
    """Peak memory of three steps in a process of their own."""
    own = ["--peak", way, str(vocab_size), precision]
    out = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], *own], capture_output=True, text=True
    )
    if out.returncode:
        raise RuntimeError(out.stderr)
    return float(out.stdout)


def print_peak(way: str, vocab_size: str, precision: str, arguments: argparse.Namespace) -> None:
    step = make_step(way, int(vocab_size), precision, arguments)
    for _ in range(3):
        step()
    if arguments.device == "cuda":
        print(torch.cuda.max_memory_allocated() / 2**20)
    else:
        # Not getrusage: its figure starts from that of the parent process.
        status = Path("/proc/self/status").read_text()
        print(int(status.split("VmHWM:")[1].split()[0]) / 2**10)


def no_bf16_instructions() -> bool:
    return not torch.cuda.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    bf16 = [] if no_bf16_instructions() else ["bf16"]
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", *bf16])
    parser.add_argument("--vocab", type=int, nargs="+", default=[320, 50304])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument(
        "--peak", nargs=3, metavar=("WAY", "VOCAB", "PRECISION"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print_peak(*arguments.peak, arguments)
        return
    print(
        f"{'vocab':>7} {'precision':>9} {'way':>8} {'ms':>8} {'bare/way':>8} {'peak MiB':>8} "
        f"{'way/bare':>8}"
    )
    for vocab_size in arguments.vocab:
        for precision in arguments.precision:
            steps = {way: make_step(way, vocab_size, precision, arguments) for way in WAYS}
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for round_ in range(arguments.rounds + 1):
                for way, step in random.sample(list(steps.items()), len(steps)):
                    start = time.perf_counter()
                    step()
                    if round_:
                        seconds[way].append(time.perf_counter() - start)
            times = {way: statistics.median(values) for way, values in seconds.items()}
            del steps
            peaks = {way: peak_memory_mib(way, vocab_size, precision, arguments) for way in WAYS}
            for way in WAYS:
                print(
                    f"{vocab_size:7d} {precision:>9} {way:>8} {times[way] * 1e3:8.1f} "
                    f"{times['bare'] / times[way]:8.2f} {peaks[way]:8.0f} "
                    f"{peaks[way] / peaks['bare']:8.2f}"
                )


if __name__ == "__main__":
    main()
