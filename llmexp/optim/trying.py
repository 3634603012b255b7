"""Try optimizers that are none of ours, on tensors, before a run begins.

What a run needs of one is seen so: that it goes on from a checkpoint as if it had not stopped, and
what its steps change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.optim.states import Traits, apart, together
from llmexp.optim.updating import held_by


class Unfit(Exception):
    """Say what is wrong with an optimizer or a model that is tried, in words."""


@dataclass
class TriedTensors:
    """Hold parameters and their optimizers, which are tried by steps of known gradients."""

    parameters: list[nn.Parameter]
    optimizers: Sequence[Optimizer]
    gradients: Callable[[int], list[Tensor]]  # of a step

    def take_steps(self, steps: range) -> None:
        """Take steps by the gradients. Raises Unfit."""
        for number in steps:
            pairs = [*zip(self.parameters, self.gradients(number), strict=True)]
            for p, gradient in pairs:
                p.grad = gradient
            for optimizer in self.optimizers:
                optimizer.step()
            if not all(p.isfinite().all() for p in self.parameters):
                zeros = not any(g[~p.isfinite()].any() for p, g in pairs)
                where = " where gradients are 0" * zeros
                raise Unfit(f"makes values that are not finite{where}; mend its arguments")
            if any(p.grad is not None and p.grad is not g for p, g in pairs):
                raise Unfit("replaces the gradients")

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
        text = "does not resume exactly from a checkpoint: it keeps more than its state and its"
        raise Unfit(f"{text} groups hold, or draws random numbers of its own")
    found = []
    for optimizer, groups in zip(whole.optimizers, before, strict=True):
        pairs = zip(groups, plain_groups(optimizer), strict=True)
        counters = {k for old, new in pairs for k in new if new[k] != old.get(k)}
        held = [t for state in optimizer.state.values() for t in apart(state)[1].values()]
        size = sum(p.nbytes for p in held_by(optimizer))
        states = sum(t.nbytes for t in held) / size
        # torch's split tensors compute what whole ones do
        found.append(Traits(name, tuple(counters), draws, True, False, states, key))
    return whole, found


def plain_groups(optimizer: Optimizer) -> list[dict[str, str]]:
    """Return what each group holds besides its parameters and rate, as text."""
    left = ("params", "lr", "initial_lr")
    return [{k: repr(v) for k, v in g.items() if k not in left} for g in optimizer.param_groups]
