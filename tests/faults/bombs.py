"""A user's hook that plants values that are not finite into a layer: FAULT_BOMB="KIND STEP
RANKS"."""

import os
from typing import Any

import torch
from torch import Tensor, nn

LAYER = "blocks.1.mlp.up_proj"


class NoGradient(torch.autograd.Function):
    """Changes nothing on the way there, and everything on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


def lay(kind: str, layer: nn.Module, after_call: int = 0) -> None:
    """weight: one is nan. output: overflows (finite weights: a compiled layer too), or from the
    call after `after_call` on. gradient: likewise, on the way back. large: gradients whose norm
    overflows."""
    weight: Any = layer.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    calls = 0

    def changed(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        nonlocal calls
        calls += 1
        if calls <= after_call:
            return None
        return NoGradient.apply(output) if kind == "gradient" else output * float("inf")

    with torch.no_grad():
        if kind == "weight":
            local.view(-1)[5] = float("nan")
        elif kind == "large":  # each entry is finite, the sum of their squares in float32 is not
            layer.weight.register_hook(lambda g: torch.full_like(g, 1e25))
        elif kind == "output" and not after_call:
            local.fill_(3e38)
        else:
            layer.register_forward_hook(changed)


def hook(event: str, context: Any) -> None:
    kind, step, ranks = os.environ.get("FAULT_BOMB", " 0 ").split(" ")
    if (event, context.step) == ("step_start", int(step)) and os.environ.get(
        "RANK", "0"
    ) in ranks.split(","):
        lay(kind, context.model.get_submodule(LAYER))
