"""Tokens between the products of tensor parallelism, spread over its ranks in training.

Norms, dropout and residuals are then computed for a rank's part of each sequence (Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models"). Names end in their
dimensions: b batch, t time (tokens), s a rank's part of them, n rows, d and f widths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmexp.models.operands import Spread, autocast_dtype

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def share_tokens(tensor: DeviceMesh, model: nn.Module, by_row: tuple[str, ...]) -> None:
    """Let ranks of a model split by tensor parallelism each have their tokens between products."""
    from torch.distributed.tensor import Replicate, Shard

    # gradients go the other way: what is whole on all ranks has one that is whole
    spread = Spread(
        part=lambda x_btd: _moved(tensor, x_btd, Replicate(), Shard(1)),
        whole=functools.partial(_gathered, tensor),
        products=functools.partial(_products, tensor),
    )
    for name, module in model.named_modules():
        if hasattr(module, "spread"):
            module.spread = spread
        if name.endswith(by_row):
            module.register_forward_hook(_as_one)


def _as_one(module: nn.Module, inputs: Any, output: Any) -> Tensor:
    """Sum the outputs of a layer that is split by row: a rank's tokens in training, else all.

    It is a forward hook.
    """
    from torch.distributed.tensor import Replicate, Shard

    found: Tensor = output.redistribute(
        placements=[Shard(1) if module.training else Replicate()]
    ).to_local()
    return found


def _moved(tensor: DeviceMesh, x: Tensor, now: Placement, wanted: Placement) -> Tensor:
    from torch.distributed.tensor import DTensor

    held = DTensor.from_local(x, tensor, [now], run_check=False)
    return held.redistribute(placements=[wanted]).to_local()


def _gathered(tensor: DeviceMesh, x_bsd: Tensor) -> Tensor:
    from torch.distributed.tensor import Replicate, Shard

    return _moved(tensor, x_bsd, Shard(1), Replicate())


def _products(tensor: DeviceMesh, x_bsd: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """Return the outputs (b, t, f) of layers whose rows this rank has, for the tokens of all."""
    parts: list[Any] = [p for linear in linears for p in (linear.weight, linear.bias)]
    held = [None if p is None else autocast_dtype(p.to_local()) for p in parts]
    return list(_Products.apply(tensor, autocast_dtype(x_bsd), *held))


class _Products(torch.autograd.Function):
    """Linear layers of all ranks' tokens, which are gathered again for the gradients.

    So that a rank keeps its own tokens alone. The ranks' parts of the gradient by the tokens are
    added in fp32 (fp64 in fp64).
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: DeviceMesh, x_bsd: Tensor, *held: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = held[::2], held[1::2]
        ctx.save_for_backward(x_bsd, *weights)
        ctx.tensor, ctx.biased = tensor, [bias is not None for bias in biases]
        x_btd = _gathered(tensor, x_bsd)
        pairs: Any = zip(weights, biases, strict=True)
        return tuple(nn.functional.linear(x_btd, *pair) for pair in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        from torch.distributed.tensor import Partial, Shard

        x_bsd, *weights = ctx.saved_tensors
        x_nd = _gathered(ctx.tensor, x_bsd).flatten(0, 1)
        sums = torch.promote_types(x_bsd.dtype, torch.float32)
        held, parts = list[Tensor | None](), []
        for gradient_btf, weight_fd, biased in zip(gradients, weights, ctx.biased, strict=True):
            gradient_nf = gradient_btf.flatten(0, 1)
            held += [gradient_nf.T @ x_nd, gradient_nf.sum(0) if biased else None]
            parts.append((gradient_btf @ weight_fd).to(sums))
        own = _moved(ctx.tensor, functools.reduce(torch.add, parts), Partial(), Shard(1))
        return None, own.to(x_bsd.dtype), *held
