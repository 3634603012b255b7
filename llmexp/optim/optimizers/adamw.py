"""AdamW of torch."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.optim import Optimizer

from llmexp.optim.optimizers.settings import Knobs
from llmexp.optim.updating import can_fuse, decay_groups, trained


class AdamW(torch.optim.AdamW):
    """torch's AdamW; its step imports no compiler."""

    takes_factor = True
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def adamw(
    model: nn.Module,
    lr: Knobs.lr,
    beta1: Knobs.beta1 = 0.9,
    beta2: Knobs.beta2 = 0.95,
    eps: Knobs.eps = 1e-8,
    weight_decay: Knobs.weight_decay = 0.1,
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019), fused where torch can, decay on matrices only."""
    return adamw_of(trained(model), lr, (beta1, beta2), eps, weight_decay)


def adamw_of(
    parameters: list[nn.Parameter],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> AdamW:
    """Return AdamW of some parameters."""
    groups = decay_groups(parameters, weight_decay)
    return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=can_fuse(parameters))
