"""Propose the rung, the size or the seed of a ladder that would narrow its prediction most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llmexp.compare.known import Known, Step
from llmexp.compare.records import Result, listed
from llmexp.laws.answer import fit
from llmexp.laws.figures import flops_text
from llmexp.laws.fitting import Surface
from llmexp.laws.surface import slopes
from llmexp.run.budget import BUDGETS
from llmexp.settings.knobs import SEED
from llmexp.settings.values import ConfigError
from llmexp.system.text import number

AHEAD = 10  # times the largest budget: where the loss is predicted


@dataclass(frozen=True)
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

    Where the best size may lie beyond those that were tried, it is the next size there.
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
        s.target = AHEAD * math.exp(s.largest)
    found = list(_candidates(s, c, budget[0], size[0]))
    widths = [_width(s, one) for one in found]
    best = min(range(len(found)), key=widths.__getitem__)
    why = f"{found[best].given} narrows the val loss at {flops_text(s.predicted.flops)} FLOPs most"
    if s.edge:
        best, why = _widened(s, found, size[0], _values(c, size[0]), budget[0])
    words = [f"{one.given} {_text(s, one, w)}" for one, w in zip(found, widths, strict=True)]
    half = (s.predicted.loss.high - s.predicted.loss.low) / 2
    chosen = found[best]
    why = f"{why} (its interval is ±{half:.2g}): {listed([words[best]], 1)}"
    rest = [w for i, w in enumerate(words) if i != best]
    why += f"; {'; '.join(rest)}." if rest else "."
    tokens = round(float(np.exp(chosen.tokens).sum()))
    path = str(known.sweep.path)
    return Step("rung", why, ("resume", path, chosen.given), len(chosen.sizes), tokens,
                known.hours(tokens))  # fmt: skip


def _widened(
    s: Surface, found: Sequence[Candidate], size: str, tried: Sequence[float], budget: str
) -> tuple[int, str]:
    """Return the place of the next size where the best one may lie, and why.

    Below the smallest size that there is lies none: the best one of the next budget is larger.
    """
    sides = {one.value > tried[0]: i for i, one in enumerate(found) if one.key == size}
    beyond = "the best size may lie beyond those that were tried"
    if (larger := "larger" in s.edge) in sides:
        return sides[larger], f"{beyond}: widen to {s.edge} N"
    next_budget = next(i for i, one in enumerate(found) if one.key == budget)
    return next_budget, (
        f"{beyond}, but {size} can go no smaller than {tried[0]:g}; a larger budget has a larger "
        "best size"
    )


def _text(s: Surface, one: Candidate, width: float) -> str:
    flops = float(np.exp(one.tokens + s.price.at(one.sizes)).sum())
    return f"to about ±{width:.2g} for {flops_text(flops)} FLOPs"


def _values(c: Result, key: str) -> list[float]:
    found = {number(r.config.get(key)) for r in c.taking_part}
    return sorted(v for v in found if v)


def _candidates(s: Surface, c: Result, budget: str, size: str) -> Iterator[Candidate]:
    """Yield the next size on both sides, the next budget, and all runs with another seed."""
    of_sizes, budgets = _values(c, size), _values(c, budget)
    x = np.array([number(p.values.get(size)) or 1.0 for p in s.ladder.points])
    line = np.polyfit(np.log(x), np.log(s.sizes), 1)
    whole = all(v == int(v) for v in of_sizes)
    for value in (_next(of_sizes[::-1], whole), _next(of_sizes, whole)):
        if value and value not in of_sizes:
            n = np.full(len(budgets), np.polyval(line, math.log(value)))
            yield Candidate(size, value, n, _tokens(s, budget, np.array(budgets), n))
    n = np.log(np.unique(s.sizes))
    more = _next(budgets, whole=False)
    yield Candidate(budget, more, n, _tokens(s, budget, np.full(len(n), more), n))
    seeds = [int(v) for v in _values(c, SEED)] or [0]
    yield Candidate(SEED, max(seeds) + 1, np.log(s.sizes), np.log(s.tokens))


def _next(values: Sequence[float], whole: bool) -> float:
    """Return the value that goes on: by the same step where the steps are alike, else by ratio."""
    first, before, last = values[-3:] if len(values) > 2 else (0.0, *values[-2:])
    even = whole and first and before - first == last - before
    found = 2 * last - before if even else last * last / before
    found = round(found) if whole else float(f"{found:.3g}")
    return found if found > 0 else last // 2  # 0 below 1


def _tokens(s: Surface, budget: str, values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the log tokens of runs of some budgets and log sizes."""
    if budget == "train.max_flops":
        return np.asarray(np.log(values) - s.price.at(sizes))
    if budget == "train.tokens_per_parameter":
        return np.asarray(np.log(values) + sizes)
    if budget == "train.max_tokens":
        return np.asarray(np.log(values))
    return np.full(len(sizes), np.log(s.tokens).mean())


def _width(s: Surface, added: Candidate) -> float:
    """Return about half the interval of the predicted loss with the added runs.

    To the first order: the runs' slopes tell what is known of the law's numbers; the loss of the
    best size moves with these as the loss at that size does.
    """
    c = np.array(math.log(s.predicted.flops))
    there = s.axes.at(s.best.sizes(c), s.best.tokens(c))
    gradient = slopes(s.ensemble.law, there)[0, :, 0]
    own = slopes(s.ensemble.law, s.axes)[0]
    new = slopes(s.ensemble.law, s.axes.at(added.sizes, added.tokens))[0]

    def spread(known: np.ndarray) -> float:
        return float(gradient @ np.linalg.pinv(known @ known.T) @ gradient)

    share = math.sqrt(spread(np.concatenate([own, new], axis=1)) / spread(own))
    return share * (s.predicted.loss.high - s.predicted.loss.low) / 2
