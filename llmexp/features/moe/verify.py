from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmexp.models.experts import experts_of


def follow(model: nn.Module) -> Callable[[Tensor], None]:
    """Return what moves the biases of a model, from the targets (r, t) of the step that it took."""
    experts: list[Any] = list(experts_of(model).values())
    loads: list[list[Tensor]] = [[] for _ in experts]

    def kept(own: list[Tensor]) -> Callable[..., None]:
        return lambda one, share_bte, load_be, *losses: own.append(load_be)

    for one, own in zip(experts, loads, strict=True):
        one.look = kept(own)

    def move(targets: Tensor) -> None:
        counted = (targets != -100).any(1)
        for one, own in zip(experts, loads, strict=True):
            load_e = torch.cat(own)[counted].sum(0)
            own.clear()
            if one.routing.balance == "bias":
                one.router.balance_bias += (
                    one.routing.balance_rate * (load_e.mean() - load_e).sign()
                )

    return move
