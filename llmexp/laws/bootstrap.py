"""Draw what a ladder could have measured as well, and refit: what intervals are made of."""

from __future__ import annotations

import numpy as np
from scipy.special import fdtri

from llmexp.laws.surface import DELTA, Axes, fit, log_losses, refine, slopes

DRAWS = 1000
LEVEL = 95  # per cent that an interval holds
WIDE = 4.0  # usual differences from the law: those beyond do not pull it as squares do


class Ensemble:
    """The law of some runs, and the laws of runs drawn in their place.

    A draw keeps the sizes and tokens of the runs. Its log losses are those of the law plus noise:
    differences of runs from the law, drawn with replacement, each with a random sign. These are
    differences from nearly the least squares (the fit itself makes some of them 0), each made
    larger by what its run has pulled the law towards itself, and all scaled to the noise that they
    show with the degrees of freedom left. That scale is only known by so many degrees of freedom,
    so each draw has another (chi squared): it makes the intervals Student's.
    """

    def __init__(self, axes: Axes, logs: np.ndarray, seed: int = 0, draws: int = DRAWS) -> None:
        self.axes, self.logs = axes, logs
        law, self.sum = fit(axes, logs)
        self.law = law[None]
        self.free = max(1, len(logs) - len(law))
        rest = np.sort(np.abs(logs - log_losses(self.law, axes)[0]))
        usual = float(np.median(rest[-self.free :]))  # the others are about 0 by the fit
        least, _ = refine(self.law, axes, logs[None], max(DELTA, WIDE * usual))
        rest = logs - log_losses(least, axes)[0]
        self.noise = float(np.sqrt((rest**2).sum() / self.free))
        self._pool = _unpulled(rest, slopes(least, axes)[0], self.noise)
        self._rng = np.random.default_rng([seed, len(logs)])
        drawn = log_losses(self.law, axes) + self.noises(draws, len(logs))
        self.laws, _ = refine(np.repeat(self.law, draws, axis=0), axes, drawn)

    def noises(self, draws: int, runs: int) -> np.ndarray:
        """Return draws of the noise of so many runs."""
        scale = np.sqrt(self.free / self._rng.chisquare(self.free, (draws, 1)))
        signs = self._rng.choice([-1.0, 1.0], (draws, runs))
        return self._rng.choice(self._pool, (draws, runs)) * signs * scale

    def e_tells(self) -> bool:
        """Tell whether the best law with E = 0 fits worse, as F of one degree of freedom tells."""
        more = fit(self.axes, self.logs, with_e=False)[1] / max(self.sum, 1e-300) - 1
        return bool(more * self.free > fdtri(1, self.free, LEVEL / 100))


def _unpulled(rest: np.ndarray, slope: np.ndarray, noise: float) -> np.ndarray:
    """Return differences from the law as if no run had pulled it, of the size `noise`."""
    own = (np.linalg.svd(slope.T, full_matrices=False)[0] ** 2).sum(axis=1)
    free = rest / np.sqrt(np.maximum(1 - own, 0.05))
    return np.asarray(free * (noise / max(float(np.sqrt((free**2).mean())), 1e-300)))


def interval(draws: np.ndarray) -> tuple[float, float]:
    """Return the percentiles that hold 95 % of the draws."""
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(draws, [tail, 100 - tail], axis=0, method="nearest")
    return float(low), float(high)
