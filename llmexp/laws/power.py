"""Fit a power law over one axis: E + A x^-p over tokens, compute, or any number of the config."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property
from typing import NamedTuple

import numpy as np

from llmexp.laws.fitting import rungs_of_sizes
from llmexp.laws.law import Estimate, Law
from llmexp.laws.points import CELL, Ladder, LawPoint
from llmexp.laws.surface import log_losses
from llmexp.settings.labels import plural
from llmexp.settings.values import ConfigError

AXES = ("tokens", "flops", "parameters")
LEAST, VALUES = 5, 4  # points, at so many places, that three numbers are fitted to


class _Place(NamedTuple):
    """A place on the axis: its runs, the geometric mean of their losses, and the law there."""

    x: float
    runs: int
    loss: float
    law: Estimate


class Power(Law):
    """The law of a ladder over one axis."""

    exponents = ("p",)

    def __init__(
        self, ladder: Ladder, count: str, by: str, target: float | None = None, seed: int = 0
    ) -> None:
        self.by, self.count, self.target = by, count, target
        points = _lowest(ladder, count) if by == "flops" else ladder.points
        found = [(x, p.loss) for p in points if (x := p.along(by, count) or 0) > 0]
        self.x, losses = np.array(sorted(found)).reshape(-1, 2).T
        if why := self.lacking(self.x[None]):
            more = "more budgets" if by in AXES else f"more of {by}"
            text = f"{ladder.name}: has {why}; train {more}, or give the paths of more runs"
            raise ConfigError("cannot_fit", ". ".join([text, *ladder.notes]))
        super().__init__(ladder, np.log([self.x]), losses, seed)
        first, last = float(self.x[0]), float(self.x[-1])
        self.last = np.flatnonzero(self.x == last)
        self.ends = (first, f"smallest {by}"), (last, f"largest {by}")

    def others(self) -> list[str]:
        """Return the axes of a surface, other than its own, in which the runs differ."""
        if self.by == "flops":  # of each budget one run
            return []
        sizes, tokens, _, _ = self.ladder.figures(self.count)
        at = defaultdict(list)  # of a knob only runs of one value: sizes may follow from it
        for i, p in enumerate(self.ladder.points):
            at[None if self.by in AXES else p.along(self.by, self.count)].append(i)
        return [
            name for name, v in (("parameters", sizes), ("tokens", tokens))
            if name != self.by and any(v[i].max() > CELL * v[i].min() for i in at.values())
        ]  # fmt: skip

    def loss_at(self, x: float) -> Estimate:
        """Return the loss of the law at x."""
        return Estimate.of(log_losses(self.ensemble.laws, np.log([[x]]))[:, 0])

    def lacking(self, x: np.ndarray) -> str:
        """Return how many points there are, in words, where they are too few for a power law."""
        points, values = x.size, len(set(x[0]))
        if points >= LEAST and values >= VALUES:
            return ""
        found = f"{plural(points, 'point')} with {self.by} above 0, at {plural(values, 'value')}"
        return f"{found}, and a power law needs {LEAST} at {VALUES} values"

    @cached_property
    def places(self) -> list[_Place]:
        """Return the places of the runs."""
        at = [(x, np.log(self.losses[self.x == x])) for x in sorted(set(self.x.tolist()))]
        return [_Place(x, len(v), math.exp(v.mean()), self.loss_at(x)) for x, v in at]


def _lowest(ladder: Ladder, count: str) -> list[LawPoint]:
    """Return the run of each budget with the lowest loss: those along the optimum."""
    sizes, _, flops, losses = ladder.figures(count)
    found = rungs_of_sizes(np.log(flops), sizes)
    if found[0].what != "budget":
        return ladder.points
    return [ladder.points[min(r.runs, key=losses.__getitem__)] for r in found]
