"""Factors on the rate and the weight decay of single parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llmexp.config.values import refuse
from llmexp.optim.optimizers.settings import Group
from llmexp.optim.patterns import first_matches, plain_names
from llmexp.optim.states import traits_of
from llmexp.optim.updating import held_by

_KEY = "optimizer.groups"


def groups_by_name(
    model: nn.Module, optimizers: Sequence[Optimizer], groups: Sequence[Group]
) -> dict[int, int | None]:
    """Return the place of the group that takes each parameter of the optimizers, by its id.

    None: no group does. Raises ConfigError for a pattern that takes nothing.
    """
    held = set(map(id, held_by(*optimizers)))
    named = {name: id(p) for name, p in model.named_parameters() if id(p) in held}
    places = first_matches(named, [group.match for group in groups], _KEY)
    return dict(zip(named.values(), places, strict=True))


def by_name(model: nn.Module, optimizers: Sequence[Optimizer], groups: Sequence[Group]) -> None:
    """Give parameters the factors of the first group that matches their names.

    Raises ConfigError for a pattern that takes nothing, for an optimizer that has no use for a
    factor, and for a factor on decays that are all 0.
    """
    if not groups:
        return
    places = groups_by_name(model, optimizers, groups)
    for number, given in enumerate(groups):
        text = "the weight decay of all its parameters is 0 without it"
        for optimizer, group in [(o, group) for o in optimizers for group in o.param_groups]:
            if number not in [places.get(id(p)) for p in group["params"]]:
                continue
            name = type(optimizer).__name__
            if isinstance(optimizer, torch.optim.LBFGS):
                why = "takes one rate for all parameters; leave the groups out"
                raise refuse("unsupported", "optimizer", name, why, "adamw")
            if "weight_decay" not in group:
                text = f"{name} has no weight decay that this could multiply"
                break
            if group["weight_decay"]:
                text = ""
        if text and given.weight_decay != 1:
            key = f"{_KEY}.{number}.weight_decay"
            raise refuse("idle_knob", key, given.weight_decay, f"{text}; leave it out")

    factors = {
        key: (groups[place].lr, groups[place].weight_decay)
        for key, place in places.items()
        if place is not None
    }
    for optimizer in optimizers:
        _scale(optimizer, factors, (1.0, 1.0))


# of torch: an update's entries have a size that the gradient's size does not change
ADAM_LIKE = (
    torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RMSprop,
    torch.optim.Adagrad,
)  # fmt: skip


def by_width(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Give parameters the factors of a model with model.parametrization=mup.

    They are those of the package mup 1.0 (MuAdam, MuSGD): rate times weight decay stays. Raises
    ConfigError for an optimizer whose rule is not known.
    """
    if (ratio := getattr(model, "width_ratio", 1.0)) == 1:
        return
    for optimizer in optimizers:
        inside, outside = width_factors(optimizer, ratio)
        factors = {id(p): (inside, 1 / inside) for p in hidden_matrices(model)}
        _scale(optimizer, factors, (outside, 1 / outside))


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of the blocks, whose both dimensions grow with the width."""
    names = plain_names(name for name, _ in model.named_parameters())
    pairs = zip(names, model.parameters(), strict=True)
    return [p for name, p in pairs if name.startswith("blocks.") and p.ndim == 2]


def width_factors(optimizer: Optimizer, ratio: float) -> tuple[float, float]:
    """Return the factors on the rate of the matrices of the blocks, and of all else."""
    if (own := getattr(optimizer, "width_factors", None)) is not None:
        factors: tuple[float, float] = own(ratio)
        return factors
    traits: Any = traits_of(optimizer) or optimizer
    if isinstance(optimizer, ADAM_LIKE) or getattr(traits, "like_adam", False):
        return 1 / ratio, 1.0
    if isinstance(optimizer, torch.optim.SGD):
        return 1.0, ratio
    text = (
        f"has no rule for {type(optimizer).__name__}: Adam's holds where each entry is updated by "
        "itself, as far for small gradients as for large ones (torch's Adam and its like, our "
        "Lion; of optimizer=library AdamWScheduleFree, RAdamScheduleFree, AdamW8bit and its like, "
        "AdEMAMix, AdaBelief, LaProp, Lion, SignSGD and Tiger); SGD and our Muon have their own"
    )
    raise refuse("unsupported", "model.parametrization", "mup", text, "standard")


def mup_words(model: Any, optimizers: Sequence[Optimizer]) -> str:
    """Return what model.parametrization=mup changes, and by how much."""
    m, hidden, head = model.width_ratio, hidden_matrices(model), model.blocks[0].attention
    size, texts = (
        sum(p.numel() for p in hidden),
        [f"mup: d_model / base_width {model.base_width} = {m:.4g}"],
    )
    texts.append(
        f"weights of the {len(hidden)} matrices of the blocks ({size:,} parameters) begin "
        f"{m**-0.5:.4g} times as large"
    )
    own = {id(p) for p in hidden}
    for optimizer in optimizers:
        held = set(map(id, held_by(optimizer)))
        inside, outside = width_factors(optimizer, m)
        for what, lr in (("their", inside), ("all other", outside)):
            if lr != 1 and (held & own if what == "their" else held - own):
                texts.append(f"{what} rates x {lr:.4g}, weight decay x {1 / lr:.4g}")
    texts += [f"logits x {1 / m:.4g}", f"attention logits 8 q k / head width {head.head_dim}"]
    return "; ".join(texts)


def _scale(
    optimizer: Optimizer,
    factors: dict[int, tuple[float, float]],
    others: tuple[float, float],
) -> None:
    """Multiply rate and weight decay of each parameter by the `factors` of its id, or by `others`.

    A group of the optimizer is split into those of equal factors; one whose factors are 1 stays as
    it is. The factor on the rate is kept apart from the base rate, which the rows show.
    """
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parts: dict[tuple[float, float], list[nn.Parameter]] = {}
        for p in group["params"]:
            parts.setdefault(factors.get(id(p), others), []).append(p)
        for (lr, decay), parameters in parts.items():
            new = {**group, "params": parameters}
            if lr != 1:
                new["lr_factor"] = group.get("lr_factor", 1.0) * lr
            if decay != 1:
                new["weight_decay"] = group["weight_decay"] * decay
            found.append(new)
    optimizer.param_groups[:] = found
