"""Stochastic gradient descent of torch."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.optim import Optimizer

from llmexp.optim.optimizers.settings import Knobs
from llmexp.optim.updating import can_fuse, decay_groups, trained


class SGD(torch.optim.SGD):
    """torch's SGD; its step imports no compiler."""

    takes_factor = True
    no_rms = "sgd's update is as large as its gradients"
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def sgd(
    model: nn.Module,
    lr: Knobs.lr,
    momentum: Knobs.momentum = 0.9,
    nesterov: Knobs.nesterov = False,
    weight_decay: Knobs.weight_decay = 0.0,
) -> Optimizer:
    """Stochastic gradient descent with momentum, decay on matrices only."""
    parameters = trained(model)
    return SGD(
        decay_groups(parameters, weight_decay),
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        fused=can_fuse(parameters, split=False),
    )
