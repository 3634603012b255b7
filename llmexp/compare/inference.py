"""Fit one statistical model to all settings of a sweep: which are worse than the best.

The figure of setting i with seed j is y_ij = setting_i + seed_j + e_ij. The residuals of the whole
sweep estimate the noise e. Each setting has a variance of its own, drawn towards the common one
(Smyth 2004, doi 10.2202/1544-6115.1027). All pairs hold together by the studentized range (Tukey);
the verdicts step down: a setting that is shown to be worse is no rival of those that remain.

Where a seed moves some settings more than others, settings that are alike differ by what these few
seeds happened to be, which no residual tells. Tukey's test for one degree of freedom (1949) finds
it: then effects and seeds multiply, setting_i (1 + c seed_j), and intervals are wider by what the
factor varies over seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from llmexp.compare.statistics import at_least, quantile, seeds_needed
from llmexp.system.text import amount

FEW = 3  # seeds from which on its own spread tells something of a setting
STRICT = 0.9  # of the level, where settings share no seeds or have few
WILD = 3.0  # standard errors above the median log variance: from there on a spread is no common one
# The chance that seeds are taken to multiply effects which they do not: with two seeds each, where
# few degrees of freedom find little, a larger one.
MULTIPLY, MULTIPLY_OF_TWO = 0.03, 0.1
# What seeds are taken to add to a difference without blocks, where some are shared: as if they
# spread twice as far as the noise, which makes it sqrt(1 + 2^2) times as wide.
UNBLOCKED = math.sqrt(5)
FAR_OFF = 0.01  # the chance that a seed is called far off where noise is alike and normal


@dataclass(frozen=True)
class Difference:
    """An estimated sum of settings with weights that add up to 0, and its 95 % interval."""

    mean: float
    error: float  # its standard error
    df: float  # degrees of freedom of the error
    seeds: int  # of each setting in it, the fewest
    most: int  # and the most
    rivals: int = 2  # settings among which it was judged, so that all their intervals hold together
    alpha: float = 0.05  # the chance that one of them does not

    @cached_property
    def half(self) -> float:
        """Return the half width of the interval."""
        # Rounded, so that hundreds of settings take few quantiles.
        q = quantile(at_least(self.rivals), round(self.df, 1), self.alpha)
        return q * self.error / math.sqrt(2)

    @property
    def t(self) -> float:
        """Return the size of the difference in standard errors, infinite for exact figures."""
        if self.error > 1e-12 * abs(self.mean):
            return abs(self.mean) / self.error
        return math.inf if self.mean else 0.0

    @property
    def real(self) -> bool:
        """Tell whether the interval leaves out zero."""
        return bool(abs(self.mean) > max(self.half, 1e-12))

    @property
    def vague(self) -> bool:
        """Tell whether few seeds leave one degree of freedom, so that their spread is a guess."""
        return self.seeds < FEW and self.df < 2

    @property
    def bound(self) -> float:
        """Return the largest size that the interval holds."""
        return abs(self.mean) + self.half

    @property
    def basis(self) -> str:
        """Return what it rests on, in words, such as: 3 seeds."""
        most = "" if self.seeds == self.most else f" to {self.most}"
        return f"{self.seeds}{most} seeds"

    @property
    def text(self) -> str:
        """Return the size with its interval: 0.0034 ± 0.0018."""
        return amount(self.mean, self.half)

    @property
    def details(self) -> str:
        """Return what the interval is made of, for those who check it."""
        among = f", for all pairs of {self.rivals} settings at once" * (self.rivals > 2)
        level = f"{100 * (1 - self.alpha):.3g} %"
        error = self.error if self.error > 1e-9 * abs(self.mean) else 0.0  # which is rounding
        known = f"standard error {error:.3g}, degrees of freedom {self.df:.3g}"
        return f"{self.text} ({known}; interval at {level}{among})"

    def seeds_needed(self, size: float) -> int | None:
        """Return the seeds a setting that would find a difference of `size`; None for too many."""
        spread = self.error * math.sqrt(self.seeds)  # of the difference of a single pair of seeds
        df = self.df / max(1, self.seeds - 1)
        return seeds_needed(spread, size, self.rivals, df, self.alpha)


@dataclass(frozen=True)
class Model:
    """The fitted model: what any weighted sum of the settings' figures is, and how uncertain."""

    weights: np.ndarray  # (settings, cells): of each figure in the estimate of each setting
    figures: np.ndarray  # (cells,)
    of_cell: np.ndarray  # (cells,): the setting of each figure
    variances: np.ndarray  # (settings,): of one figure around its setting and seed
    df: np.ndarray  # (settings,): degrees of freedom of each variance
    blocked: bool  # whether seeds are shared, and their own effect is taken out
    apart: bool  # whether nothing but its own seeds tells the variance of a setting
    # (settings,): what each moves together with all others, where seeds multiply effects, as a
    # standard error, and its degrees of freedom
    swing: np.ndarray | None = None
    swing_df: int = 1

    def contrast(self, weights: np.ndarray, rivals: int = 2, alpha: float = 0.05) -> Difference:
        """Estimate a sum of the settings' figures with weights, one a setting, that add up to 0.

        The intervals of all pairs of `rivals` hold together with a chance of 1 - alpha.
        """
        some = np.flatnonzero(weights)
        a = weights[some] @ self.weights[some]
        parts = np.bincount(self.of_cell, a**2 * self.variances[self.of_cell], len(self.variances))
        total = float(parts.sum())
        df = float(parts @ self.df) / total if total > 0 else float(self.df.max(initial=1.0))
        if self.apart and total > 0:
            df = total**2 / float((parts**2 / self.df).sum())  # Welch's
        if self.swing is not None and total > 0:  # Satterthwaite's
            more = float(weights @ self.swing) ** 2
            df = min(df, (total + more) ** 2 / (total**2 / df + more**2 / self.swing_df))
            total += more
        counts = np.bincount(self.of_cell, minlength=len(weights))[weights != 0]
        # a cell minus itself has no seeds
        seeds = int(counts.min(initial=len(a))), int(counts.max(initial=0))
        return Difference(float(a @ self.figures), math.sqrt(total), df, *seeds, rivals, alpha)

    def pair(
        self, i: int, j: int, rivals: int = 2, alpha: float = 0.05, sign: float = 1.0
    ) -> Difference:
        """Estimate the figure of setting j minus that of setting i, times the sign."""
        weights = np.zeros(len(self.variances))
        weights[i] -= sign
        weights[j] += sign
        return self.contrast(weights, rivals, alpha)


def fit_model(seeds: Sequence[Mapping[str, float]]) -> Model | None:
    """Fit the model to the figures of each setting by seed; None where no setting has two.

    Seeds that several settings share are blocks, where they connect all settings and leave enough
    to estimate the noise from. A setting whose spread is far from the others' has a variance of
    its own alone.
    """
    wild = _wild([[*own.values()] for own in seeds])
    cells, blocks, design = _design(seeds, wild)
    count = len(seeds)
    inverse, left = _inverse(design)
    figures = np.array([y for _, _, y in cells])
    of_cell = np.array([i for i, _, _ in cells])
    centred = figures - figures.mean()
    residuals = centred - design @ (inverse @ centred)
    squares = np.bincount(of_cell, residuals**2, count)
    df = np.bincount(of_cell, left, count)
    tame = [i for i in range(count) if i not in wild]
    if df[tame].sum() < 0.5:  # it is a whole number
        return None
    apart = len(tame) == 2 and not blocks and min(len(seeds[i]) for i in tame) > 1
    variances = squares / np.maximum(df, 1e-9)
    if not apart:
        variances[tame], df[tame] = _moderated(squares[tame], df[tame])
    weights = inverse[:count].copy()
    model = Model(weights, figures, of_cell, variances, df, bool(blocks), apart)
    if not blocks:
        return model
    # the figure over the seeds as they are on average
    weights[tame] += inverse[count:].mean(axis=0)
    factor = _factor(left, residuals, design, inverse, inverse @ centred, count)
    if not factor:
        return model
    effects = weights @ figures
    swing = np.zeros(count)
    swing[tame] = factor / math.sqrt(len(blocks)) * (effects[tame] - effects[tame].mean())
    return replace(model, swing=swing, swing_df=len(blocks) - 1)


def _inverse(design: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pseudo-inverse of a design, and the share of each cell's noise that is left.

    By the normal equations: thousands of cells have hundreds of settings.
    """
    inverse = np.linalg.pinv(design.T @ design, 1e-10, hermitian=True) @ design.T
    return inverse, 1 - np.einsum("cs,sc->c", design, inverse)


def _factor(
    left: np.ndarray,
    residuals: np.ndarray,
    design: np.ndarray,
    inverse: np.ndarray,
    estimates: np.ndarray,
    count: int,
) -> float:
    """Return the standard deviation over seeds of the factor by which they multiply effects.

    It is 0 where Tukey's test for one degree of freedom does not find it. `estimates`: of `count`
    settings, then of seeds.
    """
    from scipy.special import stdtr

    both = (design[:, :count] @ estimates[:count]) * (design[:, count:] @ estimates[count:])
    shared = design[:, count:].any(axis=1)
    product = both - design @ (inverse @ both)
    square, spare = float(product @ product), round(float(left[shared].sum())) - 1
    settings = int(design[shared, :count].any(axis=0).sum())
    if settings < 3 or spare < 2 or square <= 0:  # two differ by seeds in one way alone
        return 0.0
    slope = float(product @ residuals) / square
    rest = float(residuals[shared] @ residuals[shared]) - slope**2 * square
    t = slope * math.sqrt(square * spare / max(rest, 1e-300))
    few = len(design) < FEW * count
    if 2 * float(stdtr(spare, -abs(t))) > (MULTIPLY_OF_TWO if few else MULTIPLY):
        return 0.0
    return abs(slope) * float(estimates[count:].std(ddof=1))


_Cell = tuple[int, str, float]  # the setting, the seed, the figure


def _design(
    seeds: Sequence[Mapping[str, float]], wild: Sequence[int]
) -> tuple[list[_Cell], dict[str, int], np.ndarray]:
    """Return the figures that count, the numbers of shared seeds, and the design matrix."""
    cells = [(i, s, y) for i, own in enumerate(seeds) for s, y in sorted(own.items())]
    blocks = _blocks([cell for cell in cells if cell[0] not in wild])
    if blocks:
        cells = [cell for cell in cells if cell[1] in blocks or cell[0] in wild]
    design = np.zeros((len(cells), len(seeds) + len(blocks)))
    for row, (i, s, _) in zip(design, cells, strict=True):
        row[i] = 1.0
        if blocks and i not in wild:
            row[len(seeds) + blocks[s]] = 1.0
    return cells, blocks, design


def far_off(seeds: Sequence[Mapping[str, float]]) -> list[tuple[int, str]]:
    """Return settings with a seed that is far off what all other figures tell of it.

    Each figure is held against the model without it, by Student's t at `FAR_OFF` over all figures
    (Bonferroni): noise that is alike names one in about 1 % of sweeps, in 3.4 % of three settings
    that share no seeds, whose spreads tell little of each other. Of two seeds, and of two
    settings that share seeds, nothing tells which one is off. Settings that are wild without their
    farthest seed too are left aside. What is found is taken out, and the rest looked at again.
    """
    from scipy.special import stdtr

    found, rest = list[tuple[int, str]](), [dict(own) for own in seeds]
    for _ in seeds:
        wild = _wild([_near_middle([*own.values()]) for own in rest])
        tame = [i for i, own in enumerate(rest) if len(own) >= FEW and i not in wild]
        cells, blocks, design = _design([rest[i] for i in tame], ())
        if not tame or (blocks and len(tame) < 3):
            break
        inverse, spare = _inverse(design)
        of_cell = np.array([i for i, _, _ in cells])
        figures = np.array([y for _, _, y in cells])
        centred = figures - figures.mean()
        residuals = centred - design @ (inverse @ centred)
        size = np.abs(residuals) / np.sqrt(spare)
        odd, least = None, FAR_OFF / len(cells)
        farthest = [int(np.where(of_cell == i, size, -1.0).argmax()) for i in range(len(tame))]
        lefts = -(design @ inverse[:, farthest])
        lefts[farthest, range(len(tame))] += 1.0
        for i, (setting, c) in enumerate(zip(tame, farthest, strict=True)):
            left = lefts[:, i]
            without = residuals - left * residuals[c] / spare[c]
            squares = np.bincount(of_cell, without**2)
            df = np.bincount(of_cell, spare - left**2 / spare[c])
            variances = squares / df
            if len(tame) > 2:
                variances, df = _moderated(squares, df)
            p = 2 * float(stdtr(df[i], -size[c] / math.sqrt(max(variances[i], 1e-300))))
            if p < least and size[c] > 1e-9 * abs(figures[c]):  # more than rounding
                odd, least = (setting, cells[c][1]), p
        if odd is None:
            break
        found.append(odd)
        del rest[odd[0]][odd[1]]
    return found


def _near_middle(values: Sequence[float]) -> Sequence[float]:
    """Return values but for the one farthest from their median."""
    return sorted(values, key=lambda y: abs(y - np.median(values)))[:-1]


def _wild(figures: Sequence[Sequence[float]]) -> list[int]:
    """Return the settings whose spread is so large that it says nothing of the others."""
    from scipy.special import zeta

    several = [i for i, own in enumerate(figures) if len(own) > 1]
    if len(several) < 3:
        return []
    df = np.array([len(figures[i]) - 1.0 for i in several])
    spread = np.array([np.var(figures[i], ddof=1) for i in several])
    logs = _log_variances(np.maximum(spread, 1e-300), df)
    # Spreads of settings differ by a factor of two (a standard deviation of 0.7 in the logarithm).
    bound = WILD * np.sqrt(zeta(2, df / 2) + (2 * 0.7) ** 2)
    far = logs - np.median(logs) > bound
    return [i for i, outside in zip(several, far, strict=True) if outside]


def _log_variances(estimates: np.ndarray, df: np.ndarray) -> np.ndarray:
    """Return the logarithms of estimated variances, without the bias that they have."""
    from scipy.special import psi

    return np.asarray(np.log(estimates) - psi(df / 2) + np.log(df / 2))


def _blocks(cells: Sequence[tuple[int, str, float]]) -> dict[str, int]:
    """Return the numbers of the seeds that several settings share.

    There are none where these seeds do not connect all settings, or leave fewer degrees of freedom
    than two seeds that all settings have. Nor where by the number of runs alone, whatever their
    figures, all of them without blocks are expected to tell more than those of shared seeds.
    """
    of_seed: dict[str, set[int]] = {}
    for i, s, _ in cells:
        of_seed.setdefault(s, set()).add(i)
    shared = {s: found for s, found in of_seed.items() if len(found) > 1}
    settings = len({i for i, _, _ in cells})
    reached = {i for i, _, _ in cells[:1]}
    while further := {i for s in shared.values() if s & reached for i in s} - reached:
        reached |= further
    count = sum(map(len, shared.values()))
    spare = count - settings - len(shared) + 1
    if len(reached) < settings or spare < max(1, settings - 1):
        return {}
    own = Counter(i for i, _, _ in cells)
    if count < len(cells) and min(own.values()) >= FEW:
        both = Counter(i for found in shared.values() for i in found)
        pairs = ((len(cells) - settings, min(own.values())), (spare, min(both.values())))
        without, blocked = (quantile(2, df) / math.sqrt(n) for df, n in pairs)
        if UNBLOCKED * without < blocked:
            return {}
    return {s: number for number, s in enumerate(shared)}


def _moderated(squares: np.ndarray, df: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each setting's variance, drawn towards the common one, and its degrees of freedom.

    The prior's degrees of freedom d0 follow from how far the log variances spread beyond what few
    seeds make of equal ones, taken one standard error larger: spreads that are alike by chance
    would else be taken for equal. Settings without seeds of their own to spare have the common
    variance.
    """
    from scipy.special import psi, zeta

    total = float(df.sum())
    pooled = float(squares.sum()) / total
    of_all = np.full(len(df), pooled), np.full(len(df), total)
    known = df > 0.1
    count = int(known.sum())
    if count < 3 or pooled == 0:
        return of_all
    half = df[known] / 2
    logs = _log_variances(np.maximum(squares[known] / df[known], 1e-6 * pooled), df[known])
    spread, expected = float(logs.var(ddof=1)), zeta(2, half)
    excess = float((6 * zeta(4, half) / expected**2).mean())  # kurtosis of a log chi-squared value
    error = spread * math.sqrt(2 / (count - 1) + excess / count)
    beyond = spread + error - float(expected.mean())
    if beyond <= 0:
        return of_all
    d0 = 2 * _inverse_trigamma(beyond)
    common = math.exp(float(logs.mean()) + float(psi(d0 / 2)) - math.log(d0 / 2))
    return (d0 * common + squares) / (d0 + df), np.minimum(d0 + df, total)


def _inverse_trigamma(y: float) -> float:
    """Return the x > 0 with trigamma(x) = y > 0, by Newton's method (Smyth 2004, appendix)."""
    from scipy.special import zeta

    x = 0.5 + 1 / y
    for _ in range(50):
        value = float(zeta(2, x))
        step = value * (1 - value / y) / (-2 * float(zeta(3, x)))
        x += step
        if abs(step) < 1e-10 * x:
            break
    return x


def judged(model: Model, alpha: float = 0.05) -> tuple[int, dict[int, tuple[Difference, bool]]]:
    """Return the setting with the lowest figure, and how each other one stands to it.

    That is its figure minus the best one's, and whether it is worse. They are tested from the
    farthest one (in standard errors) to the nearest, each as the extreme one of those that are left
    until one is not found to be worse. Three settings or more without shared seeds, or with fewer
    than three each, are held to nine tenths of the level: the noisiest one stands out most, and its
    spread is drawn towards the others', so that up to 6.4 % of sweeps would err where 5 % may.
    """
    count = len(model.variances)
    if count > 2 and (not model.blocked or len(model.figures) < FEW * count):
        alpha *= STRICT
    means = model.weights @ model.figures
    # of those that are equal but for rounding the first
    best = int(np.argmax(np.isclose(means, means.min(), 1e-12, 0.0)))
    pairs = {i: model.pair(best, i) for i in range(count) if i != best}
    left, found = count, dict[int, tuple[Difference, bool]]()
    for i in sorted(pairs, key=lambda i: -pairs[i].t):
        d = replace(pairs[i], rivals=left, alpha=alpha)
        worse = len(found) == count - left and d.mean > d.half  # as all before it
        found[i] = d, worse
        left -= worse
    return best, found
