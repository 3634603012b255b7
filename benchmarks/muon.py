"""Muon's update over several gloo ranks: torch's, where each rank does all the work, against ours,
where each does its share. In pairs, in turns, on the matrices of GPT-2 small's blocks.

    python benchmarks/muon.py [ddp|fsdp] [--ranks 2] [--blocks 2] [--rounds 15]

A rank has one thread. Printed are medians of the pairs: seconds of wall and processor time of an
update on rank 0, and torch's over ours with its quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

SHAPES = [(768, 768)] * 4 + [(3072, 768), (768, 3072)]


def matrices(kind: str, blocks: int, mesh: Any) -> list[nn.Parameter]:
    """Matrices with gradients, the same on all ranks or split over them by rows."""
    from torch.distributed.tensor import Shard, distribute_tensor

    generator, found = torch.Generator().manual_seed(0), []
    for shape in SHAPES * blocks:
        values = [torch.randn(shape, generator=generator) for _ in range(2)]
        if kind == "fsdp":
            values = [distribute_tensor(value, mesh, [Shard(0)]) for value in values]
        found.append(nn.Parameter(values[0]))
        found[-1].grad = values[1]
    return found


def rank(kind: str, blocks: int, rounds: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from llmexp.optim.optimizers.muon import Muon

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    knobs: dict[str, Any] = {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}
    held = [matrices(kind, blocks, mesh) for _ in range(2)]
    pair = [torch.optim.Muon(held[0], **knobs), Muon(held[1], "jordan", **knobs)]
    seconds: list[list[tuple[float, float]]] = [[], []]
    for number in range(2 * rounds + 2):
        dist.barrier()
        begin = time.perf_counter(), time.process_time()
        pair[number % 2].step()
        taken = time.perf_counter() - begin[0], time.process_time() - begin[1]
        seconds[number % 2].append(taken)
    if dist.get_rank() == 0:
        for what, place in (("wall", 0), ("processor", 1)):
            theirs, ours = ([one[place] for one in each[1:]] for each in seconds)
            low, middle, high = statistics.quantiles(
                [a / b for a, b in zip(theirs, ours, strict=True)], n=4
            )
            medians = f"{statistics.median(theirs):.3f} s, ours {statistics.median(ours):.3f} s"
            print(f"{what}: torch's {medians}, ratio {middle:.2f} ({low:.2f} to {high:.2f})")
        wrong = max(float((a - b).abs().max()) for a, b in zip(*map(_whole, held), strict=True))
        print(f"largest difference of a weight after {rounds + 1} updates: {wrong:.1e}")
    else:
        [_whole(each) for each in held]
    dist.destroy_process_group()


def _whole(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in parameters]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", nargs="?", default="ddp", choices=("ddp", "fsdp"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank(args.kind, args.blocks, args.rounds)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={args.ranks}", __file__, *sys.argv[1:]]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
