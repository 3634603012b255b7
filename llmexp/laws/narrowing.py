"""Propose the rung, the size or the seed of a ladder that would narrow its prediction most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmexp.compare.known import Known, Step
from llmexp.compare.records import Result
from llmexp.laws.answer import fit
from llmexp.laws.fitting import Surface
from llmexp.laws.surface import slopes
from llmexp.laws.words import flops_text
from llmexp.run.budget import BUDGETS
from llmexp.settings.knobs import SEED
from llmexp.settings.values import ConfigError
from llmexp.system.text import number

AHEAD = 10  # times the largest budget: where the loss is predicted


@dataclass(frozen=True, eq=False)
class Candidate:
    """Runs that could be added: what is given, their log sizes and tokens."""

    key: str
    value: float
    sizes: np.ndarray
    tokens: np.ndarray

    @property
    def given(self) -> str:
        """Return it as an override."""
        text = flops_text(self.value) if self.value >= 1e6 else f"{self.value:.6g}"
        return f"{self.key}={text}"


def rung(c: Result, predict: float | str | None = None) -> Step | None:
    """Return the step that narrows a ladder's prediction most; None for runs that are no ladder.

    Where the best size may lie beyond those that were tried, it is the next size there; below the
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
    found = _candidates(s, c, budget[0], size[0])
    widths = {one: _width(s, one) for one in found}
    best = min(found, key=widths.__getitem__)
    why = f"{best.given} narrows the val loss at {flops_text(s.predicted.flops)} FLOPs most"
    if s.edge:
        why = f"the best size may lie beyond those that were tried: widen to {s.edge} N"
        smallest = _values(c, size[0])[0]
        larger = "larger" in s.edge
        beyond = [one for one in found if one.key == size[0] and (one.value > smallest) == larger]
        best = next(iter(beyond), None) or next(one for one in found if one.key == budget[0])
        if not beyond:
            why = (
                f"{why.partition(':')[0]}, but {size[0]} can go no smaller than {smallest:g}; a "
                "larger budget has a larger best size"
            )
    words = {
        one: f"{one.given} to about ±{width:.2g} for {flops_text(_flops(s, one))} FLOPs"
        for one, width in widths.items()
    }
    why += f" (its interval is ±{_half(s):.2g}): {'; '.join([words.pop(best), *words.values()])}."
    tokens = round(float(np.exp(best.tokens).sum()))
    path = str(known.sweep.path)
    return Step("rung", why, ("resume", path, best.given), len(best.sizes), tokens,
                known.hours(tokens))  # fmt: skip


def _flops(s: Surface, one: Candidate) -> float:
    return float(np.exp(one.tokens + s.frontier.price.at(one.sizes)).sum())


def _half(s: Surface) -> float:
    return (s.predicted.loss.high - s.predicted.loss.low) / 2


def _values(c: Result, key: str) -> list[float]:
    found = {number(r.config.get(key)) for r in c.taking_part}
    return sorted(v for v in found if v)


def _candidates(s: Surface, c: Result, budget: str, size: str) -> list[Candidate]:
    """Return the next size on both sides, the next budget, and all runs with another seed."""
    found, of_sizes, budgets = [], _values(c, size), _values(c, budget)
    x = np.array([number(p.values.get(size)) or 1.0 for p in s.ladder.points])
    line = np.polyfit(np.log(x), np.log(s.sizes), 1)
    whole = all(v == int(v) for v in of_sizes)
    for value in (_next(of_sizes[::-1], whole), _next(of_sizes, whole)):
        if value and value not in of_sizes:
            n = np.full(len(budgets), np.polyval(line, math.log(value)))
            found.append(Candidate(size, value, n, _tokens(s, budget, np.array(budgets), n)))
    n, more = np.log(np.unique(s.sizes)), _next(budgets, whole=False)
    found.append(Candidate(budget, more, n, _tokens(s, budget, np.full(len(n), more), n)))
    seed = 1 + max((int(v) for v in _values(c, SEED)), default=0)
    return [*found, Candidate(SEED, seed, np.log(s.sizes), np.log(s.tokens))]


def _next(values: Sequence[float], whole: bool) -> float:
    """Return the value that goes on: by the same step where the steps are alike, else by ratio."""
    first, before, last = values[-3:] if len(values) > 2 else (0.0, *values[-2:])
    even = whole and first and before - first == last - before
    found = 2 * last - before if even else last * last / before
    found = round(found) if whole else float(f"{found:.3g}")
    return found if found > 0 else last // 2  # 0 below 1


def _tokens(s: Surface, budget: str, values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the log tokens of runs of some budgets and log sizes."""
    each = {
        "train.max_flops": np.log(values) - s.frontier.price.at(sizes),
        "train.tokens_per_parameter": np.log(values) + sizes,
        "train.max_tokens": np.log(values),
    }
    return each.get(budget, np.full(len(sizes), np.log(s.tokens).mean()))


def _width(s: Surface, added: Candidate) -> float:
    """Return about half the interval of the predicted loss with the added runs.

    To the first order: the runs' slopes tell what is known of the law's numbers; the loss of the
    best size moves with these as the loss at that size does.
    """
    c, law = math.log(s.predicted.flops), s.ensemble.law
    best = np.array([[s.frontier.sizes(c)[0]], [s.frontier.tokens(c)[0]]])
    gradient, own = slopes(law, best)[0, :, 0], slopes(law, s.ensemble.x)[0]
    new = slopes(law, np.array([added.sizes, added.tokens]))[0]

    def spread(known: np.ndarray) -> float:
        return float(np.linalg.norm(np.linalg.lstsq(known, gradient)[0]))

    return spread(np.concatenate([own, new], axis=1)) / spread(own) * _half(s)
