"""Gradient clipping, once per window, on unscaled and fully reduced gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmexp import mesh

LEAST_WEIGHTS = 1e-3  # norm of a unit's weights, in `clip_units`


def clip(
    joined: mesh.Mesh,
    kind: str,
    gradients: Sequence[Tensor],
    norm: Tensor,
    max_norm: float | None,
    max_value: float | None,
    by_update: bool = False,
) -> tuple[Any, Any, Tensor | None]:
    """Clip in place; return (norm after clipping, whether anything was clipped, None).

    These are numbers on a CPU, else 0-dim tensors. By norm with `by_update` nothing is changed, and
    the last value is the factor with which the update has to multiply.

    `gradients` may be split over the ranks; `norm` is that of them all. By norm the factor is
    min(1, max_norm / (norm + 1e-6)) (Pascanu et al. 2013, with torch's epsilon). A limit of None is
    no limit.
    """
    held = [mesh.local_part(g) for g in gradients]
    if kind == "norm" and max_norm is not None:
        if norm.device.type == "cpu" and not by_update:
            return (*_clip_on_host(held, norm, max_norm), None)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if not by_update:
            torch._foreach_mul_(held, factor)
        return norm * factor, factor < 1, factor if by_update else None
    if kind == "value" and max_value is not None:
        largest = mesh.largest_entry(joined, gradients)
        torch._foreach_clamp_min_(held, -max_value)
        torch._foreach_clamp_max_(held, max_value)
        return mesh.global_norm(joined, gradients), largest > max_value, None
    if norm.device.type == "cpu":
        return norm, False, None
    return norm, torch.zeros((), dtype=torch.bool, device=norm.device), None


def _clip_on_host(held: list[Tensor], norm: Tensor, max_norm: float) -> tuple[float, bool]:
    """Clip by norm on a CPU, and skip the multiplication where the factor is 1.

    Reading the norm costs nothing there. Each operation rounds as that of a tensor does.
    """
    rounded = np.float64 if norm.dtype == torch.float64 else np.float32
    before = rounded(norm.item())
    if not np.isfinite(before):  # its update is skipped
        return float(before), False
    factor = min(rounded(1) / (before + rounded(1e-6)) * rounded(max_norm), rounded(1))
    if factor < 1:
        torch._foreach_mul_(held, float(factor))
    return float(before * factor), bool(factor < 1)


def clip_units(joined: mesh.Mesh, weights: Sequence[Tensor], ratio: float) -> Any:
    """Clip each unit's gradient to `ratio` times the norm of its weights, in place.

    Adaptive gradient clipping, AGC, is by Brock et al. 2021 (arXiv 2102.06171). A unit is a row of
    a matrix, the inputs of one output, or a whole vector; weights of a norm below 1e-3 count as
    that. Return whether anything was clipped: a bool on a CPU, else a 0-dim tensor.
    """
    clipped = torch.zeros((), device=joined.device)
    for weight in weights:
        gradient: Any = weight.grad
        limits = _unit_norms(weight.detach()).clamp(min=LEAST_WEIGHTS) * ratio
        norms = _unit_norms(gradient)
        gradient.mul_(torch.where(norms > limits, limits / norms.clamp(min=1e-6), 1.0))
        above = mesh.local_part(norms > limits)
        if above.numel():
            clipped = torch.maximum(clipped, above.any().to(clipped.dtype))
    clipped = mesh.maximum(joined, clipped) > 0
    return bool(clipped) if clipped.device.type == "cpu" else clipped


def _unit_norms(values: Tensor) -> Tensor:
    """Return the norm of each unit, in a shape that values can be multiplied with."""
    if values.ndim > 1:
        dims = tuple(range(1, values.ndim))
        return torch.linalg.vector_norm(values, dim=dims, keepdim=True)
    return torch.linalg.vector_norm(values)
