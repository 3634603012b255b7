"""Fit a power law over one axis: E + A x^-p over tokens, compute, or any number of the config."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property

import numpy as np

from llmexp.laws.fitting import rungs
from llmexp.laws.ladders import CELL
from llmexp.laws.law import Estimate, HoldOut, Law
from llmexp.laws.points import Ladder
from llmexp.laws.surface import Axes, log_losses
from llmexp.settings.labels import plural
from llmexp.settings.values import ConfigError

AXES = ("tokens", "flops", "parameters")
LEAST, VALUES = 5, 4  # points, at so many places, that three numbers are fitted to


class Power(Law):
    """The law of a ladder over one axis."""

    names = ("p",)

    def __init__(
        self, ladder: Ladder, count: str, by: str, target: float | None = None, seed: int = 0
    ) -> None:
        self.by, self.count, self.target = by, count, target
        found = [(p.along(by, count), p.loss) for p in ladder.points]
        kept = [(x, loss) for x, loss in found if x is not None and x > 0]
        if by == "flops":
            kept = _lowest(ladder, count)
        if len(kept) < LEAST or len({x for x, _ in kept}) < VALUES:
            raise ConfigError(
                f"{ladder.name}: has {plural(len(kept), 'run')} with {by} above 0, at "
                f"{plural(len({x for x, _ in kept}), 'value')}, and a power law needs {LEAST} runs "
                f"at {VALUES} values; train {'more budgets' if by in AXES else f'more of {by}'}, "
                "or give the paths of more runs"
            )
        x, losses = (np.array(v) for v in zip(*sorted(kept), strict=True))
        self.x = x
        super().__init__(ladder, Axes.of(x), losses, seed)

    @property
    def last(self) -> str:
        """Return what the last runs are called."""
        return f"largest {self.by}"

    @property
    def first(self) -> str:
        """Return what the first runs are called."""
        return f"smallest {self.by}"

    @property
    def below(self) -> float:
        """Return by how many decades the prediction lies below the runs."""
        return math.log10(self.x.min() / (self.target or 1.0))

    def others(self) -> list[str]:
        """Return the axes of a surface, other than its own, in which the runs differ."""
        if self.by == "flops":  # of each budget one run
            return []
        sizes, tokens, _, _ = self.ladder.figures(self.count)
        at = defaultdict(list)  # of a knob only runs of one value: sizes may follow from it
        for i, p in enumerate(self.ladder.points):
            at[None if self.by in AXES else p.along(self.by, self.count)].append(i)
        axes = {"parameters": sizes, "tokens": tokens}
        return [
            k for k, v in axes.items()
            if k != self.by and any(v[i].max() > CELL * v[i].min() for i in at.values())
        ]  # fmt: skip

    @property
    def decades(self) -> float:
        """Return by how many decades the prediction lies beyond the runs."""
        return math.log10((self.target or 1.0) / self.x.max())

    def loss_at(self, x: float) -> Estimate:
        """Return the loss of the law at x."""
        there = self.axes.at(np.array([[math.log(x)]]))
        best, draws = (log_losses(laws, there) for laws in (self.ensemble.law, self.ensemble.laws))
        return Estimate.of(best, draws[:, 0])

    @cached_property
    def held_out(self) -> HoldOut | None:
        """Return how the law without the largest x does there; None with too few other runs."""
        last = self.x == self.x.max()
        if (~last).sum() < LEAST or len(set(self.x[~last])) < VALUES:
            return None
        return self.without(np.flatnonzero(last), self.last)

    def rows(self) -> list[tuple[float, int, float, Estimate]]:
        """Return x, runs, geometric mean of their losses, and the law there."""
        at = defaultdict(list)
        for x, loss in zip(self.x, self.losses, strict=True):
            at[float(x)].append(math.log(loss))
        return [(x, len(v), math.exp(sum(v) / len(v)), self.loss_at(x)) for x, v in at.items()]


def _lowest(ladder: Ladder, count: str) -> list[tuple[float, float]]:
    """Return FLOPs and loss of the lowest run of each budget: those along the optimum."""
    sizes, _, flops, losses = ladder.figures(count)
    found = rungs(np.log(flops), sizes)
    if found[0].what != "budget":
        return list(zip(flops, losses, strict=True))
    best = [min(r.runs, key=lambda i: losses[i]) for r in found]
    return [(flops[i], losses[i]) for i in best]
