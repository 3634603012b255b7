"""The optimizers of libraries that conf/optimizer ships, with their knobs by our names."""

from __future__ import annotations

from typing import Annotated, Any

from torch import nn
from torch.optim import Optimizer

from llmexp.settings.parts import OptimizerKnobs
from llmexp.settings.values import count, knob
from llmexp.update.library import built


def _of_adam(beta1: float, beta2: float, eps: float, weight_decay: float) -> dict[str, Any]:
    return {"betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}


def adafactor(
    model: nn.Module,
    lr: OptimizerKnobs.lr,
    beta2_decay: Annotated[
        float, knob("second moment: its decay at update t is 1 - t^beta2_decay", -0.8, below=0)
    ] = -0.8,
    least_scale: Annotated[
        float, knob("least RMS of a tensor, by which its rate is multiplied", 1e-3, above=0)
    ] = 1e-3,
    max_update: Annotated[
        float, knob("largest RMS of a tensor's update before the rate", 1.0, at_least=1)
    ] = 1.0,
    weight_decay: OptimizerKnobs.weight_decay = 0.0,
) -> Optimizer:
    """Adafactor (Shazeer & Stern 2018) by torch: a row and a column of moments for each matrix."""
    knobs = {"beta2_decay": beta2_decay, "eps": (None, least_scale), "d": max_update}
    return built(model, "torch.optim.Adafactor", lr, knobs | {"weight_decay": weight_decay})


def schedule_free(
    model: nn.Module,
    lr: OptimizerKnobs.lr,
    beta1: Annotated[
        float,
        knob("share of the average in the weights that are trained at", 0.9, above=0, below=1),
    ] = 0.9,
    beta2: OptimizerKnobs.beta2 = 0.999,
    eps: OptimizerKnobs.eps = 1e-8,
    weight_decay: OptimizerKnobs.weight_decay = 0.0,
) -> Optimizer:
    """Schedule-free AdamW (Defazio et al. 2024), evaluated at an average of its weights."""
    knobs = _of_adam(beta1, beta2, eps, weight_decay)
    return built(model, "schedulefree.AdamWScheduleFree", lr, knobs)


def soap(
    model: nn.Module,
    lr: OptimizerKnobs.lr,
    beta1: OptimizerKnobs.beta1 = 0.95,
    beta2: OptimizerKnobs.beta2 = 0.95,
    eps: OptimizerKnobs.eps = 1e-8,
    weight_decay: OptimizerKnobs.weight_decay = 0.01,
    precondition_frequency: Annotated[
        int, count("updates between changes of the basis that AdamW works in", 10)
    ] = 10,
    max_precondition_dim: Annotated[
        int, count("a dimension of more entries keeps its own basis", 10_000)
    ] = 10_000,
) -> Optimizer:
    """SOAP (Vyas et al. 2024): AdamW in the eigenbasis of Shampoo's preconditioner."""
    knobs = _of_adam(beta1, beta2, eps, weight_decay)
    knobs["precondition_frequency"] = precondition_frequency
    knobs["max_precondition_dim"] = max_precondition_dim
    return built(model, "pytorch_optimizer.SOAP", lr, knobs)


def adamw_8bit(
    model: nn.Module,
    lr: OptimizerKnobs.lr,
    beta1: OptimizerKnobs.beta1 = 0.9,
    beta2: OptimizerKnobs.beta2 = 0.95,
    eps: OptimizerKnobs.eps = 1e-8,
    weight_decay: OptimizerKnobs.weight_decay = 0.1,
) -> Optimizer:
    """AdamW with 8-bit moments (Dettmers et al. 2021) by torchao, in blocks of 256 entries."""
    return built(model, "torchao.optim.AdamW8bit", lr, _of_adam(beta1, beta2, eps, weight_decay))
