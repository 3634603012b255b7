"""Optimizers that train at one point and are evaluated at another, such as schedule-free ones.

Their `train()` and `eval()` exchange the two in the parameters: all but a step is at the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp import mesh
from llmexp.optim.states import together
from llmexp.optim.updating import held_by

TRAINED = "train_weights"  # the first of the two, beside the states in a checkpoint


def swaps_weights(optimizer: Optimizer) -> bool:
    """Return whether an optimizer exchanges the weights for evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def begin(optimizer: Any) -> None:
    """Put the weights to train with into the parameters of an optimizer that keeps two sets."""
    if swaps_weights(optimizer):
        optimizer.train()


@contextlib.contextmanager
def evaluating(optimizers: Sequence[Optimizer], module: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Have the weights to evaluate with in the parameters inside.

    Those to train with come back to the bit; they are yielded by the id of their parameter, of
    optimizers with two sets of weights only.
    """
    swapping: list[Any] = [o for o in optimizers if swaps_weights(o)]
    parameters = held_by(*swapping)
    kept = {id(p): p.detach().clone() for p in parameters}
    if not swapping:
        yield kept
        return
    mesh.reshard(module)
    for optimizer in swapping:
        optimizer.eval()
    try:
        yield kept
    finally:
        mesh.reshard(module)
        for optimizer in swapping:
            optimizer.train()
        with torch.no_grad():
            for p in parameters:
                p.copy_(kept[id(p)])


def finish(optimizer: Optimizer) -> None:
    """Make states of what a checkpoint had of them, and put the weights to train with in place."""
    trained = [(p, state.pop(TRAINED, None)) for p, state in optimizer.state.items()]
    for state in optimizer.state.values():
        held = {key: state.pop(key) for key in [*state] if isinstance(state[key], Tensor)}
        state |= together(state, held)
    begin(optimizer)
    with torch.no_grad():
        for p, weights in trained:
            if weights is not None:
                p.copy_(weights)
