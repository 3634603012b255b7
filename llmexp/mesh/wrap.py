"""Spreading a model over the ranks, from outside: models are written for one device.

DDP is torch's; ranks that hold parts of tensors are in `sharding`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from llmexp.mesh.groups import Mesh
from llmexp.models.loss import SummedLoss


def wrap(
    mesh: Mesh,
    loss: SummedLoss,
    *,
    activation_checkpointing: str,
    compiled: bool,
    gather_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Wrap a model for its layout and return the module to train.

    Parameters keep their names; under sharding they become this rank's parts. FSDP gathers the
    matrices of blocks in the dtype `gather_dtype`, in which autocast multiplies them anyway, and
    reduces in fp32; None: as they are.
    """
    if mesh.tensor is not None:
        from llmexp.mesh.sharding import split_layers

        split_layers(mesh, loss)
    if activation_checkpointing in ("full", "selective"):
        from llmexp.models.recompute import recompute_blocks

        recompute_blocks(loss.model, activation_checkpointing)
    if compiled and mesh.sharded:
        loss.compile_blocks()
    elif compiled:
        loss.compile_trunk()
    if mesh.sharding is not None:
        from llmexp.mesh.sharding import shard_parameters

        shard_parameters(mesh, loss, gather_dtype, compiled)
        return loss
    if mesh.kind == "ddp" and mesh.distributed:
        ids = [mesh.device.index] if mesh.device.type == "cuda" else None
        replicated = nn.parallel.DistributedDataParallel
        # left to `share_buffers`, which knows all types
        names = [name for name, _ in loss.named_buffers()]
        replicated._set_params_and_buffers_to_ignore_for_model(loss, names)
        return replicated(loss, device_ids=ids, gradient_as_bucket_view=True)
    return loss


def reshard(module: nn.Module) -> None:
    """Let FSDP gather its parameters anew, after their values were changed between two passes."""
    parts: Any = module.modules()
    for part in parts:
        if hasattr(part, "reshard"):  # fully_shard has made it an FSDPModule
            part.reshard()


@contextlib.contextmanager
def micro_step(mesh: Mesh, module: nn.Module, *, last: bool) -> Iterator[None]:
    """Reduce gradients where a micro-batch needs it: around its forward *and* backward pass.

    DDP reduces with the last micro-batch of a step; FSDP with each one, and keeps no whole
    gradient, unless it communicates once a step. (Around the backward pass alone DDP's no_sync
    does nothing, silently: it decides in the forward pass.)
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        with contextlib.nullcontext() if last else module.no_sync():
            yield
        if last:
            try:
                module._check_reducer_finalized()
            except RuntimeError as error:
                _reduce_unused(module, error)
        return
    if mesh.sharding is not None and mesh.reduces_once:
        sharded: Any = module  # fully_shard has made it an FSDPModule
        sharded.set_requires_gradient_sync(last)
        sharded.set_reshard_after_backward(last)
    yield


def _reduce_unused(module: nn.parallel.DistributedDataParallel, error: RuntimeError) -> None:
    """Reduce the parameters that a backward pass on this rank has left out: with gradient 0 here.

    DDP has not begun the reduction of their buckets, for which other ranks may wait.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not (left_out := re.search(r"did not receive grad[^:]*: ([\d ]+)", str(error))):
        raise error
    unused = [parameters[int(number)] for number in left_out[1].split()]
    torch.autograd.backward(unused, [torch.zeros_like(p) for p in unused])
