from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def limit_updates(at: Any, optimizers: Sequence[Optimizer], old: Mapping[Tensor, Tensor]) -> None:
    """Take back what the rule does of AdamW's updates of parameters that were as `old`."""
    adamw: list[Any] = [o for o in optimizers if isinstance(o, torch.optim.AdamW)]
    for optimizer, group in [(o, g) for o in adamw for g in o.param_groups]:
        for p in group["params"]:
            moment = optimizer.state[p]["exp_avg_sq"]
            moment = moment / (1 - group["betas"][1] ** len(at.before))
            rms = (p.grad.square() / moment.clamp(min=group["eps"] ** 2)).mean().sqrt()
            share = 1 / max(1.0, float(rms) / at.knobs.threshold)
            p.detach().copy_(old[p] + share * (p.detach() - old[p]))


OF_UPDATE = {"update": limit_updates}
