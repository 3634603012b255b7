"""Ladders with known laws, and how often intervals hold the truth."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmexp.scaling.ladders import Ladder, LawPoint
from llmexp.scaling.law import Surface

K = 6  # FLOPs a token and parameter


@dataclass(frozen=True)
class Law:
    """E + A N^-alpha + B D^-beta, in closed form."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, n, d):
        return self.e + self.a * n**-self.alpha + self.b * d**-self.beta

    @property
    def exponent(self) -> float:
        return self.beta / (self.alpha + self.beta)

    def size(self, c):
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        return g * (c / K) ** self.exponent

    def best(self, c):
        n = self.size(c)
        return self.loss(n, c / K / n)


# Published fits.
LAWS = {
    "hoffmann": Law(1.69, 406.4, 410.7, 0.34, 0.28),  # arXiv 2203.15556
    "besiroglu": Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658),  # arXiv 2404.10102
    "muennighoff": Law(1.87, 521.0, 1488.0, 0.353, 0.353),  # arXiv 2305.16264
}
FIRST, LAST = 1e18, 1e20  # FLOPs of the budgets


def ladder(
    law: Law, budgets: int, sizes: int, noise: float, seed: int, wide: float = 16.0,
    name: str = "planted", off: float = 1.0, drift: float = 0.0, tails: bool = False,
) -> Ladder:  # fmt: skip
    """Budgets from FIRST to LAST, sizes around the best one of each (times `off`, which moves by a
    factor of exp(`drift`) from the first to the last), noise as a share of the loss."""
    rng = np.random.default_rng([seed, budgets, sizes])
    points = []
    for i, c in enumerate(np.geomspace(FIRST, LAST, budgets)):
        middle = off * math.exp(drift * i / (budgets - 1)) * law.size(c)
        for n in middle * np.geomspace(wide**-0.5, wide**0.5, sizes):
            z = rng.standard_t(4) / math.sqrt(2) if tails else rng.standard_normal()
            loss = law.loss(n, c / K / n) * math.exp(noise * z)
            points.append(LawPoint(f"{len(points)}", {"given": n}, c / K / n, c, loss))
    return Ladder(name, points)


def csv_of(path: Path, points: list[LawPoint]) -> Path:
    """A CSV file with the points."""
    lines = [f"{p.sizes['given']},{p.tokens},{p.loss}" for p in points]
    path.write_text("\n".join(["N,D,loss", *lines]) + "\n")
    return path


def beyond(budgets: int) -> float:
    """One rung beyond the last."""
    return LAST * (LAST / FIRST) ** (1 / (budgets - 1))


FIGURES = ("alpha", "beta", "exponent", "N*", "loss")


def estimates(law: Law, found: Surface, c: float) -> dict[str, tuple[float, float, float, float]]:
    """Truth, estimate and interval of each figure; N* and loss at c."""
    numbers, at = found.numbers, found.optimum(math.log(c))
    pairs = {
        "alpha": (law.alpha, numbers["alpha"]), "beta": (law.beta, numbers["beta"]),
        "exponent": (law.exponent, found.exponent), "N*": (law.size(c), at.parameters),
        "loss": (law.best(c), at.loss),
    }  # fmt: skip
    return {k: (truth, e.value, e.low, e.high) for k, (truth, e) in pairs.items()}


def coverage(law: Law, budgets: int, sizes: int, noise: float, draws: int, **more):
    """Share of ladders whose interval holds the truth, and the bias in standard errors, by
    figure."""
    c = beyond(budgets)
    found = [
        estimates(law, Surface(ladder(law, budgets, sizes, noise, s, **more), "given"), c)
        for s in range(draws)
    ]
    held, bias = {}, {}
    for k in FIGURES:
        rows = np.array([f[k] for f in found])
        truth, value, low, high = rows.T
        held[k] = float(np.mean((low <= truth) & (truth <= high)))
        if k in ("N*", "loss"):
            value, truth = np.log(value), np.log(truth)
        off = value - truth
        bias[k] = float(off.mean() / (off.std() or 1.0))
    return held, bias
