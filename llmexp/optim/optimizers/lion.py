"""Lion, whose update is a sign."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp import mesh
from llmexp.config.values import knob
from llmexp.optim.optimizers.settings import Knobs
from llmexp.optim.updating import decay_groups, trained


class Lion(Optimizer):
    """Lion (Chen et al. 2023), which skips an update without a wait of the host."""

    skips_whole = like_adam = True
    no_rms = "each entry of Lion's update is +1 or -1, so its RMS is 1"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        skip: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            lr, beta1, beta2 = group["lr"], group["beta1"], group["beta2"]
            shrink: Any = 1 - lr * group["weight_decay"]
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            if not held:
                continue
            momenta = [mesh.local_part(self.state[p]["momentum"]) for p in held]
            gradients = [mesh.local_part(p.grad) for p in held]
            parameters = [mesh.local_part(p) for p in held]
            if skip is not None:  # with factors of 1 and steps of 0 nothing moves
                for gradient in gradients:
                    gradient.masked_fill_(skip > 0, 0.0)
                like = parameters[0]
                lr, shrink, beta2 = (
                    torch.where(skip > 0, like.new_full((), still), like.new_full((), value))
                    for value, still in ((lr, 0.0), (shrink, 1.0), (beta2, 1.0))
                )
            directions = torch._foreach_mul(momenta, beta1)
            torch._foreach_add_(directions, gradients, alpha=1 - beta1)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(directions, lr)
            torch._foreach_mul_(parameters, shrink)
            torch._foreach_sub_(parameters, directions)
            torch._foreach_mul_(momenta, beta2)
            torch._foreach_add_(momenta, gradients, alpha=1 - group["beta2"])


def lion(
    model: nn.Module,
    lr: Knobs.lr,
    beta1: Annotated[
        float, knob("Lion's share of the momentum in the direction", 0.9, at_least=0, below=1)
    ] = 0.9,
    beta2: Annotated[float, knob("Lion's decay of the momentum", 0.99, at_least=0, below=1)] = 0.99,
    weight_decay: Knobs.weight_decay = 0.5,
) -> Optimizer:
    """Lion (Chen et al. 2023, algorithm 2): steps of size lr by the sign, decay on matrices only.

    A step is p <- p - lr (sign(beta1 m + (1 - beta1) g) + weight_decay p), and then
    m <- beta2 m + (1 - beta2) g. The paper takes rates 3 to 10 times lower than AdamW's, and a
    weight decay as many times larger.
    """
    knobs = {"lr": lr, "beta1": beta1, "beta2": beta2}
    return Lion(decay_groups(trained(model), weight_decay), knobs)
