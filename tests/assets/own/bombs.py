"""Values that are not finite, planted into a layer: `hooks=[own.bombs.hook]`, FAULT_BOMB="KIND STEP
RANK"."""

import itertools
import os

import torch

LAYER = "blocks.1.mlp.up_proj"


def lay(kind, layer, after_call=0):
    """weight: one is nan. output: overflows (finite weights: a compiled layer too), or from the
    call after `after_call` on. gradient: likewise, on the way back. large: gradients whose norm
    overflows."""
    calls = itertools.count()

    def changed(module, inputs, output):
        if next(calls) < after_call:
            return None
        if kind == "output":
            return output * float("inf")
        output.register_hook(lambda gradient: gradient * float("nan"))
        return output.view_as(output)  # whose own gradient is finite

    weight = layer.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    with torch.no_grad():
        if kind == "weight":
            local.view(-1)[5] = float("nan")
        elif kind == "large":  # each entry is finite, the sum of their squares in float32 is not
            weight.register_hook(lambda g: torch.full_like(g, 1e25))
        elif kind == "output" and not after_call:
            local.fill_(3e38)
        else:
            layer.register_forward_hook(changed)


def hook(event, context):
    kind, *where = os.environ.get("FAULT_BOMB", " 0 0").split(" ")
    if event == "step_start" and where == [str(context.step), os.environ.get("RANK", "0")]:
        lay(kind, context.model.get_submodule(LAYER))
