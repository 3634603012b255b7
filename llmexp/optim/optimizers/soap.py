"""SOAP, of pytorch_optimizer."""

from __future__ import annotations

from typing import Annotated

from torch import nn
from torch.optim import Optimizer

from llmexp.config.values import count
from llmexp.optim.optimizers.library import built
from llmexp.optim.optimizers.settings import Knobs


def soap(
    model: nn.Module,
    lr: Knobs.lr,
    beta1: Knobs.beta1 = 0.95,
    beta2: Knobs.beta2 = 0.95,
    eps: Knobs.eps = 1e-8,
    weight_decay: Knobs.weight_decay = 0.01,
    precondition_frequency: Annotated[
        int, count("updates between changes of the basis that AdamW works in", 10)
    ] = 10,
    max_precondition_dim: Annotated[
        int, count("a dimension of more entries keeps its own basis", 10_000)
    ] = 10_000,
) -> Optimizer:
    """SOAP (Vyas et al. 2024): AdamW in the eigenbasis of Shampoo's preconditioner."""
    return built(
        model,
        "pytorch_optimizer.SOAP",
        lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        precondition_frequency=precondition_frequency,
        max_precondition_dim=max_precondition_dim,
    )
