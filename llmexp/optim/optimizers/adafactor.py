"""Adafactor of torch."""

from __future__ import annotations

from typing import Annotated

from torch import nn
from torch.optim import Optimizer

from llmexp.config.values import knob
from llmexp.optim.optimizers.library import built
from llmexp.optim.optimizers.settings import Knobs


def adafactor(
    model: nn.Module,
    lr: Knobs.lr,
    beta2_decay: Annotated[
        float, knob("second moment: its decay at update t is 1 - t^beta2_decay", -0.8, below=0)
    ] = -0.8,
    least_scale: Annotated[
        float, knob("least RMS of a tensor, by which its rate is multiplied", 1e-3, above=0)
    ] = 1e-3,
    max_update: Annotated[
        float, knob("largest RMS of a tensor's update before the rate", 1.0, at_least=1)
    ] = 1.0,
    weight_decay: Knobs.weight_decay = 0.0,
) -> Optimizer:
    """Adafactor (Shazeer & Stern 2018) by torch: a row and a column of moments for each matrix."""
    knobs = {"beta2_decay": beta2_decay, "d": max_update, "weight_decay": weight_decay}
    return built(model, "torch.optim.Adafactor", lr, eps=(None, least_scale), **knobs)
