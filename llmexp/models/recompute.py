"""Activation checkpointing: the backward pass computes a block's activations again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from llmexp.models.loss import blocks_of

# `selective` keeps products, and attention without dropout, which cost most to compute again; so
# do the operations of our own. All else is a matter of memory.
_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def recompute_blocks(model: nn.Module, kind: str) -> None:
    """Make each block keep its inputs only ("full"), or also products and attention ("selective").

    "full" is by Chen et al. 2016. The blocks' forward functions are replaced in place, so that
    parameters keep their names. Dropout draws the same numbers again, and losses stay bit-equal. A
    block that runs again finds its buffers as they were, and what it then does to them is dropped.
    """
    more: dict[str, Any] = {}
    if kind == "selective":
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_products)
    for block in blocks_of(model):
        block.forward = _recomputed(block, block.forward, more)


def recomputed_share(make: Callable[[], nn.Module], kind: str, length: int) -> float:
    """Return the FLOPs that the backward pass computes again, as a share of a step's.

    The step is one without recomputation. They are counted on a model without memory, of which
    `make` makes one each time.
    """
    counted = []
    for again in (False, True):
        with torch.device("meta"):
            model, tokens_bt = make(), torch.zeros(1, length, dtype=torch.int64)
        if again:
            recompute_blocks(model, kind)
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            model(tokens_bt).sum().backward()
        counted.append(counter.get_total_flops())
    return counted[1] / counted[0] - 1


def _recomputed(
    block: nn.Module, forward: Callable[..., Any], more: dict[str, Any]
) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        run = forward
        # a compiler computes activations again, and no buffers
        if not torch.compiler.is_compiling() and any(m._buffers for m in block.modules()):
            run = _with_buffers(block, forward)
        return checkpoint(run, *args, use_reentrant=False, **more, **kwargs)

    return checkpointed


def _with_buffers(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward function that leaves buffers alone from its second call on.

    They are then copies of what they were before the first one.
    """
    held, begun = [module._buffers for module in block.modules()], list[dict[str, Any]]()

    def put(given: list[dict[str, Any]]) -> None:
        for buffers, values in zip(held, given, strict=True):
            buffers.update(values)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not begun:
            begun.extend(_copies(held))
            return forward(*args, **kwargs)
        now = list(map(dict, held))
        put(_copies(begun))
        try:
            return forward(*args, **kwargs)
        finally:  # activations refer to the copies, so these are not changed
            put(now)

    return run


@torch.no_grad()
def _copies(held: list[dict[str, Any]]) -> list[dict[str, Any]]:
    all_of = [buffer for buffers in held for buffer in buffers.values()]  # modules may share one
    made = {id(buffer): None if buffer is None else buffer.clone() for buffer in all_of}
    return [{name: made[id(buffer)] for name, buffer in buffers.items()} for buffers in held]


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether `selective` keeps what an operation makes."""
    kept = (op in _KEPT or op.namespace == "llmexp") and not _drops(op, *args, **kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether an operation draws for dropout.

    What is kept draws nothing again, and all that draws after it would draw other numbers.
    """
    names = [argument.name for argument in op._schema.arguments]
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"))
