"""Fit the surface L(N, D) to a ladder: its rungs, its frontier, what it predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llmexp.laws.law import Estimate, Law
from llmexp.laws.optimum import FlopsBySize, Frontier
from llmexp.laws.points import Ladder, counts_of
from llmexp.settings.labels import plural
from llmexp.settings.values import ConfigError

GAP = 0.1  # relative; budgets lie further apart
SAME = 0.01  # relative; sizes lie further apart
_WIDE = 0.4  # log compute: runs of one budget lie closer together
LEAST = 7  # points that a surface is fitted to


@dataclass(frozen=True)
class Rung:
    """Runs of one budget, or of one size where a ladder has no budgets."""

    runs: np.ndarray  # their places
    compute: float  # natural log of FLOPs: the mean of a budget, the most of a size
    what: str  # budget | size


@dataclass(frozen=True)
class Optimum:
    """The best that a law has at some compute, beside the run with the lowest loss there."""

    flops: float
    runs: int
    parameters: Estimate
    tokens: Estimate
    loss: Estimate
    lowest_loss: float | None = None
    lowest_parameters: float | None = None


class Surface(Law):
    """The surface of a ladder, with all that follows from it."""

    exponents = ("alpha", "beta")

    def __init__(
        self, ladder: Ladder, count: str, target: float | None = None, seed: int = 0
    ) -> None:
        self.count, self.target = count, target  # FLOPs to predict at
        self.sizes, self.tokens, self.flops, losses = ladder.figures(count)
        x, compute = np.log([self.sizes, self.tokens]), np.log(self.flops)
        if why := self.lacking(x):
            text = (
                f"{ladder.name}: has {why}; train at least 3 sizes at 3 budgets, or fit one axis; "
                "for example --form power --by tokens"
            )
            raise ConfigError("cannot_fit", ". ".join([text, *ladder.notes]))
        super().__init__(ladder, x, losses, seed)
        self.rungs = rungs_of_sizes(compute, self.sizes)
        self.frontier = Frontier(self.ensemble.laws, FlopsBySize.of(x[0], compute - x[1]))
        self.last, found = self.rungs[-1].runs, [r.compute for r in self.rungs]
        self.span = min(found), max(found)  # log compute
        largest = math.exp(self.span[1]), f"largest {self.rungs[-1].what}"
        self.ends = (float(self.flops.min()), "smallest run"), largest

    @cached_property
    def exponent(self) -> Estimate:
        """Return by which power of compute the best size grows over the rungs."""
        first, last = map(self.frontier.sizes, self.span)
        return Estimate.of((last - first) / (self.span[1] - self.span[0]), log=False)

    def optimum(self, compute: float, runs: Sequence[int] | np.ndarray = ()) -> Optimum:
        """Return the best at log compute, beside the runs of that rung."""
        f = self.frontier
        n, d, loss = (Estimate.of(find(compute)) for find in (f.sizes, f.tokens, f.losses))
        lowest, size = min(
            ((float(self.losses[i]), float(self.sizes[i])) for i in runs), default=(None, None)
        )
        return Optimum(math.exp(compute), len(runs), n, d, loss, lowest, size)

    @cached_property
    def optima(self) -> list[Optimum]:
        """Return the best of each rung."""
        return [self.optimum(r.compute, r.runs) for r in self.rungs]

    @cached_property
    def predicted(self) -> Optimum:
        """Return the best at the target, else at the largest compute."""
        return self.optimum(self.span[1] if self.target is None else math.log(self.target))

    @cached_property
    def edge(self) -> str:
        """Return smaller, larger or both: where sizes have to be tried; empty where none have to.

        The best of the largest budget has to lie, interval and all, between the tokens per
        parameter of its runs; of all runs where there are no budgets.
        """
        c, of_budget = self.span[1], self.rungs[-1].what == "budget"
        ratios = np.log(self.tokens / self.sizes)[self.last if of_budget else slice(None)]
        best = Estimate.of(self.frontier.tokens(c) - self.frontier.sizes(c), log=False)
        beyond = {
            "smaller": max(best.value, best.high) > ratios.max(),
            "larger": min(best.value, best.low) < ratios.min(),
        }
        return " and ".join(word for word, true in beyond.items() if true)

    @cached_property
    def other_counts(self) -> dict[str, Estimate]:
        """Return the exponent of the best size where N is counted in the other ways."""
        found = {}
        for count in counts_of(self.ladder.points):
            sizes, tokens, _, _ = self.ladder.figures(count)
            if count != self.count and not self.lacking(np.log([sizes, tokens])):
                found[count] = Surface(self.ladder, count, seed=self.seed).exponent
        return found

    def lacking(self, x: np.ndarray) -> str:
        """Return what points lack for a surface, in words; empty where they have all."""
        points = x.shape[1]
        if points < LEAST:
            return f"{plural(points, 'point')}, and a surface needs {LEAST} or more"
        if min(len(set(axis)) for axis in x) < 3:
            return "fewer than 3 sizes, or 3 lengths"
        spread = [np.ones(points), *((axis - axis.mean()) / np.ptp(axis) for axis in x)]
        if np.linalg.svd(spread, compute_uv=False)[-1] < 0.05 * math.sqrt(points) / 4:
            return "tokens that follow from the size alone (or one budget alone)"
        return ""


def rungs_of_sizes(compute: np.ndarray, sizes: np.ndarray) -> list[Rung]:
    """Return the rungs from small to large: budgets with several sizes each, else sizes."""
    groups = _groups(compute, GAP)
    several = [g for g in groups if len(set(sizes[g])) > 2 and np.ptp(compute[g]) < _WIDE]
    if len(several) > 1 and sum(map(len, several)) > 0.6 * len(compute):
        several = [g for g in groups if len(set(sizes[g])) > 1]
        return [Rung(g, float(compute[g].mean()), "budget") for g in several]
    return [Rung(g, float(compute[g].max()), "size") for g in _groups(np.log(sizes), SAME)]


def _groups(logs: np.ndarray, gap: float) -> list[np.ndarray]:
    """Return the places of values that lie together, from small to large."""
    order = np.argsort(logs, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(logs[order]) > math.log1p(gap)) + 1)
