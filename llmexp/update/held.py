"""Check what optimizers hold: each parameter of the model once, with a rate; try them on tensors.

What a run needs of an optimizer is seen by trying it: that it goes on from a checkpoint as if it
had not stopped, and what its steps change.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.settings.values import ConfigError
from llmexp.system.text import first_of
from llmexp.update.optim import wrong_rate
from llmexp.update.patterns import plain_names
from llmexp.update.states import Traits, apart, together


def as_list(built: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers as a list, with the base rate of each group for the schedule."""
    optimizers = [built] if isinstance(built, Optimizer) else list(built)
    if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
        raise ConfigError("optimizer: the function must return a torch optimizer or a list of them")
    for optimizer in optimizers:  # a window's gradients are there before its update
        needed = [
            name
            for name, one in inspect.signature(optimizer.step).parameters.items()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        if needed:
            text = (
                f"the step of {type(optimizer).__name__} needs `{needed[0]}`, where a run calls it"
            )
            text += (
                " once a step, with nothing, after the backward pass; choose one that needs none"
            )
            raise ConfigError(f"optimizer: {text}, such as optimizer=adamw")
    for group in (g for o in optimizers for g in o.param_groups):
        rate = group.get("lr")
        if isinstance(rate, Tensor) and not rate.is_meta:
            rate = float(rate)
        group.setdefault("initial_lr", rate)
    if wrong := wrong_rate(optimizers):
        raise ConfigError(f"optimizer: {wrong}")
    return optimizers


def check_held(model: nn.Module, optimizers: Sequence[Optimizer], trained: set[int]) -> None:
    """Raise ConfigError where optimizers hold a parameter twice, or a tensor that is no parameter.

    So where the parameters that are trained are not those of before, of these ids.
    """
    given = dict(model.named_parameters())
    names = dict(zip(map(id, given.values()), plain_names(given), strict=True))
    held = Counter(id(p) for o in optimizers for group in o.param_groups for p in group["params"])
    now = {id(p) for p in given.values() if p.requires_grad}
    if changed := [names.get(key, "one that is gone") for key in now ^ trained]:
        text = "other parameters are trained than before its function was called"
        raise ConfigError(f"optimizer: {text}: {first_of(changed)}; do so in the model's function")
    if twice := [names[key] for key, times in held.items() if times > 1 and key in names]:
        raise ConfigError(f"optimizer: would update {first_of(twice)} more than once in a step")
    if strange := len(held.keys() - names.keys()):
        text = f"holds {strange} that are no parameters of the model, and are saved nowhere"
        raise ConfigError(f"optimizer: {text}; make them attributes of it, in its own function")


def not_updated(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Return the names of the parameters that are trained and that no optimizer has."""
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    given = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in held}
    return plain_names(given)


class Unfit(Exception):
    """Say what is wrong with an optimizer or a model that is tried, in words."""


@dataclass
class TriedTensors:
    """Hold parameters and their optimizers, which are tried by steps of known gradients."""

    parameters: list[nn.Parameter]
    optimizers: Sequence[Optimizer]
    gradients: Callable[[int], list[Tensor]]  # of a step

    def take_steps(self, steps: range, factor: float = 1) -> None:
        """Take steps by a multiple of the gradients. Raises Unfit."""
        for number in steps:
            given = zip(self.parameters, self.gradients(number), strict=True)
            pairs = [(p, factor * gradient) for p, gradient in given]
            for p, gradient in pairs:
                p.grad = gradient
            for optimizer in self.optimizers:
                optimizer.step()
            if not all(p.isfinite().all() for p in self.parameters):
                zeros = not any(g[~p.isfinite()].any() for p, g in pairs)
                where = " where gradients are 0" * zeros
                raise Unfit(f"makes values that are not finite{where}; mend its arguments")
            if any(p.grad is not None and p.grad is not g for p, g in pairs):
                raise Unfit("puts other tensors in the place of the gradients")

    def hand_over(self, other: TriedTensors) -> None:
        """Give another one parameters and states, by way of what a checkpoint holds."""
        with torch.no_grad():
            for p, q in zip(self.parameters, other.parameters, strict=True):
                q.copy_(p)
        for one, two in zip(self.optimizers, other.optimizers, strict=True):
            for here, there in zip(one.param_groups, two.param_groups, strict=True):
                there |= {k: copy.deepcopy(v) for k, v in here.items() if k != "params"}
                for p, q in zip(here["params"], there["params"], strict=True):
                    plain, held = apart(one.state.get(p, {}))
                    two.state[q] = together(plain, {k: v.clone() for k, v in held.items()})


def try_going_on(
    make: Callable[[], TriedTensors], name: str, key: str
) -> tuple[TriedTensors, list[Traits]]:
    """Let tensors go on from the middle of the steps of others, as a resumed run does.

    Return those that were not interrupted, and what the steps have shown of each optimizer, which
    the knob `key` names. Raises Unfit.
    """
    whole, other = make(), make()
    before = [*map(plain_groups, whole.optimizers)]
    torch.default_generator.manual_seed(0)
    numbers = torch.get_rng_state()
    whole.take_steps(range(2))
    draws = not torch.equal(numbers, torch.get_rng_state())
    if not all(isinstance(p, Tensor) for o in whole.optimizers for p in o.state):
        raise Unfit("keeps a state that is of no parameter, which a checkpoint does not hold")
    whole.hand_over(other)
    for trial in (whole, other):
        torch.default_generator.manual_seed(0)
        trial.take_steps(range(2, 4))
    if not all(map(torch.equal, whole.parameters, other.parameters)):
        text = "does not go on from a checkpoint as if it had not stopped: it keeps more than"
        raise Unfit(f"{text} its state and its groups hold")
    found = []
    for optimizer, groups in zip(whole.optimizers, before, strict=True):
        pairs = zip(groups, plain_groups(optimizer), strict=True)
        counters = {k for old, new in pairs for k in new if new[k] != old.get(k)}
        held = [t for state in optimizer.state.values() for t in apart(state)[1].values()]
        size = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
        states = sum(t.nbytes for t in held) / size
        # torch's split tensors compute what whole ones do
        found.append(Traits(name, tuple(counters), draws, True, False, states, key))
    return whole, found


def plain_groups(optimizer: Optimizer) -> list[dict[str, str]]:
    """Return what each group holds besides its parameters and rate, as text."""
    left = ("params", "lr", "initial_lr")
    return [{k: repr(v) for k, v in g.items() if k not in left} for g in optimizer.param_groups]
