"""Spreading a model over the ranks, from outside: models are written for one device.

DDP is torch's; sharding is FSDP2 (`fully_shard`); tensor parallelism is `parallelize_module`
(column-wise into heads and MLP, row-wise out of them: Shoeybi et al. 2019, Megatron-LM), with the
vocabulary split too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmexp.mesh.groups import Mesh, gather_last, maximum
from llmexp.models.loss import SummedLoss, is_shipped
from llmexp.models.operands import VocabShard
from llmexp.models.recompute import blocks_of, recompute_blocks
from llmexp.settings.values import ConfigError

if TYPE_CHECKING:  # these take a second to import: a run on one rank, or under DDP, does without
    from torch.distributed.tensor.parallel import ParallelStyle

_BY_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "head")
_BY_ROW = ("out_proj", "down_proj")
# takes the ranks, the model and the names of its layers that are split by row
Spreading = Callable[[DeviceMesh, nn.Module, tuple[str, ...]], None]
_HEAD_NORMS, _NORMS = ("q_norm", "k_norm"), ("attention_norm", "mlp_norm", "final_norm")


def tensor_parallel_plan(model: nn.Module, sequence: bool = False) -> dict[str, ParallelStyle]:
    """Return how tensor parallelism splits each named layer of a model.

    It is empty for a model whose blocks have none of the known names. `sequence`: what layers that
    are split by row return is a sum yet to be made.
    """
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in _BY_COLUMN:
            plan[name] = ColwiseParallel()
        elif isinstance(module, nn.Linear) and last in _BY_ROW:
            plan[name] = RowwiseParallel()
            if sequence:
                plan[name] = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        elif last == "token_embedding":  # by tokens, as the output head
            plan[name] = RowwiseParallel(input_layouts=Replicate())
    return plan if any(name.endswith(_BY_ROW) for name in plan) else {}


def wrap(
    mesh: Mesh,
    loss: SummedLoss,
    *,
    activation_checkpointing: str,
    compiled: bool,
    gather_dtype: torch.dtype | None = None,
    spread: Spreading | None = None,
) -> nn.Module:
    """Wrap a model for its layout and return the module to train.

    Parameters keep their names; under sharding they become this rank's parts. FSDP gathers the
    matrices of blocks in the dtype `gather_dtype`, in which autocast multiplies them anyway, and
    reduces in fp32; None: as they are. `spread`: lets tensor-parallel ranks share the tokens, too.
    """
    if mesh.tensor is not None:
        _split_layers(mesh, loss, spread)
    recompute_blocks(loss.model, activation_checkpointing)
    if compiled and mesh.sharded:
        loss.compile_blocks()
    elif compiled:
        loss.compile_trunk()
    if mesh.sharding is not None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        keep = mesh.reduces_once  # whole parameters from the first micro-batch to the last
        for block in blocks_of(loss.model):
            policy = MixedPrecisionPolicy(cast_forward_inputs=False)
            rest = [m for m in block.modules() if not isinstance(m, nn.Linear) and _has_own(m)]
            if gather_dtype is not None and not _has_own(block):
                policy = dataclasses.replace(
                    policy, param_dtype=gather_dtype, reduce_dtype=torch.float32
                )
                # Norms: autocast computes with their fp32 values. Hooks would cut a compiled graph.
                if rest and not compiled:
                    fully_shard(rest, mesh=mesh.sharding, reshard_after_forward=not keep)
            fully_shard(block, mesh=mesh.sharding, reshard_after_forward=not keep, mp_policy=policy)
        # The root holds embedding, norm and head: everything is called through it.
        fully_shard(loss, mesh=mesh.sharding, reshard_after_forward=False)
        if not is_shipped(loss.model):
            root: Any = loss
            if not hasattr(root, "set_reduce_scatter_unused_params"):
                raise ConfigError(
                    f"parallelism={mesh.kind}: torch {torch.__version__} mixes the gradients of "
                    "ranks where one of them does not use a parameter of a model of your own; "
                    "install torch 2.13 or later, or train with parallelism=ddp"
                )
            _keep_order(mesh, loss, compiled)
            root.set_reduce_scatter_unused_params(True)  # as `_reduce_unused` under DDP
        return loss
    if mesh.kind == "ddp" and mesh.distributed:
        ids = [mesh.device.index] if mesh.device.type == "cuda" else None
        replicated = nn.parallel.DistributedDataParallel
        # left to `share_buffers`, which knows all types
        names = [name for name, _ in loss.named_buffers()]
        replicated._set_params_and_buffers_to_ignore_for_model(loss, names)
        return replicated(loss, device_ids=ids, gradient_as_bucket_view=True)
    return loss


def _keep_order(mesh: Mesh, loss: SummedLoss, compiled: bool) -> None:
    """Raise ConfigError, on all ranks, where they are about to run different blocks.

    Else they would take parts of one block for parts of another, or wait for ever.
    """

    def meet(number: int, *_: Any) -> None:
        # on the CPU: no device has to wait
        if maximum(mesh, torch.tensor([number, -number])).sum():
            where = "the end" if number < 0 else f"block {number}"
            raise ConfigError(
                f"model: rank {mesh.rank} came to {where} of a pass, and others to another one; "
                f"parallelism={mesh.kind} needs the same blocks in the same order on all ranks: "
                "run a block that is to be dropped and take its output times 0, or train with "
                "parallelism=ddp"
            )

    # such a call cuts a compiled graph, which holds what comes after it
    meets = torch.compiler.disable(meet) if compiled else meet
    for number, block in enumerate(blocks_of(loss.model)):
        block.register_forward_pre_hook(functools.partial(meets, number), prepend=True)
    loss.register_forward_hook(functools.partial(meets, -1))


def _split_layers(mesh: Mesh, loss: SummedLoss, spread: Spreading | None) -> None:
    """Split a model's layers over tensor-parallel ranks."""
    from torch.distributed.tensor.parallel import parallelize_module

    assert mesh.tensor is not None
    parallelize_module(loss.model, mesh.tensor, tensor_parallel_plan(loss.model, bool(spread)))
    for name, module in loss.model.named_modules():
        if hasattr(module, "split_over_ranks"):  # a compiled graph cannot ask the parameters
            module.split_over_ranks = True
        # its sum over the ranks may be under way still, which a compiled block cannot take
        if name.rpartition(".")[2] == "token_embedding":
            module.register_forward_hook(lambda module, inputs, out: out.clone())
    if spread is not None:
        spread(mesh.tensor, loss.model, _BY_ROW)
    _share_norms(mesh, loss.model, _HEAD_NORMS if spread is None else (*_HEAD_NORMS, *_NORMS))
    loss.share_vocabulary(_vocab_shard(mesh, loss.model))


def _share_norms(mesh: Mesh, model: nn.Module, names: Sequence[str]) -> None:
    """Let each rank normalize its own heads, or its own tokens, with the same weights."""
    assert mesh.tensor is not None
    group = mesh.tensor.get_group()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            module.shared = functools.partial(_SumOfGradients.apply, group)


class _SumOfGradients(torch.autograd.Function):
    """Weights that several ranks use, each for its own heads or tokens: gradients are the sums."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = torch.cat(gradients)
        dist.all_reduce(total, group=ctx.group)
        return None, *total.split([len(gradient) for gradient in gradients])


def reshard(module: nn.Module) -> None:
    """Let FSDP gather its parameters anew, after their values were changed between two passes."""
    parts: Any = module.modules()
    for part in parts:
        if hasattr(part, "reshard"):  # fully_shard has made it an FSDPModule
            part.reshard()


def _has_own(module: nn.Module) -> bool:
    """Return whether a module has parameters of its own, besides those of its parts."""
    return next(module.parameters(recurse=False), None) is not None


def _vocab_shard(mesh: Mesh, model: Any) -> VocabShard:
    assert mesh.tensor is not None
    tensor, size = mesh.tensor, model.head_weight.shape[0]
    group = tensor.get_group()

    def reduced(value: Any, how: dist.ReduceOp.RedOpType) -> Any:
        dist.all_reduce(value, how, group=group)
        return value

    return VocabShard(
        first=tensor.get_local_rank() * (size // tensor.size()),
        size=size,
        sum=lambda value: reduced(value, dist.ReduceOp.SUM),
        max=lambda value: reduced(value, dist.ReduceOp.MAX),
        gather=lambda value: gather_last(tensor, value),
    )


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
            _reduce_unused(module)
        return
    if mesh.sharding is not None and mesh.reduces_once:
        sharded: Any = module  # fully_shard has made it an FSDPModule
        sharded.set_requires_gradient_sync(last)
        sharded.set_reshard_after_backward(last)
    yield


def _reduce_unused(module: nn.parallel.DistributedDataParallel) -> None:
    """Reduce the parameters that a backward pass on this rank has left out: with gradient 0 here.

    DDP has not begun the reduction of their buckets, for which other ranks may wait.
    """
    try:
        module._check_reducer_finalized()
    except RuntimeError as error:
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not (left_out := re.search(r"did not receive grad[^:]*: ([\d ]+)", str(error))):
            raise
        unused = [parameters[int(number)] for number in left_out[1].split()]
        torch.autograd.backward(unused, [torch.zeros_like(p) for p in unused])
