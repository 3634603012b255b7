"""FSDP and tensor parallelism: ranks that hold parts of a model's tensors.

Sharding is FSDP2 (`fully_shard`); tensor parallelism is `parallelize_module` (column-wise into
heads and MLP, row-wise out of them: Shoeybi et al. 2019, Megatron-LM), with the vocabulary split
too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmexp.config.values import ConfigError
from llmexp.mesh.groups import Mesh, gather_last, maximum
from llmexp.mesh.sequence import share_tokens
from llmexp.models.common import Weights
from llmexp.models.loss import SummedLoss, blocks_of, is_shipped
from llmexp.models.operands import VocabShard

if TYPE_CHECKING:  # these take a second to import
    from torch.distributed.tensor.parallel import ParallelStyle

_BY_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "head")
_BY_ROW = ("out_proj", "down_proj")
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


def split_layers(mesh: Mesh, loss: SummedLoss) -> None:
    """Split a model's layers over tensor-parallel ranks, which may share the tokens, too."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    assert mesh.tensor is not None
    parallelize_module(loss.model, mesh.tensor, tensor_parallel_plan(loss.model, mesh.sequence))
    for name, module in loss.model.named_modules():
        if isinstance(module, Weights) and module.weight.ndim > 2:
            part = Shard(2 if name.endswith(_BY_ROW) else 1)  # of the width of each expert
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh.tensor, [part]))
        if hasattr(module, "over_width"):  # experts, of each of which a rank has a part
            group = mesh.tensor.get_group()
            module.over_width = [functools.partial(of.apply, group) for of in (_Copied, _Summed)]
        if hasattr(module, "split_over_ranks"):  # a compiled graph cannot ask the parameters
            module.split_over_ranks = True
        # its sum over the ranks may be under way still, which a compiled block cannot take
        if name.rpartition(".")[2] == "token_embedding":
            module.register_forward_hook(lambda module, inputs, out: out.clone())
    if mesh.sequence:
        share_tokens(mesh.tensor, loss.model, _BY_ROW)
    _share_norms(mesh, loss.model, (*_HEAD_NORMS, *_NORMS) if mesh.sequence else _HEAD_NORMS)
    loss.share_vocabulary(_vocab_shard(mesh, loss.model))


class _Copied(torch.autograd.Function):
    """Tensors that all ranks have, each for its part of a sum: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = [gradient.clone() for gradient in gradients]
        for gradient in found:
            dist.all_reduce(gradient, group=ctx.group)
        return None, *found


class _Summed(torch.autograd.Function):
    """The sum of the ranks' parts, whose gradient is that of each part."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def _share_norms(mesh: Mesh, model: nn.Module, names: Sequence[str]) -> None:
    """Let each rank normalize its own heads, or its own tokens, with the same weights."""
    assert mesh.tensor is not None
    group = mesh.tensor.get_group()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            module.shared = functools.partial(_Copied.apply, group)


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


def shard_parameters(
    mesh: Mesh, loss: SummedLoss, gather_dtype: torch.dtype | None, compiled: bool
) -> None:
    """Shard each block and what is outside of them by FSDP. `gather_dtype`: see `wrap`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    keep = mesh.reduces_once  # whole parameters from the first micro-batch to the last
    for block in blocks_of(loss.model):
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        rest = [m for m in block.modules() if not _multiplies(m) and _has_own(m)]
        if gather_dtype is not None and not _has_own(block):
            policy = dataclasses.replace(
                policy, param_dtype=gather_dtype, reduce_dtype=torch.float32
            )
            # Norms, routers: autocast computes with their fp32 values. Hooks would cut a
            # compiled graph, which only routers are worth.
            if compiled:
                rest = [m for m in rest if isinstance(m, Weights)]
            if rest:
                fully_shard(rest, mesh=mesh.sharding, reshard_after_forward=not keep)
        fully_shard(block, mesh=mesh.sharding, reshard_after_forward=not keep, mp_policy=policy)
    # The root holds embedding, norm and head: everything is called through it.
    fully_shard(loss, mesh=mesh.sharding, reshard_after_forward=False)
    if not is_shipped(loss.model):
        root: Any = loss
        if not hasattr(root, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                "missing_package",
                f"parallelism={mesh.kind}: torch {torch.__version__} mixes the gradients of "
                "ranks where one of them does not use a parameter of a model of your own; "
                "install torch 2.13 or later, or train with parallelism=ddp",
            )
        _keep_order(mesh, loss, compiled)
        root.set_reduce_scatter_unused_params(True)  # as `_reduce_unused` under DDP


def _multiplies(module: nn.Module) -> bool:
    """Return whether autocast takes the weights of a module in the dtype of products."""
    return isinstance(module, nn.Linear) or (isinstance(module, Weights) and module.weight.ndim > 2)


def _has_own(module: nn.Module) -> bool:
    """Return whether a module has parameters of its own, besides those of its parts."""
    return next(module.parameters(recurse=False), None) is not None


def _keep_order(mesh: Mesh, loss: SummedLoss, compiled: bool) -> None:
    """Raise ConfigError, on all ranks, where they are about to run different blocks.

    Else they would take parts of one block for parts of another, or wait for ever.
    """

    def meet(number: int, *_: Any) -> None:
        # on the CPU: no device has to wait
        if maximum(mesh, torch.tensor([number, -number])).sum():
            where = "the end" if number < 0 else f"block {number}"
            raise ConfigError(
                "bad_own_part",
                f"model: rank {mesh.rank} came to {where} of a pass, and others to another one; "
                f"parallelism={mesh.kind} needs the same blocks in the same order on all ranks: "
                "run a block that is to be dropped and take its output times 0, or train with "
                "parallelism=ddp",
            )

    # such a call cuts a compiled graph, which holds what comes after it
    meets = torch.compiler.disable(meet) if compiled else meet
    for number, block in enumerate(blocks_of(loss.model)):
        block.register_forward_pre_hook(functools.partial(meets, number), prepend=True)
    loss.register_forward_hook(functools.partial(meets, -1))
