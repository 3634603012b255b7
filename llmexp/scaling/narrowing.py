"""Propose the rung, the size or the seed of a ladder that would narrow its prediction most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmexp.compare.next_step import Known, Step
from llmexp.compare.records import TWIN, Result
from llmexp.config.knobs import SEED
from llmexp.config.values import ConfigError
from llmexp.run.budget import BUDGETS
from llmexp.scaling.answer import fit
from llmexp.scaling.law import Surface
from llmexp.scaling.surface import slopes
from llmexp.scaling.words import flops_text
from llmexp.system.text import number

AHEAD = 10  # times the largest budget: where the loss is predicted


@dataclass(frozen=True, eq=False)
class Candidate:
    """Runs that could be added: what is given, their log sizes and tokens.

    All settings of the sweep get them, of which a law takes the best one.
    """

    key: str
    value: float
    runs: int  # of all settings
    sizes: np.ndarray
    tokens: np.ndarray

    @property
    def given(self) -> str:
        """Return it as an override."""
        text = flops_text(self.value) if self.value >= 1e6 else f"{self.value:.6g}"
        return f"{self.key}={text}"


def rung(c: Result, predict: float | str | None = None) -> Step | None:
    """Return the step that narrows a ladder's prediction most; None for runs that are no ladder.

    Where the best size may lie outside the sizes tried, it is the next size there; below the
    smallest size that there is lies none: the best one of the next budget is larger.
    """
    known = Known(c)
    swept = {key for r in c.runs if known.sweep for key in r.swept}
    budget = [k for k in BUDGETS if k in swept]
    size = [k for k in swept if k.startswith("model.") and len(_values(c, k)) > 2]
    if known.sweep is None or len(budget) != 1 or len(size) != 1:
        return None
    try:
        answer = fit([known.sweep.path], predict=predict)
    except ConfigError:
        return None
    if len(answer.laws) > 1 or not answer.surfaces:
        return None
    s = answer.surfaces[0]
    if predict is None:
        s.target = AHEAD * math.exp(s.span[1])
    found = _candidates(s, known, budget[0], size[0])
    loss = s.loss_at(s.predicted.flops)
    half = (loss.high - loss.low) / 2
    widths = [half * _narrowed(s, one) for one in found]
    best = found[int(np.argmin(widths))]
    why = f"{best.given} narrows the val loss at {flops_text(s.predicted.flops)} FLOPs most"
    if s.edge:
        smallest, larger = _values(c, size[0])[0], "larger" in s.edge
        sizes = [one for one in found if one.key == size[0]]
        beyond = [one for one in sizes if (one.value > smallest) == larger]
        best = (beyond or [one for one in found if one.key == budget[0]])[0]
        way = f"but {size[0]} can go no smaller than {smallest:g}; a larger budget has a larger "
        way = f": widen to {s.edge} N" if beyond else f", {way}best size"
        why = f"the best size may lie outside the sizes tried{way}"
    words = {}
    for one, width in zip(found, widths, strict=True):
        flops = one.runs * float(np.exp(one.tokens + s.frontier.price.at(one.sizes)).mean())
        words[one] = f"{one.given} to about ±{width:.2g} for {flops_text(flops)} FLOPs"
    why += f" (its interval is ±{half:.2g}): {'; '.join([words.pop(best), *words.values()])}."
    command = ("resume", str(known.sweep.path), best.given)
    return known.costed("rung", why, command, best.runs, float(np.exp(best.tokens).mean()))


def _values(c: Result, key: str) -> list[float]:
    return sorted(v for v in {number(r.config.get(key)) for r in c.taking_part} if v)


def _candidates(s: Surface, known: Known, budget: str, size: str) -> list[Candidate]:
    """Return the next size on both sides, the next budget, and all runs with another seed."""
    c, swept = known.f, {key for r in known.runs for key in r.swept}
    grid = [(r.config, known.overrides[r.path]) for r in known.runs if not r.config.get(TWIN)]

    def runs(key: str) -> int:
        """Return how many points of the sweep differ in more than a key."""
        rest = swept - {key, TWIN}
        return len({tuple(repr(own.get(k, given.get(k))) for k in rest) for own, given in grid})

    def added(key: str, value: float, budgets: Any, sizes: np.ndarray) -> Candidate:
        """Return runs of some budgets and log sizes."""
        tokens = {
            "train.max_flops": np.log(budgets) - s.frontier.price.at(sizes),
            "train.tokens_per_parameter": np.log(budgets) + sizes,
        }
        own = [number(p.values.get(budget)) or 1.0 for p in s.ladder.points]
        usual = np.log(budgets) + (np.log(s.tokens) - np.log(own)).mean() + 0 * sizes
        both = np.tile([sizes, tokens.get(budget, usual)], len(_values(c, SEED)) or 1)
        return Candidate(key, value, runs(key), *both)

    found, of_sizes, budgets = [], _values(c, size), _values(c, budget)
    x = np.array([number(p.values.get(size)) or 1.0 for p in s.ladder.points])
    line = np.polyfit(np.log(x), np.log(s.sizes), 1)
    whole = all(v == int(v) for v in of_sizes)
    for value in (_next(of_sizes[::-1], whole), _next(of_sizes, whole)):
        if value and value not in of_sizes:
            n = np.full(len(budgets), np.polyval(line, math.log(value)))
            found.append(added(size, value, budgets, n))
    more = _next(budgets, whole=False)
    found.append(added(budget, more, more, np.log(np.unique(s.sizes))))
    seed = 1 + max(map(int, _values(c, SEED)), default=0)
    return [*found, Candidate(SEED, seed, runs(SEED), *np.unique(s.ensemble.x, axis=1))]


def _next(values: Sequence[float], whole: bool) -> float:
    """Return the value that goes on: by the same step where the steps are alike, else by ratio."""
    first, before, last = values[-3:] if len(values) > 2 else (0.0, *values[-2:])
    even = whole and first and before - first == last - before
    found = 2 * last - before if even else last * last / before
    found = round(found) if whole else float(f"{found:.3g}")
    return found if found > 0 else last // 2  # 0 below 1


def _narrowed(s: Surface, added: Candidate) -> float:
    """Return about which share of the interval of the predicted loss is left with added runs.

    To the first order: the runs' slopes tell what is known of the law's numbers; the loss of the
    best size moves with these as the loss at that size does.
    """
    c, law, f = math.log(s.predicted.flops), s.ensemble.law, s.frontier
    own = slopes(law, s.ensemble.x)[0]
    both = np.hstack([own, slopes(law, np.array([added.sizes, added.tokens]))[0]])
    gradient = slopes(law, np.array([f.sizes(c)[:1], f.tokens(c)[:1]]))[0, :, 0]
    now, then = (np.linalg.norm(np.linalg.lstsq(known, gradient)[0]) for known in (own, both))
    return float(then / now)
