"""Judge which of many knobs matter, from few runs: a two-level fraction of all combinations.

Each run witnesses for every knob: an effect is the mean over the half of the runs at one level
minus that over the other half. Several seeds tell the noise. Without them the contrasts do that no
knob makes; where a pair of knobs is seen among these, or they are few, those of all that are small
do (Dong 1993, Statistica Sinica 3, 209). What is found is held to 5 % of false discoveries.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

RATE = 0.05  # of false discoveries
_SPARE = 4  # contrasts that no knob makes, at least, to tell the noise from
_DRAWS = 20_000  # of noise, for the distribution of a contrast over its error


@dataclass(frozen=True)
class Contrast:
    """The difference that a knob makes, or what several combinations of knobs make together."""

    names: tuple[str, ...]  # the key; of a combination the pairs, such as: a x b
    effect: float  # at the second level minus at the first
    half: float  # half width of its 95 % interval
    p: float
    found: bool = False  # among the discoveries; of knobs alone


@dataclass(frozen=True)
class Screen:
    """Hold what a screen shows."""

    runs: int  # settings
    levels: Mapping[str, tuple[object, ...]]  # two of each key, the lower number first
    resolution: int  # 3: knobs are confounded with pairs; 4: pairs with pairs; 5: neither
    knobs: Mapping[str, Contrast]  # the largest effect first
    confounded: Mapping[str, tuple[str, ...]]  # the pairs that stand in the effect of a knob
    others: Sequence[Contrast]  # contrasts that no knob makes

    @property
    def found(self) -> list[str]:
        return [key for key, contrast in self.knobs.items() if contrast.found]

    def better(self, key: str, sign: float) -> object:
        """Return the level of a knob that looks better."""
        return self.levels[key][self.knobs[key].effect * sign < 0]


def spelled(pairs: Sequence[str], names: Mapping[str, str], between: str = " = ") -> str:
    """Return keys, or pairs of them, under their short names."""
    return between.join(" x ".join(names[key] for key in p.split(" x ")) for p in pairs)


def words(factors: int, runs: int) -> list[int]:
    """Return for each factor which base factors its levels follow from, as bits of a number.

    The first ones are the base factors. The others are products of an odd number of them, of all if
    there is one other: the resolution is the highest. Only where these are used up, of any number.
    """
    base = runs.bit_length() - 1
    every = [w for w in range(1, runs) if w.bit_count() > 1]
    if factors == base + 1:
        every = [runs - 1]
    every.sort(key=lambda w: (w.bit_count() % 2 == 0, w.bit_count()))
    return [*(1 << i for i in range(base)), *every][:factors]


def design(factors: int, runs: int) -> list[list[int]]:
    """Return the level, 0 or 1, of each factor in each run; all are 0 in the first one."""
    chosen = words(factors, runs)
    return [[(row & word).bit_count() % 2 for word in chosen] for row in range(runs)]


def screen(
    settings: Sequence[Mapping[str, object]], figures: Sequence[Mapping[str, float]]
) -> Screen | None:
    """Judge the knobs of a screen; None where the settings are no whole fraction.

    `settings`: the values of the keys in each; `figures`: by seed, of which those count that all
    settings have.
    """
    levels = {key: _levels([s[key] for s in settings]) for key in settings[0]}
    if any(len(two) != 2 for two in levels.values()):
        return None
    columns = {k: np.array([1 if s[k] == levels[k][1] else -1 for s in settings]) for k in levels}
    group, names = _group(columns)
    shared = sorted(set.intersection(*map(set, figures)))
    if len(group) != len(settings) or len(settings) < 8 or not shared:
        return None
    pairs = {key: names.pop(_key(column), ()) for key, column in columns.items()}
    alike = max(map(len, names.values()), default=0)
    resolution = 3 if any(pairs.values()) else 4 if alike > 1 else 5
    of_knobs = set(map(_key, columns.values()))
    rest = {at: c for at, c in group.items() if at not in of_knobs and len(set(c)) > 1}
    y = np.array([[seeds[seed] for seed in shared] for seeds in figures])
    titles = [*((key,) for key in levels), *(names.get(at, ()) for at in rest)]
    found, rate = _judged([*columns.values(), *rest.values()], titles, y, len(levels))
    knobs = found[: len(levels)]
    told = zip(knobs, discoveries([c.p for c in knobs], rate), strict=True)
    knobs = [replace(c, found=is_told) for c, is_told in told]
    by_key = {c.names[0]: c for c in sorted(knobs, key=lambda c: -abs(c.effect))}
    return Screen(len(settings), levels, resolution, by_key, pairs, found[len(levels) :])


def _levels(values: Sequence[object]) -> tuple[object, ...]:
    found = list({repr(value): value for value in values}.values())  # some are lists
    numbers = all(type(v) in (int, float) for v in found)
    return tuple(sorted(found) if numbers else found)  # type: ignore[type-var]


def _key(column: np.ndarray) -> bytes:
    """Return what is equal for a column and its opposite."""
    return (column * column[0]).astype(np.int8).tobytes()


def _group(
    columns: Mapping[str, np.ndarray],
) -> tuple[dict[bytes, np.ndarray], dict[bytes, tuple[str, ...]]]:
    """Return all products of the columns, and by the same keys the pairs that make one."""
    one = np.ones(len(next(iter(columns.values()))), dtype=int)
    group = {_key(one): one}
    for column in columns.values():
        if _key(column) not in group and len(group) <= len(one):
            group |= {_key(c * column): c * column for c in list(group.values())}
    names: dict[bytes, tuple[str, ...]] = {}
    for (a, x), (b, y) in itertools.combinations(columns.items(), 2):
        names[_key(x * y)] = (*names.get(_key(x * y), ()), f"{a} x {b}")
    return group, names


def _judged(
    columns: Sequence[np.ndarray], names: Sequence[tuple[str, ...]], y: np.ndarray, knobs: int
) -> tuple[list[Contrast], float]:
    """Return the contrast of each column under its names, knobs first, and the rate to find by.

    `y`: the figures of each setting by seed. Their error is that of the residuals of seeds, else
    one of the contrasts themselves.
    """
    from scipy.special import stdtr, stdtrit

    rate, effects = RATE, np.array([column @ y.mean(axis=1) * 2 / len(y) for column in columns])
    if (seeds := y.shape[1]) > 1:
        left = y - y.mean(axis=1, keepdims=True) - y.mean(axis=0) + y.mean()
        df = (len(y) - 1) * (seeds - 1)
        error = 2 * math.sqrt(float((left**2).sum()) / df / y.size)
        half = np.full(len(effects), float(stdtrit(df, 0.975)) * error)
        p = 2 * stdtr(df, -np.abs(effects) / max(error, 1e-300))
    else:
        limit, by_rest, by_all, rate = _null(len(effects), knobs)
        error = float(_of_small(effects[None])[0])
        half, p = _by(by_all, effects, error)
        # no pair is seen
        if len(by_rest) and np.abs(effects[knobs:]).max() <= limit * error:
            error = float(_of_rest(effects[None], knobs)[0])
            half[:knobs], p[:knobs] = _by(by_rest, effects[:knobs], error)
    return list(map(Contrast, names, effects.tolist(), half.tolist(), p.tolist())), rate


def _by(null: np.ndarray, effects: np.ndarray, error: float) -> tuple[np.ndarray, np.ndarray]:
    """Return half widths and p of effects, by the sizes over their error that noise has."""
    half = np.full(len(effects), null[int(0.95 * len(null))] * error)
    return half, _chances(null, np.abs(effects) / max(error, 1e-300))


def _chances(null: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the chance of so large a size in noise, by its sizes in order."""
    return np.maximum(1 - np.searchsorted(null, sizes) / len(null), 1 / len(null))


def _of_small(effects: np.ndarray) -> np.ndarray:
    """Return the root mean square of the small ones in each row of contrasts.

    Most are noise, so 1.5 medians are near its standard deviation; small is up to 2.5 of that.
    """
    size = np.abs(effects)
    small = size <= 2.5 * 1.5 * np.median(size, axis=1, keepdims=True)
    return np.sqrt((size**2).mean(axis=1, where=small))


def _of_rest(effects: np.ndarray, knobs: int) -> np.ndarray:
    """Return the root mean square of each row's contrasts that no knob makes.

    Those of knobs that are at most twice as large are taken in.
    """
    squares = effects**2
    small = squares <= 4 * squares[:, knobs:].mean(axis=1, keepdims=True)
    small[:, knobs:] = True
    return np.sqrt(squares.mean(axis=1, where=small))


@functools.cache
def _null(count: int, knobs: int) -> tuple[float, np.ndarray, np.ndarray, float]:
    """Return what noise alone makes of a screen with so many contrasts, the first ones of knobs.

    These are the size over the error of all that the largest of the other contrasts exceeds in 1 of
    20 screens (-1 where they are too few to tell the noise); in order the sizes of a knob's
    contrast over its error: by the other contrasts where none exceeds that, and by all; and the
    rate with which `discoveries` finds anything in 1 of 20 screens.
    """
    noise = np.random.default_rng(0).standard_normal((_DRAWS, count))
    over_all = np.abs(noise) / _of_small(noise)[:, None]
    by_all, by_rest, limit = np.sort(over_all.ravel()), np.zeros(0), -1.0
    p = _chances(by_all, over_all[:, :knobs])
    if count - knobs >= _SPARE:
        largest = over_all[:, knobs:].max(axis=1)
        limit = float(np.quantile(largest, 0.95))
        quiet = noise[largest <= limit]
        over_rest = np.abs(quiet[:, :knobs]) / _of_rest(quiet, knobs)[:, None]
        by_rest = np.sort(over_rest.ravel())
        p[largest <= limit] = _chances(by_rest, over_rest)
    # Anything is found where a p in order is at most its place / knobs of what the rate allows.
    least = (np.sort(p) * knobs / np.arange(1, knobs + 1)).min(axis=1)
    allowed = float(np.quantile(least, 0.05))
    return limit, by_rest, by_all, allowed / (1 - allowed)


def discoveries(p: Sequence[float], rate: float = RATE) -> list[bool]:
    """Return which are found with at most this rate of false discoveries.

    Benjamini-Hochberg twice: the first time tells how many are noise at most (Benjamini, Krieger
    and Yekutieli 2006, doi 10.1093/biomet/93.3.491).
    """
    rate /= 1 + rate
    left = len(p) - sum(_stepped(p, rate))
    return _stepped(p, rate * len(p) / left if left else 1.0)


def _stepped(p: Sequence[float], rate: float) -> list[bool]:
    most = max((x for i, x in enumerate(sorted(p), 1) if x <= rate * i / len(p)), default=-1.0)
    return [x <= most for x in p]


def importances(
    trials: Sequence[Mapping[str, object]], keys: Sequence[str], losses: Sequence[float]
) -> dict[str, tuple[float, ...]]:
    """Return the shares of the ranks of a search's losses that knobs explain beyond all others.

    Each has the ends of its 95 % interval beside it, the largest share first; those are left out
    that chance alone could make so large.

    By least squares: a number has a parabola, of its logarithm where it spans a decade; anything
    else has a level each. Intervals are quantiles over resampled trials. A knob is told by an F
    test, with Holm's correction for all of them. Empty where trials are too few.
    """
    from scipy.special import fdtrc

    ranks, every = np.argsort(np.argsort(losses)).astype(float), np.arange(len(trials))
    blocks = [_columns([config.get(key) for config in trials]) for key in keys]

    def design(rows: np.ndarray, without: int = -1) -> np.ndarray:
        kept = (block[rows] for i, block in enumerate(blocks) if i != without)
        return np.hstack([np.ones((len(rows), 1)), *kept])

    def left(rows: np.ndarray, without: int = -1) -> float:
        x, y = design(rows, without), ranks[rows] - ranks[rows].mean()
        squares = (y - x @ np.linalg.lstsq(x, y, rcond=None)[0]) ** 2
        return float(squares.sum()) / (float((y**2).sum()) or 1.0)

    def shares(rows: np.ndarray) -> np.ndarray:
        return np.array([left(rows, i) for i in range(len(blocks))]) - left(rows)

    spare = len(trials) - int(np.linalg.matrix_rank(design(every)))
    if spare < 5:  # degrees of freedom that the noise needs
        return {}
    share, random = shares(every), np.random.default_rng(0)
    again = [shares(random.choice(every, len(every))) for _ in range(400)]
    low, high = np.quantile(again, (0.025, 0.975), axis=0)
    sizes = np.array([block.shape[1] for block in blocks])
    p = fdtrc(sizes, spare, share / sizes / (max(left(every), 1e-12) / spare))
    order = np.argsort(p)
    holm = np.maximum.accumulate(p[order] * np.arange(len(keys), 0, -1)) < 0.05
    told = [i for i in np.argsort(-share) if holm[np.argsort(order)][i]]
    return {keys[i]: (float(share[i]), float(low[i]), float(high[i])) for i in told}


def _columns(values: Sequence[object]) -> np.ndarray:
    """Return what a knob puts into the design."""
    if all(type(v) in (int, float) for v in values):
        x = np.array(values, dtype=float)
        x = np.log(x) if x.min() > 0 and x.max() >= 10 * x.min() else x
        x = (x - x.mean()) / (x.std() or 1.0)
        return np.stack([x, x**2], axis=1)[:, : len(np.unique(x)) - 1]
    levels = sorted(set(map(repr, values)))[1:]
    return np.array([[repr(v) == level for level in levels] for v in values], dtype=float)
