"""Fit the surface L(N, D) to a ladder: its rungs, its frontier, what it predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llmexp.laws.law import Estimate, HoldOut, Law
from llmexp.laws.optimum import Frontier, Price
from llmexp.laws.points import Ladder, counts_of
from llmexp.laws.surface import Axes
from llmexp.settings.labels import plural
from llmexp.settings.values import ConfigError

GAP = 0.1  # relative; budgets lie further apart
SAME = 0.01  # relative; sizes lie further apart
WIDE = 0.4  # log compute: runs of one budget lie closer together
LEAST = 7  # points that a surface is fitted to


@dataclass(frozen=True)
class Rung:
    """Runs of one budget, or of one size where a ladder has no budgets."""

    runs: np.ndarray  # their places
    compute: float  # natural log of FLOPs: the mean of a budget, the most of a size
    what: str  # budget | size

    @property
    def name(self) -> str:
        """Return what the largest of such rungs is called."""
        return f"largest {self.what}"


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

    @property
    def ratio(self) -> float:
        """Return its tokens per parameter."""
        return self.tokens.value / self.parameters.value


class Surface(Law):
    """The surface of a ladder, with all that follows from it."""

    names = ("alpha", "beta")

    def __init__(
        self, ladder: Ladder, count: str, target: float | None = None, seed: int = 0
    ) -> None:
        self.count, self.target = count, target  # FLOPs to predict at
        self.sizes, self.tokens, self.flops, losses = ladder.figures(count)
        _check(ladder.name, self.sizes, self.tokens)
        super().__init__(ladder, Axes.of(self.sizes, self.tokens), losses, seed)
        self.rungs = rungs(np.log(self.flops), self.sizes)

    @cached_property
    def price(self) -> Price:
        """Return the FLOPs a token of a model by its size."""
        return Price.of(self.sizes, self.flops / self.tokens)

    @cached_property
    def best(self) -> Frontier:
        """Return the frontier of the law."""
        return Frontier(self.ensemble.law, self.axes, self.price)

    @cached_property
    def draws(self) -> Frontier:
        """Return the frontiers of its draws."""
        return Frontier(self.ensemble.laws, self.axes, self.price)

    @property
    def span(self) -> tuple[float, float]:
        """Return the first and the last log compute of the rungs."""
        found = [r.compute for r in self.rungs]
        return min(found), max(found)

    @property
    def largest(self) -> float:
        """Return the log of the largest FLOPs that a rung has."""
        return self.span[1]

    @property
    def exponent(self) -> Estimate:
        """Return by which power of compute the best size grows over the rungs."""
        return Estimate.of(
            self.best.exponent(*self.span), self.draws.exponent(*self.span), log=False
        )

    def optimum(self, compute: float, runs: Sequence[int] | np.ndarray = ()) -> Optimum:
        """Return the best at log compute, beside the runs of that rung."""
        c = np.array(compute)
        size, tokens, loss = (
            Estimate.of(getattr(self.best, name)(c), getattr(self.draws, name)(c))
            for name in ("sizes", "tokens", "losses")
        )
        if not len(runs):
            return Optimum(math.exp(compute), 0, size, tokens, loss)
        run = min(runs, key=lambda i: self.losses[i])
        lowest = float(self.losses[run]), float(self.sizes[run])
        return Optimum(math.exp(compute), len(runs), size, tokens, loss, *lowest)

    @cached_property
    def optima(self) -> list[Optimum]:
        """Return the best of each rung."""
        return [self.optimum(r.compute, r.runs) for r in self.rungs]

    @cached_property
    def predicted(self) -> Optimum:
        """Return the best at the target, else at the largest compute."""
        return self.optimum(self.largest if self.target is None else math.log(self.target))

    @property
    def last(self) -> str:
        """Return what the last rung is called."""
        return self.rungs[-1].name

    @property
    def first(self) -> str:
        """Return what the least compute is of."""
        return "smallest run"

    @property
    def below(self) -> float:
        """Return by how many decades the prediction lies below the smallest run."""
        return math.log10(self.flops.min() / self.predicted.flops)

    @property
    def decades(self) -> float:
        """Return by how many decades the prediction lies beyond the largest rung."""
        return (math.log(self.predicted.flops) - self.largest) / math.log(10)

    @cached_property
    def edge(self) -> str:
        """Return smaller, larger or both: where sizes have to be tried; empty where none have to.

        The best of the largest budget has to lie, interval and all, between the tokens per
        parameter of its runs; of all runs where there are no budgets.
        """
        rung = self.rungs[-1]
        runs = rung.runs if rung.what == "budget" else np.arange(len(self.sizes))
        ratios, c = np.log(self.tokens[runs] / self.sizes[runs]), np.array(self.largest)
        best, draws = (f.tokens(c) - f.sizes(c) for f in (self.best, self.draws))
        found = Estimate.of(best, draws, log=False)
        beyond = {
            "smaller": max(found.value, found.high) > ratios.max(),
            "larger": min(found.value, found.low) < ratios.min(),
        }
        return " and ".join(word for word, true in beyond.items() if true)

    @cached_property
    def held_out(self) -> HoldOut | None:
        """Return how the law without the largest rung does there; None with too few other runs."""
        rung = self.rungs[-1]
        kept = np.setdiff1d(np.arange(len(self.sizes)), rung.runs)
        lacking = _lacking(self.sizes[kept], self.tokens[kept])
        return None if lacking else self.without(rung.runs, rung.name)

    def other_counts(self) -> dict[str, Estimate]:
        """Return the exponent of the best size where N is counted in the other ways."""
        found = {}
        for count in counts_of(self.ladder.points):
            if count != self.count and len({p.sizes[count] for p in self.ladder.points}) > 1:
                found[count] = Surface(self.ladder, count, seed=self.seed).exponent
        return found


def rungs(compute: np.ndarray, sizes: np.ndarray) -> list[Rung]:
    """Return the rungs from small to large: budgets with several sizes each, else sizes."""
    groups = _groups(compute, GAP)
    several = [g for g in groups if len(set(sizes[g])) > 2 and np.ptp(compute[g]) < WIDE]
    if len(several) > 1 and sum(map(len, several)) > 0.6 * len(compute):
        several = [g for g in groups if len(set(sizes[g])) > 1]
        return [Rung(g, float(compute[g].mean()), "budget") for g in several]
    return [Rung(g, float(compute[g].max()), "size") for g in _groups(np.log(sizes), SAME)]


def _groups(logs: np.ndarray, gap: float) -> list[np.ndarray]:
    """Return the places of values that lie together, from small to large."""
    order = np.argsort(logs, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(logs[order]) > math.log1p(gap)) + 1)


def _lacking(sizes: np.ndarray, tokens: np.ndarray) -> str:
    """Return what the points lack for a surface, in words; empty where they have all."""
    if len(sizes) < LEAST:
        return f"{plural(len(sizes), 'run')}, and a surface needs {LEAST} or more"
    if len(set(sizes)) < 3 or len(set(tokens)) < 3:
        return "fewer than 3 sizes, or 3 lengths"
    x, y = np.log(sizes), np.log(tokens)
    spread = np.stack([np.ones_like(x), (x - x.mean()) / np.ptp(x), (y - y.mean()) / np.ptp(y)])
    if np.linalg.svd(spread, compute_uv=False)[-1] < 0.05 * math.sqrt(len(x)) / 4:
        return "tokens that follow from the size alone (or one budget alone)"
    return ""


def _check(name: str, sizes: np.ndarray, tokens: np.ndarray) -> None:
    """Raise ConfigError where the points cannot hold a surface."""
    if why := _lacking(sizes, tokens):
        raise ConfigError(
            f"{name}: has {why}; train at least 3 sizes at 3 budgets, or fit one axis: "
            "llmexp fit PATH --form power --by tokens"
        )
