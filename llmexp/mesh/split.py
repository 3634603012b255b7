"""Tensors of which each rank may hold a part: figures over all ranks, work shared by them.

Arithmetic in place takes `local_part` of a tensor. `global_norm` and `inner` take the split tensors
themselves: local parts alone would count as copies, and the figure would be too small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmexp.mesh.groups import Mesh, any_rank, maximum
from llmexp.models.loss import is_shipped


def local_part(value: Any) -> Tensor:
    """Return what this rank holds of a tensor: its part of a split one, else the tensor itself."""
    return value.to_local() if is_split(value) else value


def is_split(value: Any) -> bool:
    """Return whether a value is a DTensor, by an attribute: that class takes a second to import."""
    return hasattr(value, "to_local")


def without_partials(value: Any) -> Tensor:
    """Return a tensor with what ranks hold as parts of a sum, or of a norm, put together."""
    if not is_split(value) or not any(placement.is_partial() for placement in value.placements):
        return value
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in value.placements]
    return value.redistribute(placements=placements)


def _copies(value: Any, world: int) -> float:
    """Ranks that hold the same elements as this one."""
    if not is_split(value):
        return float(world)
    shards = 1
    for dim, placement in enumerate(value.placements):
        assert not placement.is_partial(), "a gradient that was not reduced"
        if not placement.is_replicate():
            shards *= value.device_mesh.size(dim)
    return world / shards


def _counted_once(mesh: Mesh, values: Sequence[Tensor], figures: Tensor) -> Tensor:
    """Return figures (n, ...) of each tensor's part here so that sums over ranks count it once."""
    if not mesh.sharded:
        return figures
    copies = torch.tensor([_copies(v, mesh.world_size) for v in values], dtype=torch.float64)
    copies = copies.view(-1, *[1] * (figures.ndim - 1))
    return figures / copies.to(figures.device, non_blocking=True)


def global_norm(mesh: Mesh, values: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over tensors of which each rank may hold a part, as a 0-dim tensor.

    Every element counts once.
    """
    if mesh.sharded:
        return _norm_over_ranks(mesh, values)
    if not values:
        return torch.zeros((), device=mesh.device)
    # get_total_norm, without its sorting of tensors by device and dtype
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(values))))


def _norm_over_ranks(mesh: Mesh, values: Sequence[Tensor]) -> Tensor:
    own_n = torch.stack(torch._foreach_norm([local_part(v) for v in values]))
    return summed_over_all(mesh, values, own_n.double().square()).sqrt().to(own_n.dtype)


def summed_over_all(mesh: Mesh, values: Sequence[Tensor], figures: Tensor) -> Tensor:
    """Return the sum over tensors and ranks of figures (n, ...) of each tensor's part here.

    Every element counts once.
    """
    value = _counted_once(mesh, values, figures).sum(0)
    if mesh.sharded:
        dist.all_reduce(value)
    return value


def summed_over_ranks(mesh: Mesh, values: Sequence[Tensor], figures: Tensor) -> Tensor:
    """Return the sum over the ranks of figures (n, ...) of each tensor's part here.

    A row stays for each tensor. Every element counts once.
    """
    value = _counted_once(mesh, values, figures)
    if mesh.sharded:
        dist.all_reduce(value)
    return value


def norms(mesh: Mesh, values: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, of which each rank may hold a part: (n,)."""
    found = torch.stack(torch._foreach_norm([local_part(v) for v in values]))
    if not mesh.sharded:
        return found
    return summed_over_ranks(mesh, values, found.double().square()).sqrt()


def inner(mesh: Mesh, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Return the inner product of two lists of tensors, of which each rank may hold a part.

    A 0-dim tensor in float64; every element counts once.
    """
    pairs = zip(map(local_part, first), map(local_part, second), strict=True)
    products = torch.stack([(a.double() * b.double()).sum() for a, b in pairs])
    return summed_over_all(mesh, first, products)


def largest_entry(mesh: Mesh, values: Sequence[Tensor]) -> Tensor:
    """Largest absolute value over tensors of which each rank may hold a part. A 0-dim tensor."""
    held = [part for part in map(local_part, values) if part.numel()]
    nothing = torch.zeros((), dtype=values[0].dtype, device=mesh.device)
    largest = torch.stack(torch._foreach_norm(held, torch.inf)).max() if held else nothing
    return maximum(mesh, largest) if mesh.sharded else largest


def share_buffers(mesh: Mesh, model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0, of any type; all call together.

    So ranks begin each step and each evaluation with the same ones. Those of models of ours are
    the same anyway. One that is of another shape on some rank, or not there, is a cache
    (`evaluation_mode`), and stays.
    """
    if mesh.distributed and not is_shipped(model):
        _share_each(mesh, model)


def _share_each(mesh: Mesh, model: nn.Module) -> None:
    own = {name: local_part(buffer).detach() for name, buffer in model.named_buffers()}
    kinds = {name: (buffer.shape, buffer.dtype) for name, buffer in own.items()}
    listed = [kinds]
    # on the CPU: no device has to wait
    dist.broadcast_object_list(listed, 0, device=torch.device("cpu"))
    differ = any_rank(mesh, *(kinds.get(name) != kind for name, kind in listed[0].items()))
    for name, differs in zip(listed[0], differ, strict=True):
        if not differs:
            flat = own[name].contiguous().view(-1)
            dist.broadcast(flat.view(torch.uint8), 0)
            own[name].copy_(flat.view(own[name].shape))


def share_here() -> tuple[int, int]:
    """Return this process's rank and how many there are: (0, 1) without a group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share_work(work: Callable[[Tensor], Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Return `work` of each whole matrix, at most one for each rank, which does its own alone.

    All ranks call it with values of one shape, each the same on all ranks or split over them, and
    `work` keeps shape and dtype. What it makes of a split value is a DTensor, whole on each rank.
    """
    rank, ranks = share_here()
    if ranks == 1:
        return [work(value) for value in values]
    whole = [_whole(value) for value in values]
    own = work(whole[rank]) if rank < len(whole) else whole[0]
    made = [torch.empty(own.shape, dtype=own.dtype, device=own.device) for _ in range(ranks)]
    dist.all_gather(made, own.contiguous())
    return [_as_split(new, value) for new, value in zip(made, values, strict=False)]


def _whole(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if is_split(value) else value
    return found


def _as_split(whole: Tensor, like: Any) -> Tensor:
    """Return a tensor that each rank has whole as a DTensor on the mesh of one that is split."""
    if not is_split(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate() for _ in like.placements]
    return DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False)
