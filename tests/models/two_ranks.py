"""Two processes with gloo between them, and what they are compared with: `python -m
tests.models.two_ranks FOLDER RANK`."""

import datetime
import functools
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmexp.models.chunked import chunked_cross_entropy_sum
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from llmexp.models.loss import WindowLoss
from llmexp.models.operands import VocabShard
from llmexp.models.sampling import generate

SIZES = (1100, 64, 5000)  # n, d, v: three chunks of rows, and on each of two ranks two tiles
KINDS = {
    "fp64": (torch.float64, 0.4),
    "fp32": (torch.float32, 0.4),
    "bf16": (torch.float32, 0.02),
}  # dtype, std


def leaves(n: int, d: int, v: int, std: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    h = torch.randn(1, n, d, dtype=dtype).requires_grad_()
    return h, (torch.randn(v, d, dtype=dtype) * std).requires_grad_()


def tiny(tied_head: bool = True) -> Llama:
    torch.manual_seed(7)
    return Llama(50, 16, 2, 4, 2, 16, 32, tied_head=tied_head)


def split_case(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype, std = KINDS[kind]
    torch.manual_seed(12)
    h, weight = leaves(*SIZES, std, dtype)
    targets = torch.randint(0, SIZES[2], (1, SIZES[0]))
    return h, weight, targets.masked_fill(torch.rand(1, SIZES[0]) < 0.2, -100)


def split_model(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(13)
    model = GPT2(50, 16, 2, 2, 16, 32) if name == "tied" else tiny(tied_head=False)
    tokens, targets = torch.randint(0, 50, (2, 3, 16))
    return model.double(), tokens, targets.masked_fill(torch.rand(3, 16) < 0.3, -100)


def text_of(module: nn.Module) -> list[int]:
    return list(
        generate(module, [3, 1], 5, 1.0, 10, torch.Generator().manual_seed(0), context_length=16)
    )


def gloo_rank(rank: int, folder: str) -> None:
    """Save what one of two processes finds as `folder`/`rank`.pt."""
    # slow to import: not by the tests that import this file
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import parallel as tp

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    reduced: list[tuple[str, int]] = []

    def reduce(name: str, value: Tensor) -> Tensor:
        reduced.append((name, value.numel()))
        dist.all_reduce(value, getattr(dist.ReduceOp, name))
        return value

    def gather(value: Tensor) -> Tensor:
        parts = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(parts, value)
        return torch.cat(parts, -1)

    def shard_of(size: int) -> VocabShard:
        by = functools.partial
        return VocabShard(rank * size // 2, size, by(reduce, "SUM"), by(reduce, "MAX"), gather)

    found: dict = {}
    shard = shard_of(SIZES[2])
    for kind in KINDS:
        h, weight, targets = split_case(kind)
        part = weight.detach()[shard.first : shard.first + SIZES[2] // 2].requires_grad_()
        reduced.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"):
            nll = chunked_cross_entropy_sum(h, part, targets, shard)
        nll.backward()
        found[kind] = nll.detach(), h.grad, part.grad
        found["reduced"] = list(reduced)

    with torch.no_grad():
        reduced.clear()
        chunked_cross_entropy_sum(h, part, targets, shard)
        found["reduced without gradients"] = list(reduced)
        outside = targets.clone()
        outside[0, -1] = SIZES[2]
        found["outside"] = chunked_cross_entropy_sum(h, part, outside, shard)
        part[70, 3] = math.nan if rank else 0.0
        found["nan on rank 1"] = chunked_cross_entropy_sum(h, part, targets, shard)

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for name in ("tied", "untied"):
        model, tokens, targets = split_model(name)
        # Rows of the table, which is a tied model's head, or rows of the head.
        rows = tp.ColwiseParallel()
        if name == "tied":
            rows = tp.RowwiseParallel(input_layouts=Replicate())
        tp.parallelize_module(model, mesh, {"token_embedding" if name == "tied" else "head": rows})
        window_loss = WindowLoss(model)
        window_loss.share_vocabulary(shard_of(50))
        nll = window_loss(tokens, targets)
        nll.backward()
        gradients = [p.grad for p in model.parameters()]
        found[name] = {
            "split": sum(isinstance(g, DTensor) for g in gradients),
            "nll": nll.detach(),
            "gradients": [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients],
            "logits": window_loss(tokens),
            "text": text_of(window_loss),
            "kernel": window_loss.loss_kernel(torch.device("cpu")),
        }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    gloo_rank(int(sys.argv[2]), sys.argv[1])
