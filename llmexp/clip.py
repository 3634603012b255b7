"""Gradient clipping, once per window, on unscaled and fully reduced gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmexp import mesh


def clip(
    joined: mesh.Mesh,
    kind: str,
    gradients: Sequence[Tensor],
    norm: Tensor,
    max_norm: float | None,
    max_value: float | None,
    by_update: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Clip in place; return (norm after clipping, whether anything was clipped, None), 0-dim
    tensors. By norm with `by_update` nothing is done in place: the last one is the factor, for the
    update to multiply with.

    `gradients` may be split over the ranks; `norm` is that of them all. By norm the factor is
    min(1, max_norm / (norm + 1e-6)) (Pascanu et al. 2013, with torch's epsilon). A limit of None is
    no limit.
    """
    held = [mesh.local_part(g) for g in gradients]
    if kind == "norm" and max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # On the CPU reading the factor is free and multiplying by one is not; on a GPU it is the
        # other way round.
        if not by_update and (norm.device.type != "cpu" or factor < 1):
            torch._foreach_mul_(held, factor)
        return norm * factor, factor < 1, factor if by_update else None
    if kind == "value" and max_value is not None:
        largest = mesh.largest_entry(joined, gradients)
        torch._foreach_clamp_min_(held, -max_value)
        torch._foreach_clamp_max_(held, max_value)
        return mesh.global_norm(joined, gradients), largest > max_value, None
    return norm, torch.zeros((), dtype=torch.bool, device=norm.device), None
