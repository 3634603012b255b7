"""Check what optimizers hold: each parameter of the model once, with a rate."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.config.values import ConfigError
from llmexp.optim.patterns import plain_names
from llmexp.optim.updating import held_by, wrong_rate
from llmexp.system.text import first_of


def as_list(built: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers as a list, with the base rate of each group for the schedule."""
    optimizers = [built] if isinstance(built, Optimizer) else list(built)
    if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
        raise ConfigError(
            "bad_own_part",
            "optimizer: the function must return a torch optimizer or a list of them",
        )
    for group in (g for o in optimizers for g in o.param_groups):
        rate = group.get("lr")
        if isinstance(rate, Tensor) and not rate.is_meta:
            rate = float(rate)
        group.setdefault("initial_lr", rate)
    if wrong := wrong_rate(optimizers):
        raise ConfigError("bad_own_part", f"optimizer: {wrong}")
    return optimizers


def check_held(model: nn.Module, optimizers: Sequence[Optimizer], trained: set[int]) -> None:
    """Raise ConfigError where optimizers hold a parameter twice, or a tensor that is no parameter.

    So where the parameters that are trained are not those of before, of these ids, and where a step
    needs an argument.
    """
    for optimizer in optimizers:  # a window's gradients are there before its update
        for name, one in inspect.signature(optimizer.step).parameters.items():
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                text = (
                    f"the step of {type(optimizer).__name__} needs `{name}`, where a run calls it "
                    "once a step, with nothing, after the backward pass; choose one that needs "
                    "none, such as optimizer=adamw"
                )
                raise ConfigError("unsupported", f"optimizer: {text}")
    given = dict(model.named_parameters())
    names = dict(zip(map(id, given.values()), plain_names(given), strict=True))
    held = Counter(map(id, held_by(*optimizers)))
    now = {id(p) for p in given.values() if p.requires_grad}
    if changed := [names.get(key, "one that is gone") for key in now ^ trained]:
        text = "other parameters are trained than before its function was called"
        raise ConfigError(
            "bad_own_part", f"optimizer: {text}: {first_of(changed)}; do so in the model's function"
        )
    if twice := [names[key] for key, times in held.items() if times > 1 and key in names]:
        raise ConfigError(
            "bad_own_part", f"optimizer: would update {first_of(twice)} more than once in a step"
        )
    if strange := len(held.keys() - names.keys()):
        text = f"holds tensors of its own ({strange}), which no checkpoint would save"
        raise ConfigError("bad_own_part", f"optimizer: {text}; make them parameters of the model")


def not_updated(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Return the names of the parameters that are trained and that no optimizer has."""
    held = set(map(id, held_by(*optimizers)))
    given = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in held}
    return plain_names(given)
