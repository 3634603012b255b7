from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from llmexp import mesh
from llmexp.checkpoint.slices import named_tensors
from llmexp.config.sections import knobs_of
from llmexp.features.ema.config import Knobs
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.step import Outcome, Setup


def make(parts: Parts, setup: Setup) -> Ema:
    decay = knobs_of(parts.config, Knobs).ema
    assert decay is not None
    return Ema(decay, setup.model, setup.module)


class Ema(Feature):
    """Hold average = decay x average + (1 - decay) x weights, taken after each applied update.

    The host does so with the outcome of the step: mostly during the next one, before its update.
    The average begins as a copy of the initial weights, so no start at zero needs a correction. It
    is split over ranks as they are. `average`: the parameters that are trained, by clean name.
    """

    name = "ema"

    def __init__(self, decay: float, model: nn.Module, module: nn.Module) -> None:
        trained = {n: t for n, t in named_tensors(model).items() if t.requires_grad}
        self.average = {name: t.detach().clone() for name, t in trained.items()}
        self._weights = list(trained.values())
        self._decay, self._module = decay, module

    def finished(self, outcome: Outcome) -> None:
        """Take in the weights of an update that was applied; the host does not wait."""
        if not outcome.skipped:
            weights, average = self._held()
            torch._foreach_lerp_(average, weights, 1 - self._decay)

    def evaluate(self, losses: Callable[[str], dict[str, float]]) -> dict[str, float]:
        with self.in_place():
            return losses("val/ema")

    def tensors(self) -> dict[str, Tensor]:
        return self.average

    def begin_tensors(self) -> None:
        weights, average = self._held()
        torch._foreach_copy_(average, weights)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange weights and average inside; both come back to the bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        mesh.reshard(self._module)
        for one, other in zip(*self._held(), strict=True):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    def _held(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's parts of the weights and of their average: the same storage."""
        tensors = ([w.detach() for w in self._weights], list(self.average.values()))
        weights, average = ([mesh.local_part(t) for t in each] for each in tensors)
        return weights, average
