"""Hold what every law of a ladder has: its numbers, what it makes of runs that it has not seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llmexp.laws.bootstrap import Ensemble, interval
from llmexp.laws.points import Ladder
from llmexp.laws.surface import Axes, log_losses
from llmexp.settings.values import ConfigError

FAR = 2.05  # decades beyond the runs, past which a prediction is called far


@dataclass(frozen=True)
class Estimate:
    """A number with the percentiles of its draws."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, best: np.ndarray, draws: np.ndarray, log: bool = True) -> Estimate:
        """Return the estimate of the fit and its draws, given as logs or as they are."""
        ends = (float(np.ravel(best)[0]), *interval(draws))
        with np.errstate(over="ignore"):
            return cls(*(float(np.exp(e)) if log else e for e in ends))


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

    names: tuple[str, ...]  # of its exponents

    def __init__(self, ladder: Ladder, axes: Axes, losses: np.ndarray, seed: int) -> None:
        if len(losses) and np.ptp(losses) == 0:
            raise ConfigError(
                f"{ladder.name}: all losses are {losses[0]:g}, so they depend on nothing; give "
                "runs, or a column loss, of which the losses differ"
            )
        self.ladder, self.axes, self.losses, self.seed = ladder, axes, losses, seed
        self.ensemble = Ensemble(axes, np.log(losses), seed)

    @property
    def numbers(self) -> dict[str, Estimate]:
        """Return E, the factors and the exponents."""
        one, many = self.ensemble.law, self.ensemble.laws
        factors, drawn = self.axes.factors(one), self.axes.factors(many)
        k = len(self.axes.logs)
        found = {"E": Estimate.of(one[:, 0], many[:, 0])}
        found |= {"AB"[i]: Estimate.of(factors[:, i], drawn[:, i]) for i in range(k)}
        exponents = ((1 + k + i, name) for i, name in enumerate(self.names))
        return found | {n: Estimate.of(one[:, i], many[:, i], log=False) for i, n in exponents}

    @cached_property
    def knows_e(self) -> bool:
        """Tell whether there is an E: its interval ends above 0, and a law without it fits worse.

        Worse is a sum higher by what F with one degree of freedom has in 5 of 100.
        """
        low = float(np.exp(interval(self.ensemble.laws[:, 0])[0]))
        return low > 0.02 * float(self.losses.min()) and self.ensemble.e_tells()

    @property
    def rest(self) -> np.ndarray:
        """Return by how much each run lies above the law, as a share."""
        law = log_losses(self.ensemble.law, self.axes)[0]
        return np.asarray(np.expm1(np.log(self.losses) - law))

    def without(self, runs: np.ndarray, what: str) -> HoldOut:
        """Return how the law of the other runs predicts these."""
        kept = np.setdiff1d(np.arange(len(self.losses)), runs)
        others = Ensemble(self.axes.take(kept), np.log(self.losses[kept]), self.seed)
        there = self.axes.take(runs)
        best = log_losses(others.law, there).mean(axis=1)
        draws = log_losses(others.laws, there).mean(axis=1)
        draws = draws + others.noises(len(draws), len(runs)).mean(axis=1)
        measured, e = math.exp(float(np.log(self.losses[runs]).mean())), Estimate.of(best, draws)
        inside = e.low <= measured <= e.high
        return HoldOut(what, len(runs), e, measured, measured / e.value - 1, inside)
