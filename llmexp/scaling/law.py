"""Fit laws to ladders: draws of what could have been measured as well, and what follows.

A surface is over sizes and tokens, a power law over one axis.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import fdtri

from llmexp.config.labels import plural
from llmexp.config.values import ConfigError
from llmexp.scaling.ladders import CELL, Ladder, LawPoint, counts_of
from llmexp.scaling.surface import (
    DELTA,
    FlopsBySize,
    Frontier,
    fit_surface,
    log_losses,
    refine,
    slopes,
)
from llmexp.system.text import listed, said

DRAWS = 1000
LEVEL = 95  # per cent that an interval holds
_WIDE = 4.0  # usual differences from the law: those beyond do not pull it as squares do
GAP = 0.1  # relative; budgets lie further apart
SAME = 0.01  # relative; sizes lie further apart
_ONE_BUDGET = 0.4  # log compute: runs of one budget lie closer together
LEAST = 7  # points that a surface is fitted to
OWN_AXES = ("tokens", "flops", "parameters")
LEAST_OF_POWER, VALUES = 5, 4  # points, at so many places, that three numbers are fitted to


@dataclass(frozen=True)
class Estimate:
    """A number with the percentiles that hold 95 % of its draws."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, found: np.ndarray, log: bool = True) -> Estimate:
        """Return the estimate of a figure of the fit (first) and its draws, as logs or as it is."""
        tail = (100 - LEVEL) / 2
        ends = np.percentile(found[1:], [tail, 100 - tail], method="nearest")
        with np.errstate(over="ignore"):
            return cls(*(float(np.exp(v) if log else v) for v in (found[0], *ends)))


class Ensemble:
    """The law of some runs, and the laws of runs drawn in their place: the rows of `laws`.

    A draw keeps the sizes and tokens of the runs. Its log losses are those of the law plus noise:
    differences of runs from the law, drawn with replacement, each with a random sign. These are
    differences from nearly the least squares (the fit itself makes some of them 0), each made
    larger by what its run has pulled the law towards itself, and all scaled to the noise that they
    show with the degrees of freedom left. That scale is only known by so many degrees of freedom,
    so each draw has another (chi squared): it makes the intervals Student's.
    """

    def __init__(self, x: np.ndarray, logs: np.ndarray, seed: int = 0) -> None:
        self.x, self.logs = x, logs
        law, self.sum = fit_surface(x, logs)
        self.law, self.free = law[None], max(1, len(logs) - len(law))
        rest = np.sort(np.abs(logs - log_losses(self.law, x)[0]))
        usual = float(np.median(rest[-self.free :]))  # the others are about 0 by the fit
        least, _ = refine(self.law, x, logs[None], max(DELTA, _WIDE * usual))
        rest = logs - log_losses(least, x)[0]
        self.noise = float(np.sqrt((rest**2).sum() / self.free))
        own = (np.linalg.svd(slopes(least, x)[0].T, full_matrices=False)[0] ** 2).sum(axis=1)
        free = rest / np.sqrt(np.maximum(1 - own, 0.05))  # as if no run had pulled the law
        self._pool = free * (self.noise / max(float(np.sqrt((free**2).mean())), 1e-300))
        self._rng = np.random.default_rng([seed, len(logs)])
        drawn = log_losses(self.law, x) + self.noises(DRAWS, len(logs))
        draws, _ = refine(np.repeat(self.law, len(drawn), axis=0), x, drawn)
        self.laws = np.concatenate([self.law, draws])

    def noises(self, draws: int, runs: int) -> np.ndarray:
        """Return draws of the noise of so many runs."""
        scale = np.sqrt(self.free / self._rng.chisquare(self.free, (draws, 1)))
        signs = self._rng.choice([-1.0, 1.0], (draws, runs))
        return self._rng.choice(self._pool, (draws, runs)) * signs * scale


@dataclass(frozen=True)
class HoldOut:
    """The last runs, predicted from the others: geometric means of losses."""

    what: str
    runs: int
    predicted: Estimate  # of a mean of as many runs, noise and all
    measured: float
    miss: float  # by how much more was measured, as a share
    inside: bool  # the interval holds what was measured


class Law:
    """A law of the losses of a ladder over one axis or two."""

    exponents: tuple[str, ...]
    axis = "FLOPs"  # that its figures are drawn over
    x: np.ndarray  # of its runs, there
    ends: tuple[tuple[float, str], tuple[float, str]]  # of these, with their names
    last: np.ndarray  # places of the runs at the largest end
    target: float | None  # on the axis, to predict at
    places: Any  # what it has where its runs are, from small to large
    predicted: Any  # what it has at the target
    edge: Any  # where sizes have to be tried before there is a best one; empty where none have to

    def __init__(
        self, ladder: Ladder, points: Sequence[LawPoint], x: np.ndarray, seed: int, need: str
    ) -> None:
        """Fit `points` of a ladder, at logs of figures of the axes. Raises ConfigError.

        `need`: what to train where there is no law, after what is lacking.
        """
        self.ladder, self.points, self.seed = ladder, points, seed
        self.losses = np.array([p.loss for p in points])
        if why := self.lacking(x):
            text = f"{ladder.name}: has {why}; {need}"
            if ladder.apart:
                text += f"; ladders are set apart by {listed(ladder.apart)}, a column of words: "
                text += "without it all runs are one ladder"
            notes = " ".join(said(ladder.notes))
            raise ConfigError("cannot_fit", f"{text}. {notes}" if notes else text)
        if np.ptp(self.losses) == 0:
            raise ConfigError(
                "cannot_fit",
                f"{ladder.name}: all losses are {self.losses[0]:g}, so there is no law to fit; "
                "give runs whose losses differ",
            )
        self.ensemble = Ensemble(x, np.log(self.losses), seed)

    def loss_at(self, x: float) -> Estimate:
        """Return the loss of the law on its axis, of a surface that of the best size."""
        raise NotImplementedError

    @property
    def numbers(self) -> dict[str, Estimate]:
        """Return E, the factors and the exponents."""
        names = ["E", *"AB"[: len(self.exponents)], *self.exponents]
        columns = zip(names, self.ensemble.laws.T, strict=True)
        return {k: Estimate.of(column, log=k in "EAB") for k, column in columns}

    @cached_property
    def knows_e(self) -> bool:
        """Tell whether there is an E: its interval ends above 0, and a law without it fits worse.

        Worse is a sum higher by what F with one degree of freedom has in 5 of 100.
        """
        e = self.ensemble
        more = fit_surface(e.x, e.logs, with_e=False)[1] / max(e.sum, 1e-300) - 1
        worse = more * e.free > fdtri(1, e.free, LEVEL / 100)
        return bool(worse) and self.numbers["E"].low > 0.02 * float(self.losses.min())

    def at(self, *x: np.ndarray) -> np.ndarray:
        """Return the losses of the law itself at logs of figures of its axes."""
        return np.exp(log_losses(self.ensemble.law, np.array(x)))[0]

    @property
    def rest(self) -> np.ndarray:
        """Return by how much each run lies above the law, as a share."""
        return self.losses / self.at(*self.ensemble.x) - 1

    def lacking(self, x: np.ndarray) -> str:
        """Return what runs at logs of figures of the axes lack for a law; empty: nothing."""
        raise NotImplementedError

    @cached_property
    def held_out(self) -> HoldOut | None:
        """Return how the law without the last runs does there; None with too few others."""
        e, runs = self.ensemble, self.last
        kept = np.setdiff1d(np.arange(len(self.losses)), runs)
        if self.lacking(e.x[:, kept]):
            return None
        others = Ensemble(e.x[:, kept], e.logs[kept], self.seed)
        there = log_losses(others.laws, e.x[:, runs]).mean(axis=1)
        there[1:] += others.noises(len(there) - 1, len(runs)).mean(axis=1)
        predicted, measured = Estimate.of(there), math.exp(float(e.logs[runs].mean()))
        inside, miss = predicted.low <= measured <= predicted.high, measured / predicted.value - 1
        return HoldOut(self.ends[1][1], len(runs), predicted, measured, miss, inside)


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
    parameters: Any  # these three are an Estimate, or None: it lies beyond what was tried
    tokens: Any
    loss: Any
    lowest_loss: float | None = None
    lowest_parameters: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.parameters and self.tokens.value / self.parameters.value


class Surface(Law):
    """The surface of a ladder, with all that follows from it."""

    exponents = ("alpha", "beta")

    def __init__(
        self,
        ladder: Ladder,
        count: str,
        target: float | None = None,
        seed: int = 0,
        place: tuple[float, float] | None = None,
    ) -> None:
        self.count, self.target, self._asked = count, target, place  # FLOPs to predict at, or that
        self.sizes, self.tokens, self.x, _ = ladder.figures(count)
        x, compute = np.log([self.sizes, self.tokens]), np.log(self.x)
        need = f"train at least 3 sizes at 3 budgets, or fit one axis to {LEAST_OF_POWER} points"
        need += f" at {VALUES} values; for example --form power --by tokens"
        super().__init__(ladder, ladder.points, x, seed, need)
        self.rungs = rungs_of_sizes(compute, self.sizes)
        self.frontier = Frontier(self.ensemble.laws, FlopsBySize.of(x[0], compute - x[1]))
        self.last, found = self.rungs[-1].runs, [r.compute for r in self.rungs]
        self.span = min(found), max(found)  # log compute
        largest = math.exp(self.span[1]), f"largest {self.rungs[-1].what}"
        self.ends = (float(self.x.min()), "smallest run"), largest

    @property
    def _compute(self) -> float:
        return self.span[1] if self.target is None else math.log(self.target)

    @cached_property
    def exponent(self) -> Estimate:
        """Return by which power of compute the best size grows over the rungs."""
        first, last = map(self.frontier.sizes, self.span)
        return Estimate.of((last - first) / (self.span[1] - self.span[0]), log=False)

    def loss_at(self, x: float) -> Estimate:
        return Estimate.of(self.frontier.losses(math.log(x)))

    @cached_property
    def place(self) -> tuple[float, float] | None:
        """Return the size and the tokens to predict at: as asked for, else where none is the best.

        There it is that of the tokens per parameter that were tried and lie next to the best ones.
        """
        if self._asked or not self.edge:
            return self._asked
        price, compute = self.frontier.price, self._compute
        tried = np.log(self.tokens / self.sizes)
        best = self.frontier.tokens(compute)[0] - self.frontier.sizes(compute)[0]
        ratio = np.clip(best, tried.min(), tried.max())
        x = np.array(compute / 2)
        for _ in range(20):  # Newton's steps to the size of which these tokens take that compute
            x = x - (x + ratio + price.at(x) - compute) / (1 + price.slope(x))
        return float(np.exp(x)), float(np.exp(x + ratio))

    @cached_property
    def there(self) -> Estimate | None:
        """Return the loss at `place`; None without one."""
        if self.place is None:
            return None
        return Estimate.of(log_losses(self.ensemble.laws, np.log(self.place)[:, None])[:, 0])

    def optimum(self, compute: float, runs: Sequence[int] | np.ndarray = ()) -> Optimum:
        """Return the best at log compute, beside the runs of that rung."""
        f = self.frontier
        n, d, loss = (Estimate.of(find(compute)) for find in (f.sizes, f.tokens, f.losses))
        lowest, size = min(
            ((float(self.losses[i]), float(self.sizes[i])) for i in runs), default=(None, None)
        )
        return Optimum(math.exp(compute), len(runs), n, d, loss, lowest, size)

    @cached_property
    def places(self) -> list[Optimum]:
        """Return the best of each rung."""
        return [self._told(self.optimum(r.compute, r.runs)) for r in self.rungs]

    @cached_property
    def predicted(self) -> Optimum:
        """Return the best at the target, else at the largest compute."""
        return self._told(self.optimum(self._compute))

    def _told(self, best: Optimum) -> Optimum:
        """Return it without figures where they would be guesses."""
        return replace(best, parameters=None, tokens=None, loss=None) if self.edge else best

    @cached_property
    def edge(self) -> str:
        """Return smaller, larger or both: where sizes have to be tried; empty where none have to.

        The best of the largest budget has to lie, interval and all, between the tokens per
        parameter of its runs; of all runs where there are no budgets.
        """
        c, of_budget = self.span[1], self.rungs[-1].what == "budget"
        ratios = np.log(self.tokens / self.sizes)[self.last if of_budget else slice(None)]
        best = Estimate.of(self.frontier.tokens(c) - self.frontier.sizes(c), log=False)
        smaller = bool(max(best.value, best.high) > ratios.max())
        larger = bool(min(best.value, best.low) < ratios.min())
        return " and ".join(["smaller"] * smaller + ["larger"] * larger)

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
    several = [g for g in groups if len(set(sizes[g])) > 2 and np.ptp(compute[g]) < _ONE_BUDGET]
    if len(several) > 1 and sum(map(len, several)) > 0.6 * len(compute):
        several = [g for g in groups if len(set(sizes[g])) > 1]
        return [Rung(g, float(compute[g].mean()), "budget") for g in several]
    return [Rung(g, float(compute[g].max()), "size") for g in _groups(np.log(sizes), SAME)]


def _groups(logs: np.ndarray, gap: float) -> list[np.ndarray]:
    """Return the places of values that lie together, from small to large."""
    order = np.argsort(logs, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(logs[order]) > math.log1p(gap)) + 1)


class _Place(NamedTuple):
    """A place on the axis: its runs, the geometric mean of their losses, and the law there."""

    x: float
    runs: int
    loss: float | None
    law: Estimate


class Power(Law):
    """The law of a ladder over one axis."""

    exponents = ("p",)
    edge = ""

    def __init__(
        self, ladder: Ladder, count: str, by: str, target: float | None = None, seed: int = 0
    ) -> None:
        self.axis, self.count, self.target = by, count, target
        points = _lowest(ladder, count) if by == "flops" else ladder.points
        found = sorted((p.along(by, count) or 0, p.loss, i) for i, p in enumerate(points))
        found = [one for one in found if one[0] > 0]
        self.x = np.array([x for x, _, _ in found])
        need = f"train more {'budgets' if by in OWN_AXES else f'of {by}'}"
        need += ", or give the paths of more runs"
        super().__init__(ladder, [points[i] for _, _, i in found], np.log([self.x]), seed, need)
        first, *_, last = self.x.tolist()
        self.last = np.flatnonzero(self.x == last)
        self.ends = (first, f"smallest {by}"), (last, f"largest {by}")

    def others(self) -> list[str]:
        """Return the axes of a surface, other than its own, in which the runs differ."""
        if self.axis == "flops":  # of each budget one run
            return []
        sizes, tokens, _, _ = self.ladder.figures(self.count)
        at = defaultdict(list)  # of a knob only runs of one value: sizes may follow from it
        for i, p in enumerate(self.ladder.points):
            at[None if self.axis in OWN_AXES else p.along(self.axis, self.count)].append(i)
        return [
            name for name, v in (("parameters", sizes), ("tokens", tokens))
            if name != self.axis and any(v[i].max() > CELL * v[i].min() for i in at.values())
        ]  # fmt: skip

    def loss_at(self, x: float) -> Estimate:
        return Estimate.of(log_losses(self.ensemble.laws, np.log([[x]]))[:, 0])

    def lacking(self, x: np.ndarray) -> str:
        """Return how many points there are, in words, where they are too few for a power law."""
        points, values = x.size, len(set(x[0]))
        if points >= LEAST_OF_POWER and values >= VALUES:
            return ""
        found = f"{plural(points, 'point')} with {self.axis} above 0, at {plural(values, 'value')}"
        return f"{found}, and a power law needs {LEAST_OF_POWER} at {VALUES} values"

    @cached_property
    def places(self) -> list[_Place]:
        """Return the places of the runs."""
        at = {x: np.log(self.losses[self.x == x]) for x in self.x.tolist()}
        return [_Place(x, len(v), math.exp(v.mean()), self.loss_at(x)) for x, v in at.items()]

    @cached_property
    def predicted(self) -> Any:
        """Return its loss at the target; None without one."""
        at = self.target
        return None if at is None else _Place(at, 0, None, self.loss_at(at))


def _lowest(ladder: Ladder, count: str) -> list[LawPoint]:
    """Return the run of each budget with the lowest loss: those along the optimum."""
    sizes, _, flops, losses = ladder.figures(count)
    found = rungs_of_sizes(np.log(flops), sizes)
    if found[0].what != "budget":
        return ladder.points
    return [ladder.points[min(r.runs, key=losses.__getitem__)] for r in found]
