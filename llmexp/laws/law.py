"""Hold what laws of ladders have: numbers, their intervals, what they make of other runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import fdtri

from llmexp.laws.points import Ladder
from llmexp.laws.surface import DELTA, fit_surface, log_losses, refine, slopes
from llmexp.settings.values import ConfigError

DRAWS = 1000
LEVEL = 95  # per cent that an interval holds
_WIDE = 4.0  # usual differences from the law: those beyond do not pull it as squares do


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
    ends: tuple[tuple[float, str], tuple[float, str]]  # of its runs' compute or x, with their names
    last: np.ndarray  # places of the runs at the largest end

    def __init__(self, ladder: Ladder, x: np.ndarray, losses: np.ndarray, seed: int) -> None:
        if np.ptp(losses) == 0:
            raise ConfigError(
                "cannot_fit",
                f"{ladder.name}: all losses are {losses[0]:g}, so they depend on nothing; give "
                "runs, or a column loss, of which the losses differ",
            )
        self.ladder, self.losses, self.seed = ladder, losses, seed
        self.ensemble = Ensemble(x, np.log(losses), seed)

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
