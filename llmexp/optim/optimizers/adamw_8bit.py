"""AdamW with moments of 8 bits, of torchao."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from llmexp.optim.optimizers.library import built
from llmexp.optim.optimizers.settings import Knobs


def adamw_8bit(
    model: nn.Module,
    lr: Knobs.lr,
    beta1: Knobs.beta1 = 0.9,
    beta2: Knobs.beta2 = 0.95,
    eps: Knobs.eps = 1e-8,
    weight_decay: Knobs.weight_decay = 0.1,
) -> Optimizer:
    """AdamW with 8-bit moments (Dettmers et al. 2021) by torchao, in blocks of 256 entries."""
    betas = beta1, beta2
    return built(
        model, "torchao.optim.AdamW8bit", lr, betas=betas, eps=eps, weight_decay=weight_decay
    )
