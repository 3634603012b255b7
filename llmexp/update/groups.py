"""Factors on the rate and the weight decay of single parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llmexp.settings.rules import Group
from llmexp.settings.values import refuse
from llmexp.update.patterns import first_matches

KEY = "optimizer.groups"


def groups_by_name(
    model: nn.Module, optimizers: Sequence[Optimizer], groups: Sequence[Group]
) -> dict[int, int | None]:
    """Return the place of the group that takes each parameter of the optimizers, by its id.

    None: no group does. Raises ConfigError for a pattern that takes nothing.
    """
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    named = {name: id(p) for name, p in model.named_parameters() if id(p) in held}
    places = first_matches(named, [group.match for group in groups], KEY)
    return dict(zip(named.values(), places, strict=True))


def by_name(model: nn.Module, optimizers: Sequence[Optimizer], groups: Sequence[Group]) -> None:
    """Give parameters the factors of the first group that matches their names.

    Raises ConfigError for a pattern that takes nothing, and for an optimizer that has no use for a
    factor.
    """
    if not groups:
        return
    places = groups_by_name(model, optimizers, groups)
    for optimizer in optimizers:
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            of_all = [places.get(id(p)) for p in group["params"]]
            found = {place for place in of_all if place is not None}
            if found and isinstance(optimizer, torch.optim.LBFGS):
                text = "takes one rate for all parameters; leave the groups out"
                raise refuse("optimizer", name, text, "adamw")
            for number in found:
                decay = groups[number].weight_decay
                if decay != 1 and "weight_decay" not in group:
                    text = f"{name} has no weight decay that this could multiply; leave it out"
                    raise refuse(f"{KEY}.{number}.weight_decay", decay, text)

    def factors(p: nn.Parameter) -> tuple[float, float]:
        place = places.get(id(p))
        return (1.0, 1.0) if place is None else (groups[place].lr, groups[place].weight_decay)

    for optimizer in optimizers:
        scale(optimizer, factors)


def scale(optimizer: Optimizer, factors: Callable[[nn.Parameter], tuple[float, float]]) -> None:
    """Multiply rate and weight decay of each parameter by its factors.

    A group of the optimizer is split into those of equal factors; one whose factors are 1 stays as
    it is. The factor on the rate is kept apart from the base rate, which the rows show.
    """
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parts: dict[tuple[float, float], list[nn.Parameter]] = {}
        for p in group["params"]:
            parts.setdefault(factors(p), []).append(p)
        for (lr, decay), parameters in parts.items():
            new = {**group, "params": parameters}
            if lr != 1:
                new["lr_factor"] = group.get("lr_factor", 1.0) * lr
            if decay != 1:
                new["weight_decay"] = group["weight_decay"] * decay
            found.append(new)
    optimizer.param_groups[:] = found
