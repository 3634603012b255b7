"""Gradient norm and clipping, once per window, on unscaled and fully reduced gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of the gradient over distinct parameters, a 0-dim tensor on their device."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def clip(
    kind: str, parameters: list[nn.Parameter], norm: Tensor, max_norm: float | None, max_value: float | None
) -> tuple[Tensor, Tensor]:
    """Clips in place and returns (norm after clipping, whether anything was clipped), both 0-dim tensors.

    By norm the factor is min(1, max_norm / (norm + 1e-6)) (Pascanu et al. 2013, with torch's epsilon).
    A limit of None is no limit.
    """
    if kind == "norm" and max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # On the CPU reading the factor is free and multiplying by one is not; on a GPU it is the other way round.
        if norm.device.type != "cpu" or factor < 1:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm * factor, factor < 1
    if kind == "value" and max_value is not None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        largest = torch.stack(torch._foreach_norm(gradients, math.inf)).max()
        torch.nn.utils.clip_grad_value_(parameters, max_value)
        return global_norm(parameters), largest > max_value
    return norm, torch.zeros((), dtype=torch.bool, device=norm.device)
