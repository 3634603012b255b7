"""Gradient clipping, once per window, on unscaled and fully reduced gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
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
