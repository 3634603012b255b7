"""Two ranks: a run under DDP against a bare loop under torchrun; FSDP communicating once a step or
more often.

    python benchmarks/ranks.py [ddp|fsdp] [--rounds 40] [--tracker wandb]

The two jobs of a pair are there at the same time and take turns, step by step, so that both see the
same machine: whose turn it is not waits in a read. The runs are real ones, with rows, console and
checks on and a row at each step. One thread a rank. Goal: bare time / run time under DDP at least
0.9.

Memory on a CPU is what glibc's heap makes of it: freed blocks stay there, in pieces that fit
nothing. So peaks are also taken from runs in which every larger block goes back to the system at
once, which is what was in use (and is slower).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RANKS = 2
WARM_UP = 4  # steps
SIZES = {
    "n_layers": 4,
    "d_model": 256,
    "n_heads": 4,
    "d_ff": 1024,
    "max_position_embeddings": 256,
    "vocab_size": 320,
}
MICRO_BATCH = 4


class Turns:
    """A rank's part in a ring of jobs that compute one after another. Each has a pipe for each
    rank; a byte says go.

    Ranks of the same number hand on to each other. $TURNS has the folder, the number of this job,
    and that of all.
    """

    def __init__(self) -> None:
        folder, job, jobs = os.environ["TURNS"].split(":")
        rank, after = os.environ.get("RANK", "0"), (int(job) + 1) % int(jobs)
        self._mine = os.open(f"{folder}/go-{job}-{rank}", os.O_RDONLY)
        self._next = os.open(f"{folder}/go-{after}-{rank}", os.O_WRONLY)
        self._seconds = open(f"{folder}/seconds-{job}-{rank}", "w", buffering=1)  # noqa: SIM115
        self._begin = 0.0

    def wait(self) -> None:
        os.read(self._mine, 1)
        self._begin = time.perf_counter()

    def pass_on(self) -> None:
        print(time.perf_counter() - self._begin, file=self._seconds)
        os.write(self._next, b"x")


turns: Turns | None = None


def take_turns(event: str, context: Any) -> None:
    """Take turns as a hook, each from one start of a step to the next, row and all."""
    global turns
    turns = turns or Turns()
    if event == "step_start":
        if context.step > 1:
            turns.pass_on()
        turns.wait()
    elif event == "step_end" and context.step == context.run.max_steps:
        turns.pass_on()


received: Any = None


def count_bytes(event: str, context: Any) -> dict[str, float] | None:
    """Write as a hook what this rank receives from others in step 2 into its row."""
    global received
    if context.step == 2 and event == "step_start":
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        class Received(TorchDispatchMode):
            total = 0

            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if (
                    func.namespace == "c10d"
                ):  # of whole buffers: the result of a gather, the source of a reduction
                    whole = max(
                        t.nbytes
                        for t in torch.utils._pytree.tree_leaves(args)
                        if isinstance(t, torch.Tensor)
                    )
                    times = 2 if "allreduce" in str(func) else 1
                    self.total += times * whole * (RANKS - 1) // RANKS
                return func(*args, **(kwargs or {}))

        received = Received()
        received.__enter__()
    elif context.step == 2 and event == "step_end":
        received.__exit__(None, None, None)
        return {"received_mib": received.total / 2**20}
    return None


def bare(accumulation: int, steps: int) -> None:
    """Train as people write it by hand and start with torchrun: nanoGPT's loop."""
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from llmexp.models.gpt2 import GPT2

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    length = SIZES["max_position_embeddings"]
    model = torch.nn.parallel.DistributedDataParallel(GPT2(**SIZES))
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    data = np.random.default_rng(dist.get_rank()).integers(0, 64, 200_000).astype(np.uint16)
    turns = Turns()
    for _ in range(steps):
        turns.wait()
        for micro_step in range(accumulation):
            at = np.random.randint(0, len(data) - length - 1, MICRO_BATCH)
            x = torch.stack([torch.from_numpy(data[i : i + length].astype(np.int64)) for i in at])
            y = torch.stack(
                [torch.from_numpy(data[i + 1 : i + length + 1].astype(np.int64)) for i in at]
            )
            model.require_backward_grad_sync = micro_step == accumulation - 1
            logits = model(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
            (loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.pass_on()
    sys.stdout.flush()
    os._exit(0)  # gloo may abort at exit otherwise


def environment() -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    paths = f"{HERE}:{HERE.parent}"
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": threads, "WANDB_MODE": "offline"}


def interleave(
    folder: Path, commands: Sequence[list[str]], ranks: int, *, warm_up: int = WARM_UP
) -> list[list[float]]:
    """Run the commands at the same time, one step of each in turn; the seconds of each job's
    steps, mean of its ranks, without the first `warm_up` and the last one. Raises RuntimeError when
    one fails."""
    pipes = []
    for job in range(len(commands)):
        for rank in range(ranks):
            os.mkfifo(folder / f"go-{job}-{rank}")
            # so that nobody has to wait for an opener
            pipes.append(os.open(folder / f"go-{job}-{rank}", os.O_RDWR))
    with contextlib.ExitStack() as stack:
        processes, logs = [], []
        for job, command in enumerate(commands):
            logs.append(folder / f"log-{job}")
            out = stack.enter_context(open(logs[-1], "w"))
            turn = {"TURNS": f"{folder}:{job}:{len(commands)}"}
            process = subprocess.Popen(
                command, cwd=folder, env=environment() | turn, stdout=out, stderr=out
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.terminate)
        for pipe in pipes[:ranks]:
            os.write(pipe, b"x")
        while any(process.poll() is None for process in processes):
            for process, log in zip(processes, logs, strict=True):
                if process.poll():
                    raise RuntimeError(f"{' '.join(process.args)}\n{log.read_text()[-3000:]}")  # type: ignore[arg-type]
            time.sleep(1)
    for pipe in pipes:
        os.close(pipe)
    found = []
    for job in range(len(commands)):
        by_rank = [
            map(float, (folder / f"seconds-{job}-{rank}").read_text().split())
            for rank in range(ranks)
        ]
        found.append([statistics.mean(step) for step in zip(*by_rank, strict=True)][warm_up:-1])
    return found


def llmexp(run: Path, steps: int, *overrides: str, hooks: str = "ranks.take_turns") -> list[str]:
    """Return the command line of a real run with a row at each step."""
    return [
        sys.executable, "-m", "llmexp", "train", "--allow", "ranks", f"hooks=[{hooks}]",
        f"hydra.run.dir={run}",
        "data=synthetic", "precision=fp32", f"train.max_steps={steps}", "train.log_every=1",
        "train.eval_every=null",
        "train.eval_tokens=1024", "train.sample_tokens=0", "checkpoint.every=null", "tracker=none",
        *overrides,
    ]  # fmt: skip


def peak_in_use(run: Path, *overrides: str) -> float:
    """Peak GiB of the largest rank of a run on its own, in which freed memory does not stay on the
    heap."""
    # from its second step on a run has all that it ever has
    command = llmexp(run, 2, *overrides, hooks="")
    given_back = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}  # bytes
    subprocess.run(command, env=environment() | given_back, check=True, stdout=subprocess.DEVNULL)
    return rows(run)[-1]["peak_memory_gib"]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def quartiles(ratios: Sequence[float]) -> str:
    if len(ratios) < 2:
        return f"{ratios[0]:.3f} (once)"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def bench_ddp(rounds: int, tracker: str) -> None:
    print("DDP: bare time / run time per step, median (quartiles), goal 0.90")
    for accumulation in (1, 4):
        with tempfile.TemporaryDirectory() as name:
            folder, steps = Path(name), WARM_UP + rounds + 1
            run = llmexp(
                folder / "run", steps, "parallelism=ddp", f"parallelism.nproc_per_node={RANKS}",
                *(f"model.{key}={value}" for key, value in SIZES.items()),
                "batch.sequence_length=256",
                f"batch.micro_batch_size={MICRO_BATCH}",
                f"batch.gradient_accumulation_steps={accumulation}",
                f"tracker={tracker}",
            )  # fmt: skip
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={RANKS}",
            ]
            by_hand = [
                *torchrun,
                __file__,
                "bare",
                "--accumulation",
                str(accumulation),
                "--rounds",
                str(steps),
            ]
            run_s, bare_s = interleave(folder, [run, by_hand], RANKS)
        ratios = [b / r for b, r in zip(bare_s, run_s, strict=True)]
        tokens = RANKS * accumulation * MICRO_BATCH * 256
        rates = [tokens / statistics.median(s) for s in (run_s, bare_s)]
        print(
            f"  accumulation {accumulation}: {quartiles(ratios)}; tokens/s run {rates[0]:,.0f}, "
            f"bare {rates[1]:,.0f}"
        )


def bench_fsdp(rounds: int) -> None:
    ways = ("once", "every_micro_batch")
    print("FSDP: time of a step, peak of a rank, peak in use, received by a rank in a step")
    for accumulation in (4, 8):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            overrides = {
                way: [
                    "model=llama_100m", "model.n_layers=6", "parallelism=fsdp",
                    f"parallelism.nproc_per_node={RANKS}",
                    "batch.sequence_length=128", "batch.micro_batch_size=1",
                    f"parallelism.fsdp_communication={way}",
                    f"batch.gradient_accumulation_steps={accumulation}",
                ]
                for way in ways
            }  # fmt: skip
            hooks = "ranks.take_turns,ranks.count_bytes"
            commands = [
                llmexp(folder / way, WARM_UP + rounds + 1, *overrides[way], hooks=hooks)
                for way in ways
            ]
            seconds = interleave(folder, commands, RANKS)
            for way, taken in zip(ways, seconds, strict=True):
                last, mib = rows(folder / way)[-1], rows(folder / way)[1]["received_mib"]
                in_use = peak_in_use(folder / f"{way}-in-use", *overrides[way])
                print(f"  accumulation {accumulation}, {way:17}: {statistics.median(taken):6.2f} "
                      f"s, {last['peak_memory_gib']:.2f} GiB, {in_use:.2f} GiB in use, {mib:,.0f} "
                      "MiB")  # fmt: skip
            ratios = [once / every for once, every in zip(*seconds, strict=True)]
            print(
                f"  accumulation {accumulation}: time once / every_micro_batch {quartiles(ratios)}"
            )


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "case",
        nargs="?",
        choices=("ddp", "fsdp", "bare"),
        help="bare: what torchrun starts for ddp",
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tracker", choices=("none", "wandb"), default="none")
    parser.add_argument("--accumulation", type=int, default=1, help="of bare")
    args = parser.parse_args()
    if args.case == "bare":
        return bare(args.accumulation, args.rounds)
    if args.case in (None, "ddp"):
        bench_ddp(args.rounds, args.tracker)
    if args.case in (None, "fsdp"):
        bench_fsdp(args.rounds)


if __name__ == "__main__":
    main()
