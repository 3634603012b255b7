"""Schedule-free AdamW, of schedulefree."""

from __future__ import annotations

from typing import Annotated

from torch import nn
from torch.optim import Optimizer

from llmexp.config.values import knob
from llmexp.optim.optimizers.library import built
from llmexp.optim.optimizers.settings import Knobs


def schedule_free(
    model: nn.Module,
    lr: Knobs.lr,
    beta1: Annotated[
        float,
        knob("share of the average in the weights that are trained at", 0.9, above=0, below=1),
    ] = 0.9,
    beta2: Knobs.beta2 = 0.999,
    eps: Knobs.eps = 1e-8,
    weight_decay: Knobs.weight_decay = 0.0,
) -> Optimizer:
    """Schedule-free AdamW (Defazio et al. 2024), evaluated at an average of its weights."""
    betas = beta1, beta2
    return built(
        model, "schedulefree.AdamWScheduleFree", lr, betas=betas, eps=eps, weight_decay=weight_decay
    )
